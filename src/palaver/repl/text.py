"""How the terminal writes numbers, alike everywhere, and text of models, tools and files, of which no control sequence
survives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from palaver.repl import strings

if TYPE_CHECKING:
    from palaver.store import Blob


def format_count(count: int, noun: tuple[str, str]) -> str:
    """`1 message`, `1,234 messages`; the noun is in one and in many."""
    return f"{count:,} {noun[count != 1]}"


def format_tokens(count: int) -> str:
    return format_count(count, strings.TOKENS)


def format_messages(count: int) -> str:
    return format_count(count, strings.MESSAGES)


def format_seconds(value: float) -> str:
    """3.2 s, 2 min 5 s"""
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def format_speed(tokens_per_second: float) -> str:
    number = f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"
    return strings.SPEED.format(speed=number)


def format_share(share: float) -> str:
    """A share of a whole: less than one percent is not nothing."""
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_value(value: Any) -> str:
    """The value of a parameter, as it can be typed again."""
    match value:
        case None:
            return strings.NONE
        case bool():
            return strings.THINKING_ON if value else strings.THINKING_OFF
        case float():
            return f"{value:g}"
        case _:
            return str(value)


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


def format_blob(blob: Blob) -> str:
    """The name of a file with media, its size in pixels and its length."""
    pixels = strings.BLOB_PIXELS.format(width=blob.width, height=blob.height) if blob.width else ""
    seconds = format_seconds(blob.seconds) if blob.seconds else ""
    name = one_line(blob.name, 60) or strings.BLOB_KINDS[blob.kind]
    return ", ".join(filter(None, (name, blob.media_type, pixels, seconds)))
