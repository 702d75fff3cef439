"""The voice of a session: replies are spoken while they come, through a player, or into files where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from palaver.chat.turn_log import LogEntry
from palaver.errors import PalaverError
from palaver.events import AnswerDelta, Failed, Finished, ReadEvent, Snapshot
from palaver.generation import Finish
from palaver.repl import players
from palaver.repl.players import Playing, Program
from palaver.voice.audio_format import FORMS, encode_audio
from palaver.voice.base import Samples, VoiceSettings, silence
from palaver.voice.loader import SpeakerCache
from palaver.voice.speech import Speech, synthesize

Tell = Callable[[str], None]


class Reading:
    """One reply that is read aloud. What was `known` before is not said again."""

    def __init__(self, speech: Speech, known: int, program: Program | None, path: Path, tell: Tell) -> None:
        self._speech = speech
        self._known = known
        self._path = path
        self._tell = tell
        self._playing = Playing(program) if program is not None else None
        self._task = asyncio.create_task(self._sound())

    def take(self, entry: LogEntry) -> None:
        match entry.event:
            case Finished(finish, tail=tail):
                self._feed(tail)
                self.stop() if finish is Finish.STOPPED else self._speech.end()
            case Failed():
                self.stop()
            case Snapshot(message) if not self._known:
                self._speech.feed(message.text)
            case AnswerDelta() as delta if entry.number > self._known:
                self._feed((delta,))
            case _:
                pass

    def _feed(self, events: tuple[ReadEvent, ...]) -> None:
        for event in events:
            if isinstance(event, AnswerDelta):
                self._speech.feed(event.text)

    def leave(self) -> None:
        """No more comes, ended or not."""
        self._speech.end()

    def stop(self) -> None:
        """At once."""
        self._speech.stop()
        if self._playing is not None:
            self._playing.stop()

    async def heard(self) -> None:
        """Waits for its end."""
        with suppress(asyncio.CancelledError):
            await self._task

    async def _sound(self) -> None:
        try:
            pieces = []
            async for piece in self._speech:
                if self._playing is not None:
                    await self._playing.play(piece.samples)
                else:
                    pieces.append(piece.samples)
            if self._playing is not None:
                await self._playing.end()
            elif any(len(samples) for samples in pieces):
                await asyncio.to_thread(write, self._path, np.concatenate(pieces))
                self._tell(f"Spoken into {self._path}")
        except PalaverError as error:
            self._tell(f"The voice failed: {error}")
        finally:
            self.stop()


class SessionVoice:
    """Whether replies are spoken, and by whom."""

    def __init__(self, folder: Path, tell: Tell, speakers: SpeakerCache | None = None) -> None:
        self._folder = folder
        self._tell = tell
        self._speakers = speakers or SpeakerCache()
        self._reading: Reading | None = None
        self.voice: VoiceSettings | None = None
        """None: replies are not spoken."""

    async def turn_on(self, voice: VoiceSettings) -> Program | None:
        """Raises where there is no such voice, or none at all. What it will be heard through; None: files."""
        (await self._speakers.current()).language(voice)
        self.voice = voice
        return players.found()

    def turn_off(self) -> None:
        self.stop()
        self.voice = None

    async def read(self, reply_id: str, known: int = 0) -> Reading | None:
        """Begins to read a reply aloud. An earlier one is cut off."""
        self.stop()
        if self.voice is None:
            return None
        speech = Speech(await self._speakers.current(), self.voice)
        path = self._folder / "spoken" / f"{reply_id}.wav"
        self._reading = Reading(speech, known, players.found(), path, self._tell)
        return self._reading

    def stop(self) -> None:
        if self._reading is not None:
            self._reading.stop()

    async def heard(self) -> None:
        """Waits until what is being said was heard."""
        if self._reading is not None:
            await self._reading.heard()

    async def close(self) -> None:
        self.stop()
        await self.heard()
        await self._speakers.close()

    async def whole(self, text: str) -> Samples:
        pieces = [piece.samples async for piece in synthesize(text, await self._speakers.current(), self.voice)]
        return np.concatenate(pieces) if pieces else silence()


def write(path: Path, samples: Samples) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_audio(samples, FORMS["wav"]))
