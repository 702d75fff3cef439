"""One life of the engine's process: started, listened to until it ends, and reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from palaver.engines.host.frames import encode_frame, read_frame, unpack_error
from palaver.errors import PalaverError

_SPINS = {"GOMP_SPINCOUNT": "20000"}
"""For about a millisecond the threads of a pass look out for more work; unless told so they would keep a core from
everybody else for a long while, and the token that was computed from its readers."""


def environment() -> dict[str, str]:
    """What the process starts with, for libraries read it when they are loaded. A user's own settings go first."""
    return _SPINS | os.environ


Take = Callable[[dict[str, Any], asyncio.StreamWriter], None]
_LINES = 40
_END_S = 2.0
"""How long a process may take to end after it closed its connection."""


class EngineProcess:
    def __init__(self, spec: dict[str, Any], take: Take) -> None:
        """`take` gets each frame of the process, and where to write."""
        self._spec = spec
        self._take = take
        self._popen: subprocess.Popen[bytes] | None = None
        self.last_lines: deque[str] = deque(maxlen=_LINES)
        """The last lines of its stderr."""
        self.failure: PalaverError | None = None
        """Why the model couldn't be loaded, where the process said so."""

    @property
    def id(self) -> int | None:
        return self._popen.pid if self._popen is not None else None

    async def run(self) -> str:
        """Returns how it ended, as a verb phrase. When cancelled, kills the process."""
        try:
            ours, stderr = self._start()
        except OSError as error:
            return f"couldn't be started ({error})"
        reading = asyncio.create_task(self._read_lines(stderr))
        grace = 0.0
        try:
            trouble = await self._listen(ours)
            grace = 0.0 if trouble else _END_S
        finally:
            assert self._popen is not None
            code = await asyncio.to_thread(_end, self._popen, grace)
            await asyncio.wait([reading], timeout=_END_S)
            reading.cancel()
        return trouble or _describe(code)

    def _start(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "palaver.engines.host.child", str(theirs.fileno())]
        try:
            self._popen = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=writable, env=environment()
            )
        except OSError:
            ours.close()
            os.close(readable)
            raise
        finally:
            theirs.close()
            os.close(writable)
        return ours, readable

    async def _listen(self, connection: socket.socket) -> str:
        """Until the process is gone, or says what makes no sense: then returns what was wrong with it."""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            writer.write(encode_frame({"do": "load", "spec": self._spec}))
            while (frame := await read_frame(reader)) is not None:
                if "failed" in frame:
                    self.failure = unpack_error(frame["failed"])
                    return "couldn't load the model"
                self._take(frame, writer)
        except Exception as error:
            return f"sent what couldn't be taken ({type(error).__name__}: {error})"
        finally:
            writer.close()
        return ""

    async def _read_lines(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        rest = b""
        try:
            while data := await reader.read(1 << 16):
                *lines, rest = (rest + data)[-(1 << 16) :].split(b"\n")
                self._note(lines)
        finally:
            self._note([rest])
            transport.close()

    def _note(self, lines: list[bytes]) -> None:
        self.last_lines.extend(line.decode(errors="replace")[:500] for line in lines if line.strip())


def _end(process: subprocess.Popen[bytes], grace: float) -> int:
    """Waits for a process that should end, and kills it where it does not."""
    try:
        return process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
