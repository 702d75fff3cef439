"""Trying again: after a cut, with growing pauses, for a bounded time."""

from __future__ import annotations

import asyncio
import random
import time

FIRST_S = 0.05
LONGEST_S = 5.0


class Patience:
    """Pauses between attempts. Whatever works makes it new."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for how long in all it is tried without success."""
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._since = time.monotonic()
        self._pause = FIRST_S

    @property
    def over(self) -> bool:
        return time.monotonic() - self._since >= self._seconds

    async def pause(self) -> None:
        """Not all clients of a server that comes back come at once."""
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, LONGEST_S)
