"""The text of PDF files by pypdf. Runs in the sandbox's process."""

from __future__ import annotations

import io

from pypdf import PdfReader
from pypdf.errors import PyPdfError

from palaver.media.base import BadMedia, MediaInfo, MediaLimits


def inspect(data: bytes, media_type: str, limits: MediaLimits) -> MediaInfo:
    _open(data, limits)
    return MediaInfo("document", media_type)


def decode(data: bytes, limits: MediaLimits) -> str:
    """The text of all pages, separated by empty lines."""
    pages, size = [], 0
    for page in _open(data, limits).pages:
        pages.append(page.extract_text().strip())
        size += len(pages[-1])
        if size > limits.characters:
            raise BadMedia("", f"has more than {limits.characters:,} characters of text")
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise BadMedia("", "has no text: scanned pages are not read")
    return text.encode("utf-8", "replace").decode()


def _open(data: bytes, limits: MediaLimits) -> PdfReader:
    try:
        reader = PdfReader(io.BytesIO(data))
        pages = len(reader.pages)
    except (PyPdfError, ValueError, KeyError, TypeError, RecursionError):
        raise BadMedia("", "is damaged and can't be read as a PDF") from None
    if reader.is_encrypted:
        raise BadMedia("", "is protected by a password")
    if pages > limits.pages:
        raise BadMedia("", f"has {pages:,} pages, but at most {limits.pages:,} are accepted")
    return reader
