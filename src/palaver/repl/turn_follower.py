"""Follows a reply in the terminal until it ends. Ctrl+C stops the reply; pressed twice, it is dropped, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from palaver.chat.interface import Chat
from palaver.errors import PalaverError
from palaver.events import Failed, Finished
from palaver.repl.input import DOUBLE_PRESS_SECONDS, KeyActions, LineSource
from palaver.repl.reply_view import PAINTS_PER_SECOND, TurnView

if TYPE_CHECKING:
    from palaver.repl.voice import SpokenReply


class TurnFollower:
    def __init__(
        self,
        chat: Chat,
        view: TurnView,
        lines: LineSource,
        speech: SpokenReply | None = None,
        on_clear: Callable[[], object] = lambda: None,
    ) -> None:
        self._chat = chat
        self._on_clear = on_clear
        self.view = view
        self._lines = lines
        self._speech = speech
        self._reply_id = ""
        self._stopping: asyncio.Task[None] | None = None
        self.stopped_at = float("-inf")
        """The time of the last Ctrl+C."""
        self.dropped = False

    async def follow(self, reply_id: str, stop: bool = False) -> Finished | Failed | None:
        """Shows the turn. Returns how it ended, or None if the event stream broke off. `stop`: stops it at once."""
        self._reply_id = reply_id
        with self._lines.watch_keys(KeyActions(self._on_interrupt, self.view.toggle, self._on_clear)):
            if stop:
                self._on_interrupt()
            painter = asyncio.create_task(self._paint())
            try:
                async with self._chat.events(reply_id) as entries:
                    async for entry in entries:
                        self.view.handle(entry)
                        if self._speech is not None:
                            self._speech.handle(entry)
            finally:
                if painter.done():
                    painter.result()
                painter.cancel()
                self.view.close()
                if self._speech is not None:
                    self._speech.close()
            if self._stopping is not None:
                with suppress(PalaverError):
                    await self._stopping
        return self.view.ending

    async def _paint(self) -> None:
        while True:
            await asyncio.sleep(1 / PAINTS_PER_SECOND)
            self.view.paint()

    def _on_interrupt(self) -> None:
        now = time.monotonic()
        self.dropped = now - self.stopped_at < DOUBLE_PRESS_SECONDS
        self.stopped_at = now
        if self._speech is not None:
            self._speech.stop()
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._chat.stop_reply(self._reply_id))
