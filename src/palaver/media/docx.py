"""The text of DOCX files, by the standard library's ZIP and XML modules. Runs in the sandbox's process.

Only the body of the document is unpacked. Its sizes were checked in the archive's directory (`headers.py`)."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from xml.parsers import expat

from palaver.media.base import BadMedia, MediaLimits
from palaver.media.headers import DOCX_BODY, MAX_DOCX_BODY

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"
_HEADING = re.compile(r"heading\s*([1-6])", re.IGNORECASE)
_DAMAGED = "is damaged and can't be read as a DOCX file"


def decode(data: bytes, limits: MediaLimits) -> str:
    """The text of the body: headings and list items are marked as in Markdown, cells separated by bars. Deleted text
    of tracked changes is left out."""
    reader = _BodyReader(limits.characters)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open(DOCX_BODY) as file:
            reader.read(file.read(MAX_DOCX_BODY))
    except (zipfile.BadZipFile, zlib.error, expat.ExpatError, KeyError, EOFError, ValueError, NotImplementedError):
        raise BadMedia("", _DAMAGED) from None
    except RuntimeError:  # zipfile's error for an encrypted file
        raise BadMedia("", "is protected by a password") from None
    return reader.text()


class _BodyReader:
    def __init__(self, max_characters: int) -> None:
        self._left = max_characters
        self._lines: list[str] = []
        self._line: list[str] = []
        self._cells: list[list[str]] = []
        """The cells so far of each table row that is open."""
        self._mark = ""
        self._in_text = False
        self._parser = expat.ParserCreate(namespace_separator=" ")
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.StartDoctypeDeclHandler = self._refuse  # a DOCX file has none; entities could explode

    def read(self, body: bytes) -> None:
        self._parser.Parse(body, True)

    def text(self) -> str:
        return re.sub(r"\n{3,}", "\n\n", "\n".join(self._lines)).strip("\n")

    def _refuse(self, *_: object) -> None:
        raise BadMedia("", _DAMAGED)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        match _local(name):
            case "t":
                self._in_text = True
            case "tab":
                self._line.append("\t")
            case "br" | "cr":
                self._line.append("\n")
            case "pStyle":
                style = next((value for key, value in attributes.items() if key.endswith(" val")), "")
                if found := _HEADING.fullmatch(style):
                    self._mark = "#" * int(found[1]) + " "
            case "numPr":
                self._mark = self._mark or "- "
            case "tr":
                self._cells.append([])

    def _end(self, name: str) -> None:
        match _local(name):
            case "t":
                self._in_text = False
            case "p":
                self._end_paragraph()
            case "tr" if self._cells:
                row = " | ".join(self._cells.pop())
                self._cells[-1].append(row) if self._cells else self._lines.append(row)
            case "tbl" if not self._cells:
                self._lines.append("")

    def _end_paragraph(self) -> None:
        text, self._line = "".join(self._line).rstrip(), []
        if self._cells:
            if text.strip():
                self._cells[-1].append(" ".join(text.split()))
        else:
            self._lines += [self._mark + text] if self._mark == "- " and text else [self._mark + text, ""]
        self._mark = ""

    def _text(self, text: str) -> None:
        if not self._in_text:
            return
        self._left -= len(text)
        if self._left < 0:
            raise BadMedia("", "has too much text")
        self._line.append(text)


def _local(name: str) -> str:
    """The name of an element of a document, without its namespace; empty for others."""
    namespace, _, local = name.rpartition(" ")
    return local if namespace in (_WORD, _STRICT) else ""
