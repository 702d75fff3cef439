"""Decodes files in a separate process, so that a crash, a hang or a lack of memory ends only that file.

This is the parent's side; `worker.py` runs in the process."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaver.errors import PalaverError, ShuttingDown
from palaver.media.base import BadMedia
from palaver.processes import receive, receive_bytes, send, send_descriptor

WALL_SECONDS = 60.0
"""The longest that decoding may take, waiting for the CPU included."""
_START_SECONDS = 60.0
_EXIT_SECONDS = 5.0
_CONCURRENT = 4
"""Files that are decoded at the same time: the memory of all forks together stays limited."""
TOO_MUCH = "takes too much time or memory to decode, or is damaged"

Arrays = list[NDArray[Any]]


class SandboxFailed(PalaverError):
    def __init__(self) -> None:
        super().__init__("The file could not be decoded: the process for it did not start. Try again.")


class MediaSandbox:
    """A warm process that handles each file in a fork of itself. The first file starts it, and so does the next file
    after its death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_CONCURRENT)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closed = False

    def run(self, job: dict[str, Any], data: bytes, name: str) -> tuple[dict[str, Any], Arrays]:
        """The values and arrays that the job returns. Raises BadMedia."""
        with self._slots:
            parent_end, child_end = socket.socketpair()
            with parent_end:
                with child_end:
                    self._submit(child_end)
                parent_end.settimeout(_START_SECONDS)
                try:
                    receive(parent_end)
                except (EOFError, OSError):
                    raise SandboxFailed from None
                parent_end.settimeout(WALL_SECONDS + _EXIT_SECONDS)
                try:
                    send(parent_end, {**job, "size": len(data)})
                    parent_end.sendall(data)
                    return _receive_result(parent_end, name)
                except (EOFError, OSError):
                    raise BadMedia(name, TOO_MUCH) from None

    def close(self) -> None:
        """Ends the process. Files that are being decoded fail."""
        with self._lock:
            self._closed = True
            self._stop()

    def _submit(self, child_end: socket.socket) -> None:
        with self._lock:
            connection = self._ensure_started()
            try:
                send_descriptor(connection, child_end.fileno())
            except OSError:
                raise SandboxFailed from None

    def _ensure_started(self) -> socket.socket:
        if self._closed:
            raise ShuttingDown
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._stop()
        parent_end, child_end = socket.socketpair()
        with child_end:
            command = [sys.executable, "-m", "palaver.media.worker", str(child_end.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL)
        self._connection = parent_end
        return parent_end

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _receive_result(connection: socket.socket, name: str) -> tuple[dict[str, Any], Arrays]:
    answer = receive(connection)
    if (why := answer.get("why")) is not None:
        raise BadMedia(name, why)
    arrays = []
    for shape, dtype in answer["arrays"]:
        data = receive_bytes(connection, math.prod(shape) * np.dtype(dtype).itemsize)
        arrays.append(np.frombuffer(data, dtype=dtype).reshape(shape))
    return answer["values"], arrays
