"""Makes text of models, tools and files safe for a terminal: no control sequence survives."""

from __future__ import annotations

import re

_CONTROLS = re.compile("\r(?=\n)|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def sanitize(text: str) -> str:
    """Replaces control characters other than tabs and newlines by visible symbols."""
    return _CONTROLS.sub(lambda match: _replacement(match[0]), text)


def one_line(text: str, max_length: int = 0) -> str:
    """The text on one line, truncated to `max_length` characters if given."""
    line = " ".join(sanitize(text).split())
    return line if not max_length or len(line) <= max_length else line[: max_length - 1] + "…"


def _replacement(control: str) -> str:
    if control == "\r":
        return ""
    return chr(0x2400 + ord(control)) if ord(control) < 0x20 else "\ufffd"
