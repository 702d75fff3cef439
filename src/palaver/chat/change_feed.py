"""Who wants to know what happens in a user's conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from palaver.chat.interface import ConversationChange

MAX_BEHIND = 1000
"""A listener that is further behind is told that it missed something."""


class ChangeFeed:
    def __init__(self) -> None:
        self._listeners: dict[asyncio.Queue[ConversationChange], str] = {}

    def tell(self, owner: str, change: ConversationChange) -> None:
        for queue, listener in self._listeners.items():
            if listener == owner:
                if queue.qsize() >= MAX_BEHIND:
                    while not queue.empty():
                        queue.get_nowait()
                    queue.put_nowait(ConversationChange("", "missed"))
                else:
                    queue.put_nowait(change)

    @asynccontextmanager
    async def listen(self, owner: str) -> AsyncIterator[AsyncIterator[ConversationChange]]:
        queue: asyncio.Queue[ConversationChange] = asyncio.Queue()
        self._listeners[queue] = owner
        try:
            yield _taken(queue)
        finally:
            del self._listeners[queue]


async def _taken(queue: asyncio.Queue[ConversationChange]) -> AsyncIterator[ConversationChange]:
    while True:
        yield await queue.get()
