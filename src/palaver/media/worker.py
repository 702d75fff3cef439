"""The sandbox's process: `python -m palaver.media.worker FD`.

It imports the libraries once. Each file is then decoded in a fork that the kernel ends at its limits on time and
memory, and that can write no files. Libraries that parse hostile bytes never run in the program's own process.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from palaver.media import documents, pictures, sound, video
from palaver.media.base import BadMedia, MediaInfo, MediaLimits, Sound
from palaver.media.decoder import WALL_SECONDS, Arrays
from palaver.processes import die_with_parent, limit_fork, parent_connection, receive, receive_bytes, send, serve_forks

CPU_SECONDS = 50
MEMORY_BYTES = 1 << 30
"""Memory that a fork may take beyond what it starts with, the file and the result included."""

Result = tuple[dict[str, Any], Arrays]


def main() -> None:
    connection = parent_connection()
    die_with_parent()
    warnings.simplefilter("ignore")
    pictures.load_plugins()
    serve_forks(connection, _run_in_fork)


def _run_in_fork(connection: socket.socket) -> None:
    """Decodes one file, sends the result unless a limit is exceeded, and ends the process."""
    try:
        limit_fork(connection, CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES)
        job = receive(connection)
        data = bytes(receive_bytes(connection, job["size"]))
        _send_result(connection, run_job(job, data))
    except BadMedia as error:
        send(connection, {"why": error.why})
    except MemoryError:
        os._exit(1)
    except Exception:  # libraries raise errors of many types for damaged files
        send(connection, {"why": "is damaged and can't be decoded"})
    finally:
        os._exit(0)


def _send_result(connection: socket.socket, result: Result) -> None:
    values, arrays = result
    send(connection, {"values": values, "arrays": [(array.shape, array.dtype.str) for array in arrays]})
    for array in arrays:
        if array.size:
            connection.sendall(np.ascontiguousarray(array).data.cast("B"))


def run_job(job: dict[str, Any], data: bytes) -> Result:
    limits, media_type = MediaLimits(**job["limits"]), job["media_type"]
    operations: dict[str, Callable[[], Result]] = {
        "inspect": lambda: (asdict(_inspect(data, media_type, limits)), []),
        "picture": lambda: ({}, [pictures.decode(data, media_type, limits)]),
        "sound": lambda: ({}, [_decode_sound(data, media_type, job["rate"], limits)]),
        "video": lambda: video.decode(data, media_type, job["rate"], limits),
        "document": lambda: ({"text": documents.decode(data, media_type, limits)}, []),
    }
    return operations[job["operation"]]()


def _decode_sound(data: bytes, media_type: str, rate: int, limits: MediaLimits) -> Sound:
    decode = sound.decode if media_type in sound.FILE_FORMATS else video.decode_sound
    return decode(data, media_type, rate, limits)


def _inspect(data: bytes, media_type: str, limits: MediaLimits) -> MediaInfo:
    if media_type.startswith("image/"):
        return pictures.inspect(data, media_type, limits)
    if media_type in sound.FILE_FORMATS:
        return sound.inspect(data, media_type, limits)
    if media_type.startswith(("video/", "audio/")):
        return video.inspect(data, media_type, limits)
    return documents.inspect(data, media_type, limits)


if __name__ == "__main__":
    main()
