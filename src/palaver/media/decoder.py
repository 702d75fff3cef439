"""The decoder, as the rest of the program uses it: checks a file's header here, and decodes the file in a separate
process, so that a crash, a hang or a lack of memory ends only that file. `worker.py` runs in the process."""

from __future__ import annotations

import hashlib
import math
import socket
import struct
import threading
from dataclasses import asdict
from typing import Any

from cachetools import LRUCache

from palaver.errors import PalaverError, ShuttingDown
from palaver.media.base import RAW_RATE, BadMedia, MediaInfo, MediaKind, MediaLimits, Picture, Sound, VideoFrames
from palaver.media.headers import DOCX, HTML, check_header, check_polyglot, check_seconds, sniff
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


_INSPECTED = 1024
"""Files whose description is kept: a client sends the pictures of a conversation with every request."""
_KINDS: dict[str, MediaKind] = {
    "image": "image",
    "audio": "audio",
    "video": "video",
    "application": "document",
    "text": "document",
}
_SUPPORTED = "PNG, JPEG, WebP, GIF, AVIF, HEIC, WAV, MP3, FLAC, Ogg, M4A, MP4, WebM, MOV, PDF, DOCX and HTML"
_NAMES = {"image": "a picture", "audio": "sound", "video": "a video", "document": "a document"}


class MediaDecoder:
    """Decodes files of unknown origin. Thread-safe; every method blocks and raises BadMedia.

    `name` is what error messages call the file.
    """

    def __init__(self, limits: MediaLimits = MediaLimits()) -> None:  # noqa: B008 - frozen
        self.limits = limits
        self._sandbox = MediaSandbox()
        self._lock = threading.Lock()
        self._inspected: LRUCache[bytes, MediaInfo] = LRUCache(_INSPECTED)

    def inspect(self, data: bytes, name: str = "") -> MediaInfo:
        """The kind, type, size and length of a file, from its header."""
        digest = hashlib.sha256(data).digest()
        with self._lock:
            known = self._inspected.get(digest)
        if known is None:
            values, _ = self._run("inspect", data, name)
            known = MediaInfo(**values)
            with self._lock:
                self._inspected[digest] = known
        return known

    def picture(self, data: bytes, name: str = "") -> Picture:
        """The picture, turned upright. Of an animation: the first frame."""
        (pixels,) = self._run("picture", data, name, "image")[1]
        return pixels

    def sound(self, data: bytes, rate: int = RAW_RATE, name: str = "") -> Sound:
        """Mono samples at this rate; of a video: its sound."""
        (samples,) = self._run("sound", data, name, "audio", "video", rate=rate)[1]
        return samples

    def video(
        self, data: bytes, rate: int = RAW_RATE, name: str = "", limits: MediaLimits | None = None
    ) -> VideoFrames:
        """One frame per second, or fewer, spread evenly over the video, if that would be too many. `limits`: others for
        this video."""
        values, (frames, samples) = self._run("video", data, name, "video", limits=limits, rate=rate)
        return VideoFrames(frames, tuple(values["times"]), samples, rate)

    def document_text(self, data: bytes, name: str = "") -> str:
        """The text of a PDF, DOCX or HTML file."""
        values, _ = self._run("document", data, name, "document")
        return str(values["text"])

    def close(self) -> None:
        self._sandbox.close()

    def _run(
        self,
        operation: str,
        data: bytes,
        name: str,
        *kinds: MediaKind,
        limits: MediaLimits | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], Arrays]:
        media_type = self._check(data, name)
        if kinds and _KINDS[media_type.partition("/")[0]] not in kinds:
            raise BadMedia(name, f"is not {_NAMES[kinds[0]]}")
        job = {"operation": operation, "media_type": media_type, "limits": asdict(limits or self.limits), **options}
        return self._sandbox.run(job, data, name)

    def _check(self, data: bytes, name: str) -> str:
        """Checks what can be checked without a library, and returns the media type."""
        if not data:
            raise BadMedia(name, "is empty")
        if len(data) > self.limits.bytes:
            raise BadMedia(name, f"is larger than {self.limits.bytes >> 20} MB")
        media_type = sniff(data)
        if media_type is None:
            raise BadMedia(name, f"is of a type that is not supported ({_SUPPORTED} are)")
        if media_type not in (DOCX, HTML):  # only their text is kept
            check_polyglot(data, name)
        check_header(data, media_type, name, self.limits)
        return media_type


def wav_from_raw(
    data: bytes,
    name: str = "",
    rate: int = RAW_RATE,
    limits: MediaLimits = MediaLimits(),  # noqa: B008 - frozen
) -> bytes:
    """A WAV file of raw float32 samples, mono."""
    import numpy as np

    if not data or len(data) % 4:
        raise BadMedia(name, "is neither a file with sound nor raw float32 samples")
    check_seconds(len(data) / 4 / rate, name, limits)
    samples = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(samples).all():
        raise BadMedia(name, "contains values that are not numbers")
    return _wav_header(len(data), rate) + data


def _wav_header(size: int, rate: int) -> bytes:
    form = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)  # 3: float
    return b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt \x10\0\0\0" + form + b"data" + struct.pack("<I", size)
