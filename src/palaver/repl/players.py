"""Programs that play sound, and one that is running."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from palaver.voice.audio_format import FORMS, encode_audio, pcm, wav_header
from palaver.voice.base import Samples

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
class Program:
    command: Sequence[str]

    @property
    def name(self) -> str:
        return Path(self.command[0]).name


def found() -> Program | None:
    """The first player that is installed."""
    for name, *options in (*_PLAYERS, (_BY_FILE,)):
        if path := shutil.which(name):
            return Program((path, *options))
    return None


class Playing:
    """Sound as it comes, through one player. Where the player was closed, what comes is let go of."""

    def __init__(self, program: Program) -> None:
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
