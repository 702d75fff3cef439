"""Spoken replies: synthesized while they stream, and played by an installed program or saved as files."""

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
from palaver.repl import strings
from palaver.voice.audio_format import FORMATS, encode_audio, pcm, wav_header
from palaver.voice.base import Samples, VoiceSettings, silence
from palaver.voice.speech import SpeakerCache, Speech, stream_speech

Notify = Callable[[str], None]
_PLAYERS = (
    ("pw-cat", "--playback", "--raw", "--rate", "24000", "--channels", "1", "--format", "s16", "-"),
    ("paplay", "--raw", "--rate=24000", "--channels=1", "--format=s16le"),
    ("aplay", "-q", "-"),
    ("ffplay", "-nodisp", "-autoexit", "-loglevel", "quiet", "-i", "-"),
    ("play", "-q", "-t", "wav", "-"),
)
_RAW_PLAYERS = ("pw-cat", "paplay")
"""Players that read raw samples; the others read a WAV stream."""
_FILE_PLAYER = "afplay"


class SessionVoice:
    """The voice settings of a session and the reply that is being spoken."""

    def __init__(self, folder: Path, notify: Notify, speakers: SpeakerCache | None = None) -> None:
        self._folder = folder
        self._notify = notify
        self._speakers = speakers or SpeakerCache()
        self._current: SpokenReply | None = None
        self.voice: VoiceSettings | None = None
        """None: replies are not spoken."""

    @property
    def sound_folder(self) -> Path:
        """Where replies are saved if no player is installed."""
        return self._folder / "spoken"

    async def turn_on(self, voice: VoiceSettings) -> PlayerProgram | None:
        """Raises if the voice does not exist. Returns the player, or None if the sound goes to files."""
        (await self._speakers.current()).language(voice)
        self.voice = voice
        return find_player()

    def turn_off(self) -> None:
        self.stop()
        self.voice = None

    async def speak_reply(self, reply_id: str, last_event: int = 0) -> SpokenReply | None:
        """Starts to speak a reply and stops the previous one."""
        self.stop()
        if self.voice is None:
            return None
        speech = Speech(await self._speakers.current(), self.voice)
        path = self.sound_folder / f"{reply_id}.wav"
        self._current = SpokenReply(speech, last_event, find_player(), path, self._notify)
        return self._current

    def stop(self) -> None:
        if self._current is not None:
            self._current.stop()

    async def wait(self) -> None:
        """Waits until the current reply was spoken."""
        if self._current is not None:
            await self._current.wait()

    async def close(self) -> None:
        self.stop()
        await self.wait()
        await self._speakers.close()

    async def synthesize(self, text: str) -> Samples:
        pieces = [piece.samples async for piece in stream_speech(text, await self._speakers.current(), self.voice)]
        return np.concatenate(pieces) if pieces else silence()


class SpokenReply:
    """One reply that is read aloud, from the event after `last_event`."""

    def __init__(
        self, speech: Speech, last_event: int, program: PlayerProgram | None, path: Path, notify: Notify
    ) -> None:
        self._speech = speech
        self._last_event = last_event
        self._path = path
        self._notify = notify
        self._player = SoundPlayer(program) if program is not None else None
        self._task = asyncio.create_task(self._play())

    def handle(self, entry: LogEntry) -> None:
        match entry.event:
            case Finished(finish, tail=tail):
                self._feed(tail)
                self.stop() if finish is Finish.STOPPED else self._speech.end()
            case Failed():
                self.stop()
            case Snapshot(message) if not self._last_event:
                self._speech.feed(message.text)
            case AnswerDelta() as delta if entry.number > self._last_event:
                self._feed((delta,))
            case _:
                pass

    def _feed(self, events: tuple[ReadEvent, ...]) -> None:
        for event in events:
            if isinstance(event, AnswerDelta):
                self._speech.feed(event.text)

    def close(self) -> None:
        """No more events follow, whether or not the reply ended."""
        self._speech.end()

    def stop(self) -> None:
        """Stops the sound immediately."""
        self._speech.stop()
        if self._player is not None:
            self._player.stop()

    async def wait(self) -> None:
        """Waits until the reply was spoken."""
        with suppress(asyncio.CancelledError):
            await self._task

    async def _play(self) -> None:
        try:
            pieces = []
            async for piece in self._speech:
                if self._player is not None:
                    await self._player.play(piece.samples)
                else:
                    pieces.append(piece.samples)
            if self._player is not None:
                await self._player.end()
            elif any(len(samples) for samples in pieces):
                await asyncio.to_thread(write_sound, self._path, np.concatenate(pieces))
                self._notify(strings.VOICE_SAVED.format(path=self._path))
        except PalaverError as error:
            self._notify(strings.VOICE_FAILED.format(reason=error))
        finally:
            self.stop()


class SoundPlayer:
    """Plays a stream of samples through one player process. Samples for a closed player are discarded."""

    def __init__(self, program: PlayerProgram) -> None:
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False

    async def play(self, samples: Samples) -> None:
        """Returns when the player has read the samples, or, for a player of files, when they were played."""
        if self._stopped or not len(samples):
            return
        if self._program.name == _FILE_PLAYER:
            await self._play_file(samples)
            return
        data = pcm(samples)
        if self._process is None:
            await self._start(*self._program.command)
            data = data if self._program.name in _RAW_PLAYERS else wav_header() + data
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def end(self) -> None:
        """Waits until everything was played."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    def stop(self) -> None:
        """Stops the sound immediately."""
        self._stopped = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _play_file(self, samples: Samples) -> None:
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            file.write(encode_audio(samples, FORMATS["wav"]))
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
            start_new_session=True,  # the player must not receive our Ctrl+C
        )
        if self._stopped:  # while it was being started
            self.stop()


@dataclass(frozen=True, slots=True)
class PlayerProgram:
    command: Sequence[str]

    @property
    def name(self) -> str:
        return Path(self.command[0]).name


def find_player() -> PlayerProgram | None:
    """The first player that is installed."""
    for name, *options in (*_PLAYERS, (_FILE_PLAYER,)):
        if path := shutil.which(name):
            return PlayerProgram((path, *options))
    return None


def write_sound(path: Path, samples: Samples) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_audio(samples, FORMATS["wav"]))
