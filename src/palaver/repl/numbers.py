"""How the terminal writes numbers: counts with thousands separators, times and shares alike everywhere."""

from __future__ import annotations

from typing import Any

from palaver.repl import strings


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
