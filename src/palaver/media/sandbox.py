"""Decodes files in a separate process, so that a crash, a hang or a lack of memory ends only that file.

This is the parent's side; `worker.py` runs in the process."""

from __future__ import annotations

import math
import socket
import threading
from typing import Any

from palaver.errors import PalaverError, ShuttingDown
from palaver.media.base import BadMedia
from palaver.processes import EXIT_SECONDS, ForkFailed, ForkServer, ForkServerClosed, receive, receive_bytes, send

WALL_SECONDS = 60.0
"""The longest that decoding may take, waiting for the CPU included."""
_START_SECONDS = 60.0
_CONCURRENT = 4
"""Files that are decoded at the same time: the memory of all forks together stays limited."""
TOO_MUCH = "takes too much time or memory to decode, or is damaged"

Arrays = list[Any]
"""Arrays of numpy, which is imported only if there are any."""


class SandboxFailed(PalaverError):
    def __init__(self) -> None:
        super().__init__("The file could not be decoded: the process for it did not start. Try again.")


class MediaSandbox:
    """Handles each file in a fork of a warm process."""

    def __init__(self) -> None:
        self._forks = ForkServer("palaver.media.worker", _START_SECONDS)
        self._slots = threading.BoundedSemaphore(_CONCURRENT)

    def run(self, job: dict[str, Any], data: bytes, name: str) -> tuple[dict[str, Any], Arrays]:
        """The values and arrays that the job returns. Raises BadMedia."""
        try:
            with self._slots, self._forks.fork() as connection:
                connection.settimeout(WALL_SECONDS + EXIT_SECONDS)
                send(connection, {**job, "size": len(data)})
                connection.sendall(data)
                return _receive_result(connection, name)
        except ForkServerClosed:
            raise ShuttingDown from None
        except ForkFailed:
            raise SandboxFailed from None
        except (EOFError, OSError):
            raise BadMedia(name, TOO_MUCH) from None

    def close(self) -> None:
        """Ends the process. Files that are being decoded fail."""
        self._forks.close()


def _receive_result(connection: socket.socket, name: str) -> tuple[dict[str, Any], Arrays]:
    answer = receive(connection)
    if (why := answer.get("why")) is not None:
        raise BadMedia(name, why)
    if not answer["arrays"]:
        return answer["values"], []
    import numpy as np

    arrays = []
    for shape, dtype in answer["arrays"]:
        data = receive_bytes(connection, math.prod(shape) * np.dtype(dtype).itemsize)
        arrays.append(np.frombuffer(data, dtype=dtype).reshape(shape))
    return answer["values"], arrays
