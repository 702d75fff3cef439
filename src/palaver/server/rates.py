"""How often one caller may ask."""

from __future__ import annotations

import math
import time

from palaver.server.errors import TooMany

_FORGET_SECONDS = 600.0


class Rates:
    """A bucket for each caller that fills up over a minute."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}
        """By caller: how many requests are left, and when that was true."""
        self._swept = time.monotonic()

    def take(self, caller: str) -> None:
        """Raises TooMany."""
        if not self._per_minute:
            return
        now = time.monotonic()
        left, at = self._buckets.get(caller, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - at) * self._per_minute / 60)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / self._per_minute)
            raise TooMany(f"More than {self._per_minute} requests a minute: try again in {wait} s.", wait)
        self._buckets[caller] = (left - 1, now)
        if now - self._swept > _FORGET_SECONDS:
            self._swept = now
            self._buckets = {who: b for who, b in self._buckets.items() if now - b[1] < _FORGET_SECONDS}
