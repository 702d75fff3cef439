"""Names and times of stored things."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime

_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 16


def new_id() -> str:
    """80 random bits in letters that are hard to mistake for each other."""
    number = secrets.randbits(5 * _LENGTH)
    return "".join(_LETTERS[(number >> (5 * place)) & 31] for place in range(_LENGTH))


def now() -> int:
    """Microseconds since 1970, UTC: how every time is stored."""
    return time.time_ns() // 1000


def moment(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1e6, UTC)
