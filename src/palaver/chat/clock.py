"""How long the parts of a turn took."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Clock:
    """In seconds, on top of what earlier runs of the same reply took: `seconds` in all, `thinking` without the
    prefill, and `first_token`, which is told of the first run alone."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._before = dict(before or {})
        self._begun = self._last = time.monotonic()
        self._first: float | None = None
        self._thinking = 0.0

    def prefilled(self) -> None:
        self._last = time.monotonic()

    def token(self, thinking: bool) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now - self._begun
        if thinking:
            self._thinking += now - self._last
        self._last = now

    def timings(self) -> dict[str, float]:
        seconds = self._before.get("seconds", 0.0) + time.monotonic() - self._begun
        whole = {**self._before, "seconds": seconds, "thinking": self._before.get("thinking", 0.0) + self._thinking}
        return whole if self._first is None else {"first_token": self._first, **whole}
