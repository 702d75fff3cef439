"""What the first bytes of a file show, before a library reads it: its media type, and the claims of its container about
sizes and lengths. What a client says about a file is not believed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from palaver.media.base import BadMedia, MediaLimits

PDF = "application/pdf"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
HTML = "text/html"
DOCUMENT_TYPES = (PDF, DOCX, HTML)
"""Documents that are decoded to text. Other text is a document, too, and needs no decoding."""
_PREFIXES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"fLaC": "audio/flac",
    b"OggS": "audio/ogg",
    b"ID3": "audio/mpeg",
    b"%PDF-": PDF,
}
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "image/avif"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"mif1"), "image/heic"),
    **dict.fromkeys((b"M4A ", b"M4B "), "audio/mp4"),
    b"qt  ": "video/quicktime",
}
_OLD_QUICKTIME = (b"moov", b"mdat", b"wide", b"free", b"skip")
_EBML = b"\x1aE\xdf\xa3"
_MARKUP = re.compile(rb"<(?:!doctype|html|head|body|script|iframe|svg|\?php|\?xml)[\s>/]|%PDF-", re.IGNORECASE)
_MARKUP_BYTES = 1024
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_ZIP_START = b"PK\x03\x04"
_ZIP_ENTRY = b"PK\x01\x02"
_ZIP_ENTRY_BYTES = 46
_MAX_ZIP_COMMENT = 0xFFFF
_MAX_ZIP_ENTRIES = 10_000
DOCX_BODY = "word/document.xml"
MAX_DOCX_BODY = 64 << 20
_MAX_DOCX_RATIO = 200
"""How much larger than packed the body may be. It is about 10 times as large."""
_SMALL_BODY = 1 << 20
"""A body up to this size may be packed more tightly."""
_HTML = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]{0,200}>\s*)?(?:<!--.{0,1000}?-->\s*)*<(?:!doctype\s+html|html)[\s>]",
    re.IGNORECASE | re.DOTALL,
)


def sniff(data: bytes) -> str | None:
    """The media type that the first bytes show; None if it is not one that is supported."""
    for prefix, media_type in _PREFIXES.items():
        if data.startswith(prefix):
            return media_type
    if data[:4] in (b"RIFF", b"RF64"):
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(data[8:12])
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video/mp4")
    if data[4:8] in _OLD_QUICKTIME:
        return "video/quicktime"
    if data.startswith(_EBML) and b"\x42\x82\x84webm" in data[:64]:
        return "video/webm"
    if data.startswith(_ZIP_START):
        return DOCX if _docx_body(data) else None
    if _HTML.match(data[:4096]):
        return HTML
    return "audio/mpeg" if _is_mp3_frame(data[:4]) else None


def check_polyglot(data: bytes, name: str) -> None:
    """Refuses a file that is of a second format, too: markup or a PDF in its first bytes, or a ZIP archive at its end.

    Other programs may take such a file for what a browser or an unpacker runs.
    """
    if (found := _MARKUP.search(data[:_MARKUP_BYTES])) and found.start():
        raise BadMedia(name, "is two kinds of file at once, which is not accepted")
    tail = data[-_ZIP_END_BYTES - _MAX_ZIP_COMMENT :]
    place = tail.rfind(_ZIP_END)
    if place >= 0 and len(tail) - place >= _ZIP_END_BYTES:
        (comment,) = struct.unpack_from("<H", tail, place + _ZIP_END_BYTES - 2)
        if place + _ZIP_END_BYTES + comment == len(tail):
            raise BadMedia(name, "is a ZIP archive as well, which is not accepted")


def _is_mp3_frame(head: bytes) -> bool:
    """Whether these are the sync word of an MPEG frame of layer III, and a bit rate and a sample rate that exist."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = (head[1] >> 3) & 3, (head[1] >> 1) & 3
    return version != 1 and layer == 1 and head[2] >> 4 not in (0, 15) and (head[2] >> 2) & 3 != 3


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
        case _ if media_type == DOCX:
            _check_docx(data, name)


def _docx_body(data: bytes) -> tuple[int, int] | None:
    """The packed and the unpacked size of the body, as the archive's directory says; None if it has none."""
    place = data.rfind(_ZIP_END, max(0, len(data) - _ZIP_END_BYTES - _MAX_ZIP_COMMENT))
    if place < 0 or place + _ZIP_END_BYTES > len(data):
        return None
    entries, _, offset = struct.unpack_from("<HII", data, place + 10)
    for _ in range(min(entries, _MAX_ZIP_ENTRIES)):
        if data[offset : offset + 4] != _ZIP_ENTRY or offset + _ZIP_ENTRY_BYTES > place:
            return None
        packed, unpacked, name, extra, comment = struct.unpack_from("<IIHHH", data, offset + 20)
        if data[offset + _ZIP_ENTRY_BYTES : offset + _ZIP_ENTRY_BYTES + name] == DOCX_BODY.encode():
            return packed, unpacked
        offset += _ZIP_ENTRY_BYTES + name + extra + comment
    return None


def _check_docx(data: bytes, name: str) -> None:
    packed, unpacked = _docx_body(data) or (0, 0)
    if unpacked > MAX_DOCX_BODY or unpacked > max(_SMALL_BODY, _MAX_DOCX_RATIO * packed):
        raise BadMedia(name, f"would be unpacked to {unpacked:,} bytes, which is too much")


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
