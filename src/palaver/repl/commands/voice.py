"""The command for spoken replies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from palaver.errors import RequestError
from palaver.messages import Role
from palaver.repl.command_table import CommandGroup
from palaver.repl.completion import fixed_choices

if TYPE_CHECKING:
    from palaver.repl.session import Session
    from palaver.voice.base import VoiceSettings

commands = CommandGroup("Voice")


@commands.command(
    "voice",
    "speak replies, or stop speaking; save the last one as a sound file; bare: what is set",
    "[on [NAME] | off | save [FILE]]",
    (),
    fixed_choices("on", "off", "save"),
)
async def voice(session: Session, arguments: str) -> None:
    from palaver.voice.base import VoiceSettings

    match arguments.split(maxsplit=1):
        case []:
            active = session.voice.voice
            session.screen.note(f"Replies are {f'spoken{_by_name(active)}' if active is not None else 'not spoken'}.")
        case ["on", *name]:
            await _turn_on(session, VoiceSettings(name[0].strip() if name else ""))
        case ["off"]:
            session.voice.turn_off()
            await session.cursor.set_parameters(spoken=None)
            session.screen.note("Replies are no longer spoken.")
        case ["save", *name]:
            await _save(session, name[0].strip() if name else "")
        case _:
            raise RequestError("It is /voice on, /voice on NAME, /voice off or /voice save FILE.")


async def _turn_on(session: Session, settings: VoiceSettings) -> None:
    player = await session.voice.turn_on(settings)
    await session.cursor.set_parameters(spoken=True)
    output = f"played by {player.name}" if player else "saved as files, because no player was found"
    session.screen.note(
        f"Replies are spoken{_by_name(settings)}, {output}. Ctrl+C or the next message stops the sound."
    )


async def _save(session: Session, name: str) -> None:
    from palaver.repl.voice import write_sound

    reply = await session.cursor.last_message(Role.ASSISTANT)
    if reply is None or not reply.text.strip():
        raise RequestError("There is no reply to speak yet.")
    path = Path(name or f"{reply.id}.wav").expanduser()
    samples = await session.wait_for(session.voice.synthesize(reply.text), "speaking")
    await asyncio.to_thread(write_sound, path, samples)
    session.screen.note(f"Spoken into {path}")


def _by_name(voice: VoiceSettings) -> str:
    return f" by {voice.name}" if voice.name else ""
