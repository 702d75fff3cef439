"""One engine process: starts it, reads its frames until it ends, and reaps it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable

from palaver.engines.host.frames import EngineSpec, Frame, decode_error_frame, encode_frame, read_frame
from palaver.errors import PalaverError

_THREAD_DEFAULTS = {"GOMP_SPINCOUNT": "20000"}
"""OpenMP threads spin for about a millisecond while they wait for the next pass. By default they spin much longer and
keep the event loops, which deliver the tokens, from their cores."""


def environment() -> dict[str, str]:
    """The environment of the process: libraries read it when they load. The user's own settings take precedence."""
    return _THREAD_DEFAULTS | os.environ


OnFrame = Callable[[Frame, asyncio.StreamWriter], None]
_MAX_LINES = 40
_EXIT_S = 2.0
"""How long a process may take to exit after it closed its connection."""


class EngineProcess:
    def __init__(self, spec: EngineSpec, on_frame: OnFrame) -> None:
        """`on_frame` is called with each frame of the process and the writer to it."""
        self._spec = spec
        self._on_frame = on_frame
        self._popen: subprocess.Popen[bytes] | None = None
        self.last_lines: deque[str] = deque(maxlen=_MAX_LINES)
        """The last lines of its stderr."""
        self.failure: PalaverError | None = None
        """Why the model couldn't be loaded, if the process reported it."""

    @property
    def id(self) -> int | None:
        return self._popen.pid if self._popen is not None else None

    async def run(self) -> str:
        """Runs the process until it exits. Returns how it ended, as a verb phrase. Kills the process when cancelled."""
        try:
            connection, stderr = self._start()
        except OSError as error:
            return f"couldn't be started ({error})"
        reading = asyncio.create_task(self._read_lines(stderr))
        grace = 0.0
        try:
            problem = await self._read_frames(connection)
            grace = 0.0 if problem else _EXIT_S
        finally:
            assert self._popen is not None
            code = await asyncio.to_thread(_reap, self._popen, grace)
            await asyncio.wait([reading], timeout=_EXIT_S)
            reading.cancel()
        return problem or _describe_exit(code)

    def _start(self) -> tuple[socket.socket, int]:
        connection, child_end = socket.socketpair()
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "palaver.engines.host.child", str(child_end.fileno())]
        try:
            self._popen = subprocess.Popen(
                command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, stderr=writable, env=environment()
            )
        except OSError:
            connection.close()
            os.close(readable)
            raise
        finally:
            child_end.close()
            os.close(writable)
        return connection, readable

    async def _read_frames(self, connection: socket.socket) -> str:
        """Reads frames until the connection is closed. Returns what went wrong, or an empty string."""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            writer.write(encode_frame({"do": "load", "spec": self._spec}))
            while (frame := await read_frame(reader)) is not None:
                if "failed" in frame:
                    self.failure = decode_error_frame(frame["failed"])
                    return "couldn't load the model"
                self._on_frame(frame, writer)
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
                self._add_lines(lines)
        finally:
            self._add_lines([rest])
            transport.close()

    def _add_lines(self, lines: list[bytes]) -> None:
        self.last_lines.extend(line.decode(errors="replace")[:500] for line in lines if line.strip())


def _reap(process: subprocess.Popen[bytes], grace: float) -> int:
    """Waits for the process to exit, and kills it after the grace period. Returns its exit code."""
    try:
        return process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
