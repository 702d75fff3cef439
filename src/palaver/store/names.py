"""Short texts that people and programs choose: names, tags, keys, titles."""

from __future__ import annotations

import re

from palaver.errors import BadParameter

MAX_NAME = 200
MAX_TITLE = 200
_MADE_TITLE = 60
_UNWRITABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]+")


def checked_name(what: str, name: str) -> str:
    """The same name, or BadParameter where a database or a person could not read it."""
    if not name or len(name) > MAX_NAME:
        raise BadParameter(what, name[:MAX_NAME], f"must have 1 to {MAX_NAME} characters")
    if _UNWRITABLE.search(name):
        raise BadParameter(what, name, "must not hold control characters")
    return name


def cleaned_title(title: str) -> str:
    return " ".join(_UNWRITABLE.sub(" ", title).split())[:MAX_TITLE]


def made_title(text: str) -> str:
    """A title from a message: its first line with something in it, cut between words."""
    line = next((line for line in text.splitlines() if re.search(r"\w", line)), text)
    line = cleaned_title(line.lstrip("#>*- \t"))
    if len(line) <= _MADE_TITLE:
        return line
    cut = line[:_MADE_TITLE]
    whole, space, _ = cut.rpartition(" ")
    return (whole if space and len(whole) > _MADE_TITLE // 2 else cut) + "…"
