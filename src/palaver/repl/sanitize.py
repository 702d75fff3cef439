"""Text of models, tools and files, made safe for a terminal: it can't move the cursor, clear or rename anything."""

from __future__ import annotations

import re

_CONTROLS = re.compile("\r(?=\n)|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def sanitize(text: str) -> str:
    """Without control characters other than tabs and newlines; where one was, there is a mark for it."""
    return _CONTROLS.sub(lambda found: _shown(found[0]), text)


def one_line(text: str, longest: int = 0) -> str:
    """All of it on one line, cut to that many characters."""
    line = " ".join(sanitize(text).split())
    return line if not longest or len(line) <= longest else line[: longest - 1] + "…"


def _shown(control: str) -> str:
    if control == "\r":
        return ""
    return chr(0x2400 + ord(control)) if ord(control) < 0x20 else "\ufffd"
