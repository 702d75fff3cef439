"""Publishes changes of a user's conversations to subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from palaver.chat.interface import ConversationChange

MAX_QUEUED = 1000
"""Changes that wait for one subscriber. If there are more, they are replaced by one change of kind "missed"."""


class ChangeFeed:
    def __init__(self) -> None:
        self._subscribers: dict[asyncio.Queue[ConversationChange], str] = {}

    def publish(self, owner: str, change: ConversationChange) -> None:
        for queue, subscriber in self._subscribers.items():
            if subscriber == owner:
                if queue.qsize() >= MAX_QUEUED:
                    while not queue.empty():
                        queue.get_nowait()
                    queue.put_nowait(ConversationChange("", "missed"))
                else:
                    queue.put_nowait(change)

    @asynccontextmanager
    async def subscribe(self, owner: str) -> AsyncIterator[AsyncIterator[ConversationChange]]:
        """The changes that are published for this user from now on."""
        queue: asyncio.Queue[ConversationChange] = asyncio.Queue()
        self._subscribers[queue] = owner
        try:
            yield _drain(queue)
        finally:
            del self._subscribers[queue]


async def _drain(queue: asyncio.Queue[ConversationChange]) -> AsyncIterator[ConversationChange]:
    while True:
        yield await queue.get()
