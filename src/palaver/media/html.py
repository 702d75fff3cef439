"""The text of HTML pages, by the standard library's parser. Runs in the sandbox's process."""

from __future__ import annotations

import codecs
import re
from html.parser import HTMLParser

from palaver.media.base import BadMedia, MediaLimits

_CHARSET = re.compile(rb"""charset\s*=\s*["']?([\w:.-]{1,40})""", re.IGNORECASE)
_CHARSET_BYTES = 2048
_HIDDEN = ("script", "style", "template", "svg", "noscript", "iframe", "object", "select")
_BLOCKS = (
    "p", "div", "section", "article", "header", "footer", "main", "nav", "aside", "ul", "ol", "dl", "dt", "dd", "table",
    "tr", "figure", "figcaption", "blockquote", "form", "fieldset", "hr", "address", "details", "summary", "body",
    "pre", "title", "caption",
)  # fmt: skip
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def decode(data: bytes, limits: MediaLimits) -> str:
    """The visible text: headings and list items are marked as in Markdown, cells separated by bars."""
    reader = _PageReader(limits.characters)
    reader.feed(_decode(data))
    reader.close()
    return reader.text()


def _decode(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    found = _CHARSET.search(data[:_CHARSET_BYTES])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        try:
            return data.decode(found[1].decode() if found else "windows-1252", "replace")
        except (LookupError, UnicodeError):  # unknown, or a codec that can't replace what it can't decode
            return data.decode("windows-1252", "replace")


class _PageReader(HTMLParser):
    def __init__(self, max_characters: int) -> None:
        super().__init__(convert_charrefs=True)
        self._left = max_characters
        self._pieces: list[str] = []
        self._hidden: list[str] = []
        self._preformatted = 0

    def text(self) -> str:
        lines = [line.rstrip() for line in "".join(self._pieces).split("\n")]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag in _HEADINGS:
            self._write("\n\n" + _HEADINGS[tag])
        elif tag == "li":
            self._write("\n- ")
        elif tag == "br":
            self._write("\n")
        elif tag in ("td", "th"):
            self._write("" if self._ends_line() else " | ")
        elif tag == "img" and (words := dict(attributes).get("alt")):
            self._write(words)
        elif tag in _BLOCKS:
            self._write("\n" if tag in ("tr", "dt", "dd", "div") else "\n\n")
        self._preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        elif tag in _HEADINGS or tag in _BLOCKS:
            self._write("\n" if tag in ("tr", "dt", "dd", "div") else "\n\n")
        self._preformatted = max(0, self._preformatted - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if self._preformatted:
            self._write(data)
        elif text := re.sub(r"\s+", " ", data):
            self._write(text.lstrip() if self._ends_line() else text)

    def _ends_line(self) -> bool:
        return not self._pieces or self._pieces[-1].endswith("\n")

    def _write(self, text: str) -> None:
        if self._hidden or not text:
            return
        self._left -= len(text)
        if self._left < 0:
            raise BadMedia("", "has too much text")
        self._pieces.append(text)
