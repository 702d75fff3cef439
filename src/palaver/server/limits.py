"""Who has the floor: the replies of the OpenAI API in the making, how many there may be, and how they end with the
server."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from palaver.errors import QueueFull, ShuttingDown
from palaver.server.errors import TooMany


class ConcurrencyLimiter:
    """A stateless reply belongs to its request, so it can't be put aside: it is waited for, then stopped.

    The last eighth of the places is reserved for owners who have no reply running: one owner can't lock out others.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._reserved = at_once // 8
        self._running: dict[int, Callable[[], None]] = {}
        self._owners: Counter[str] = Counter()
        self._count = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.closing = False

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def taken(self, owner: str, stop: Callable[[], None], replies: int = 1) -> Iterator[None]:
        """While the block runs, `stop` may be called to end it. Raises QueueFull where too many run already."""
        if self.closing:
            raise ShuttingDown
        limit = self._at_once - (self._reserved if self._owners[owner] else 0)
        if len(self._running) + replies > limit:
            raise QueueFull(len(self._running))
        numbers = range(self._count, self._count + replies)
        self._count += replies
        self._running.update(dict.fromkeys(numbers, stop))
        self._owners[owner] += replies
        self._empty.clear()
        try:
            yield
        finally:
            for number in numbers:
                del self._running[number]
            self._owners[owner] -= replies
            if not self._owners[owner]:
                del self._owners[owner]
            if not self._running:
                self._empty.set()

    async def close(self, grace: float) -> None:
        """Takes no more, waits for what runs for `grace` seconds, then stops it."""
        self.closing = True
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            for stop in list(self._running.values()):
                stop()


_FORGET_SECONDS = 600.0


class RateLimiter:
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
