"""Follows one turn to its end: its events go to a view, Ctrl+C to the turn."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from palaver.chat.interface import Chat
from palaver.errors import PalaverError
from palaver.events import Failed, Finished
from palaver.repl.keys import TWICE
from palaver.repl.lines import Lines, Watched
from palaver.repl.reply import View

if TYPE_CHECKING:
    from palaver.repl.voice import Reading

PAINTS = 15.0
"""How often a second the live lines are painted."""


class Follower:
    def __init__(self, chat: Chat, view: View, lines: Lines, reading: Reading | None = None) -> None:
        self._chat = chat
        self.view = view
        self._lines = lines
        self._reading = reading
        self._reply_id = ""
        self._stopping: asyncio.Task[None] | None = None
        self.stopped_at = float("-inf")
        """When Ctrl+C was pressed last."""
        self.dropped = False

    async def follow(self, reply_id: str) -> Finished | Failed | None:
        """Shows the turn; how it ended, or None where that can't be known because the events broke off."""
        self._reply_id = reply_id
        with self._lines.watching(Watched(self._interrupted, self.view.toggle)):
            painting = asyncio.create_task(self._paint())
            try:
                async with self._chat.events(reply_id) as entries:
                    async for entry in entries:
                        self.view.take(entry)
                        if self._reading is not None:
                            self._reading.take(entry)
            finally:
                if painting.done():
                    painting.result()
                painting.cancel()
                self.view.leave()
                if self._reading is not None:
                    self._reading.leave()
            if self._stopping is not None:
                with suppress(PalaverError):
                    await self._stopping
        return self.view.ending

    async def _paint(self) -> None:
        while True:
            await asyncio.sleep(1 / PAINTS)
            self.view.paint()

    def _interrupted(self) -> None:
        now = time.monotonic()
        self.dropped = now - self.stopped_at < TWICE
        self.stopped_at = now
        if self._reading is not None:
            self._reading.stop()
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._chat.stop(self._reply_id))
