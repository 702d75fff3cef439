"""The voice of a session: replies are spoken while they come, through a player, or into files where there is none."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palaver.chat.turn_log import LogEntry
from palaver.errors import PalaverError
from palaver.events import AnswerDelta, Failed, Finished, ReadEvent, Snapshot
from palaver.generation import Finish
from palaver.voice.audio_format import FORMS, encode_audio, pcm, wav_header
from palaver.voice.base import Samples, VoiceSettings, silence
from palaver.voice.loader import SpeakerCache
from palaver.voice.speech import Speech, synthesize

_PLAYERS = (
    ("pw-cat", "--playback", "--raw", "--rate", "24000", "--channels", "1", "--format", "s16", "-"),
    ("paplay", "--raw", "--rate=24000", "--channels=1", "--format=s16le"),
    ("aplay", "-q", "-"),
    ("ffplay", "-nodisp", "-autoexit", "-loglevel", "quiet", "-i", "-"),
    ("play", "-q", "-t", "wav", "-"),
)
_RAW = ("pw-cat", "paplay")
"""Those that want samples alone; the others want a WAV file, of any length."""
_BY_FILE = "afplay"


@dataclass(frozen=True, slots=True)
class PlayerProgram:
    command: Sequence[str]

    @property
    def name(self) -> str:
        return Path(self.command[0]).name


def find_player() -> PlayerProgram | None:
    """The first player that is installed."""
    for name, *options in (*_PLAYERS, (_BY_FILE,)):
        if path := shutil.which(name):
            return PlayerProgram((path, *options))
    return None


class SoundPlayer:
    """Sound as it comes, through one player. Where the player was closed, what comes is let go of."""

    def __init__(self, program: PlayerProgram) -> None:
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False

    async def play(self, samples: Samples) -> None:
        """Waits only until the player has taken it, or, where it plays files, until it was heard."""
        if self._stopped or not len(samples):
            return
        if self._program.name == _BY_FILE:
            await self._play_file(samples)
            return
        data = pcm(samples)
        if self._process is None:
            await self._start(*self._program.command)
            data = data if self._program.name in _RAW else wav_header() + data
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def end(self) -> None:
        """Waits until all was heard."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    def stop(self) -> None:
        """At once."""
        self._stopped = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _play_file(self, samples: Samples) -> None:
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            file.write(encode_audio(samples, FORMS["wav"]))
            file.flush()
            await self._start(*self._program.command, file.name)
            assert self._process is not None
            await self._process.wait()

    async def _start(self, *command: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C is ours to pass on
        )
        if self._stopped:  # while it was being started
            self.stop()


Tell = Callable[[str], None]


class SpokenReply:
    """One reply that is read aloud. What was `known` before is not said again."""

    def __init__(self, speech: Speech, known: int, program: PlayerProgram | None, path: Path, tell: Tell) -> None:
        self._speech = speech
        self._known = known
        self._path = path
        self._tell = tell
        self._playing = SoundPlayer(program) if program is not None else None
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
                await asyncio.to_thread(write_sound, self._path, np.concatenate(pieces))
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
        self._reading: SpokenReply | None = None
        self.voice: VoiceSettings | None = None
        """None: replies are not spoken."""

    async def turn_on(self, voice: VoiceSettings) -> PlayerProgram | None:
        """Raises where there is no such voice, or none at all. What it will be heard through; None: files."""
        (await self._speakers.current()).language(voice)
        self.voice = voice
        return find_player()

    def turn_off(self) -> None:
        self.stop()
        self.voice = None

    async def read(self, reply_id: str, known: int = 0) -> SpokenReply | None:
        """Begins to read a reply aloud. An earlier one is cut off."""
        self.stop()
        if self.voice is None:
            return None
        speech = Speech(await self._speakers.current(), self.voice)
        path = self._folder / "spoken" / f"{reply_id}.wav"
        self._reading = SpokenReply(speech, known, find_player(), path, self._tell)
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


def write_sound(path: Path, samples: Samples) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_audio(samples, FORMS["wav"]))
