"""Who has the floor: the replies of the OpenAI API in the making, how many there may be, and how they end with the
server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from palaver.errors import QueueFull
from palaver.server.errors import ShuttingDown


class Floor:
    """A stateless reply belongs to its request, so it can't be put aside: it is waited for, then stopped."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._running: dict[int, Callable[[], None]] = {}
        self._count = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.closing = False

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def taken(self, stop: Callable[[], None], replies: int = 1) -> Iterator[None]:
        """While the block runs, `stop` may be called to end it. Raises QueueFull where too many run already."""
        if self.closing:
            raise ShuttingDown
        if len(self._running) + replies > self._at_once:
            raise QueueFull(len(self._running))
        numbers = range(self._count, self._count + replies)
        self._count += replies
        self._running.update(dict.fromkeys(numbers, stop))
        self._empty.clear()
        try:
            yield
        finally:
            for number in numbers:
                del self._running[number]
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
