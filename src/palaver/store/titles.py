"""Titles of conversations: how they are cleaned, and the one that the first message gives.

`chat/title_writer.py` lets the model write a better one."""

from __future__ import annotations

import re

from palaver.store.records import CONTROL_CHARACTERS

MAX_TITLE = 200
_DERIVED_TITLE = 60


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
