"""The text of documents: PDF files by pypdf, others by their modules. Runs in the sandbox's process."""

from __future__ import annotations

import io

from pypdf import PdfReader
from pypdf.errors import PyPdfError

from palaver.media import docx, html
from palaver.media.base import BadMedia, MediaInfo, MediaLimits
from palaver.media.headers import DOCX, HTML, PDF


def inspect(data: bytes, media_type: str, limits: MediaLimits) -> MediaInfo:
    if media_type == PDF:
        _open(data, limits)
    return MediaInfo("document", media_type)


def decode(data: bytes, media_type: str, limits: MediaLimits) -> str:
    readers = {PDF: _read_pdf, DOCX: docx.decode, HTML: html.decode}
    text = readers[media_type](data, limits)
    if not text.strip():
        raise BadMedia("", "has no text: scanned pages are not read" if media_type == PDF else "has no text")
    return text.encode("utf-8", "replace").decode()


def _read_pdf(data: bytes, limits: MediaLimits) -> str:
    """The text of all pages, separated by empty lines."""
    pages, size = [], 0
    for page in _open(data, limits).pages:
        pages.append(page.extract_text().strip())
        size += len(pages[-1])
        if size > limits.characters:
            raise BadMedia("", f"has more than {limits.characters:,} characters of text")
    return "\n\n".join(page for page in pages if page)


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
