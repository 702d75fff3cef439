"""The commands for spoken replies and for speech as input."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from palaver.errors import RequestError
from palaver.messages import Role
from palaver.repl import strings
from palaver.repl.command_table import CommandGroup, complete_paths, escape_message, fixed_choices
from palaver.repl.commands.attachments import parse_path, read_file
from palaver.repl.input import StreamLineSource, TypedLine
from palaver.repl.settings import parse_switch

if TYPE_CHECKING:
    from palaver.repl.session import Session
    from palaver.voice.base import VoiceSettings

commands = CommandGroup(strings.GROUP_VOICE)


@commands.command("voice", choices=fixed_choices("on", "off", "save"))
async def voice(session: Session, arguments: str) -> None:
    from palaver.voice.base import VoiceSettings

    match arguments.split(maxsplit=1):
        case []:
            active = session.voice.voice
            session.screen.note(
                strings.VOICE_IS_ON.format(by=_by_name(active)) if active is not None else strings.VOICE_IS_OFF
            )
        case [word, *name] if parse_switch(word) is True:
            await _turn_on(session, VoiceSettings(name[0].strip() if name else ""))
        case [word] if parse_switch(word) is False:
            session.voice.turn_off()
            await session.cursor.set_parameters(spoken=None)
            session.screen.note(strings.VOICE_OFF)
        case ["save", *name]:
            await _save(session, name[0].strip() if name else "")
        case _:
            raise RequestError(strings.VOICE_USAGE)


async def _turn_on(session: Session, settings: VoiceSettings) -> None:
    from palaver.voice.base import VoiceMissing

    try:
        player = await session.voice.turn_on(settings)
    except VoiceMissing as missing:
        session.screen.note(strings.VOICE_NOT_INSTALLED.format(reason=missing))
        return
    await session.cursor.set_parameters(spoken=True)
    by = _by_name(settings)
    if player is not None:
        session.screen.note(strings.VOICE_PLAYED.format(by=by, player=player.name))
    else:
        session.screen.note(strings.VOICE_TO_FILES.format(by=by, folder=session.voice.sound_folder))


async def _save(session: Session, name: str) -> None:
    from palaver.repl.voice import write_sound

    reply = await session.cursor.last_message(Role.ASSISTANT)
    if reply is None or not reply.text.strip():
        raise RequestError(strings.VOICE_NOTHING)
    path = parse_path(name or f"{reply.id}.wav")
    samples = await session.wait_for(session.voice.synthesize(reply.text), strings.SPEAKING)
    await asyncio.to_thread(write_sound, path, samples)
    session.screen.note(strings.VOICE_SAVED.format(path=path))


@commands.command("listen", choices=complete_paths)
async def listen(session: Session, arguments: str) -> None:
    """Transcribes a file into the prompt, where the text can be edited before it is sent."""
    if not arguments.strip():
        raise RequestError(strings.LISTEN_USAGE)
    data, name = await read_file(arguments)
    text = await session.wait_for(session.chat.transcribe(data, name), strings.LISTENING)
    if not text:
        raise RequestError(strings.HEARD_NOTHING.format(name=name))
    if isinstance(session.lines, StreamLineSource):
        session.screen.note(strings.HEARD.format(name=name, text=text))
    else:
        session.initial_line = TypedLine(escape_message(text))


def _by_name(voice: VoiceSettings) -> str:
    return strings.VOICE_BY.format(name=voice.name) if voice.name else ""
