"""Media types by the first bytes of a file. What a client says about a file is not believed."""

from __future__ import annotations

import re
import struct

from palaver.media.base import BadMedia

_PREFIXES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"fLaC": "audio/flac",
    b"OggS": "audio/ogg",
    b"ID3": "audio/mpeg",
    b"%PDF-": "application/pdf",
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
_MAX_ZIP_COMMENT = 0xFFFF


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
