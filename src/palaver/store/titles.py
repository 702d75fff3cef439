"""Titles of conversations: how they are cleaned, and the one that the first message gives.

`chat/title_writer.py` lets the model write a better one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from palaver.messages import Text
from palaver.store.blobs import Blob
from palaver.store.encoding import StoredPart
from palaver.store.records import CONTROL_CHARACTERS

MAX_TITLE = 200
_DERIVED_TITLE = 60
_FILE_HEADER = re.compile(r"\n\nFile ([^\n]{1,200}):\n\n")
"""How an attached text begins."""


def clean_title(title: str) -> str:
    return " ".join(CONTROL_CHARACTERS.sub(" ", title).split())[:MAX_TITLE]


def derive_title(text: str) -> str:
    """A title from a message: its first line with a word in it, cut between words."""
    line = next((line for line in text.splitlines() if re.search(r"\w", line)), text)
    line = clean_title(line.lstrip("#>*- \t"))
    if len(line) <= _DERIVED_TITLE:
        return line
    cut = line[:_DERIVED_TITLE]
    words, space, _ = cut.rpartition(" ")
    return (words if space and len(words) > _DERIVED_TITLE // 2 else cut) + "…"


def derive_message_title(parts: Iterable[StoredPart]) -> str:
    """The title of a conversation that begins with this message: from its words, or else the name of its first file."""
    words, names = [], []
    for part in parts:
        if isinstance(part, Blob):
            names.append(part.name)
        elif isinstance(part, Text):
            header = _FILE_HEADER.match(part.text)
            if header is None:
                words.append(part.text)
            else:
                names.append(header[1])
    return derive_title("\n".join(words)) or clean_title(next(filter(None, names), ""))
