"""The sandbox's process: `python -m palaver.media.worker FD`.

It imports the libraries once. Each file is then decoded in a fork that the kernel ends at its limits on time and
memory, and that can write no files. Libraries that parse hostile bytes never run in the program's own process.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from palaver.media import documents, pictures, sound, video
from palaver.media.base import BadMedia, MediaInfo, MediaLimits
from palaver.media.sandbox import WALL_SECONDS, Arrays
from palaver.processes import die_with_parent, receive, receive_bytes, receive_descriptor, send

CPU_SECONDS = 50
MEMORY_BYTES = 1 << 30
"""Memory that a fork may take beyond what it starts with, the file and the result included."""
_NICE = 5

Result = tuple[dict[str, Any], Arrays]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    warnings.simplefilter("ignore")
    pictures.load_plugins()
    gc.freeze()
    while (descriptor := receive_descriptor(connection)) is not None:
        if os.fork() == 0:
            connection.close()
            _run_in_fork(socket.socket(fileno=descriptor))
        os.close(descriptor)


def _run_in_fork(connection: socket.socket) -> None:
    """Decodes one file, sends the result unless a limit is exceeded, and ends the process."""
    try:
        _set_limits()
        send(connection, "started")
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


def _set_limits() -> None:
    die_with_parent()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)  # hides the output of a crash
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        limit = int(statistics.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)  # the default action of SIGALRM ends the process


def run_job(job: dict[str, Any], data: bytes) -> Result:
    limits, media_type = MediaLimits(**job["limits"]), job["media_type"]
    operations: dict[str, Callable[[], Result]] = {
        "inspect": lambda: (asdict(_inspect(data, media_type, limits)), []),
        "picture": lambda: ({}, [pictures.decode(data, media_type, limits)]),
        "sound": lambda: ({}, [sound.decode(data, media_type, job["rate"], limits)]),
        "video": lambda: video.decode(data, media_type, job["rate"], limits),
        "document": lambda: ({"text": documents.decode(data, limits)}, []),
    }
    return operations[job["operation"]]()


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
