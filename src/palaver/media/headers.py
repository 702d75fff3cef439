"""Claims of container headers that are checked before a library reads the file: sizes, lengths, truncation."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from palaver.media.base import BadMedia, MediaLimits

_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFF & ~1, 0xFFFFFFFF - 0xFF)
"""Sizes that programs write if they can't know them yet, such as in a pipe."""
_MAX_BOXES = 10_000
TRUNCATED = "is truncated: its header announces more than there is"


def check_header(data: bytes, media_type: str, name: str, limits: MediaLimits) -> None:
    match media_type:
        case "audio/wav":
            _check_wav(data, name, limits)
        case "video/mp4" | "video/quicktime" | "audio/mp4":
            _check_boxes(data, name)
        case "image/png":
            _check_png(data, name, limits)


def check_pixels(width: int, height: int, name: str, limits: MediaLimits) -> None:
    if width * height > limits.pixels:
        raise BadMedia(name, f"has {width:,} × {height:,} pixels, but at most {limits.pixels:,} are accepted")
    if not width or not height:
        raise BadMedia(name, "has no pixels")


def check_seconds(seconds: float, name: str, limits: MediaLimits) -> None:
    if not seconds <= limits.seconds:
        raise BadMedia(name, f"is {seconds:,.0f} s long, but at most {limits.seconds:,.0f} s are accepted")


def _check_png(data: bytes, name: str, limits: MediaLimits) -> None:
    if len(data) < 24 or data[12:16] != b"IHDR":
        raise BadMedia(name, TRUNCATED)
    width, height = struct.unpack_from(">II", data, 16)
    check_pixels(width, height, name, limits)


def _check_wav(data: bytes, name: str, limits: MediaLimits) -> None:
    bytes_per_second = 0
    for kind, start, size in _riff_chunks(data):
        if kind == b"fmt " and len(data) >= start + 16:
            (bytes_per_second,) = struct.unpack_from("<I", data, start + 8)
        elif kind == b"data":
            is_known = data[:4] == b"RIFF" and size not in _UNKNOWN_SIZES
            check_seconds((size if is_known else len(data) - start) / max(bytes_per_second, 1), name, limits)
            if is_known and start + size > len(data):
                raise BadMedia(name, TRUNCATED)
            return
    raise BadMedia(name, "is a WAV file without sound")


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    offset = 12
    while offset + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, offset)
        yield kind, offset + 8, size
        offset += 8 + size + size % 2


def _check_boxes(data: bytes, name: str) -> None:
    """The boxes at the top of an MP4 file must fit into it, and its index must be among them."""
    offset, kinds = 0, set[bytes]()
    for _ in range(_MAX_BOXES):
        if offset + 8 > len(data):
            break
        size, kind = struct.unpack_from(">I4s", data, offset)
        if size == 1 and offset + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, offset + 8)
        elif size == 0:
            size = len(data) - offset
        if size < 8:
            raise BadMedia(name, "is damaged")
        kinds.add(kind)
        offset += size
    if offset > len(data):
        raise BadMedia(name, TRUNCATED)
    if b"moov" not in kinds:
        raise BadMedia(name, "is truncated: its index is missing")
