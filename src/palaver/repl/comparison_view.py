"""Replies side by side while they stream, each in a column of the screen.

Each column is a `ReplyView` on a screen of its own, whose lines are collected. Rows that are final in all columns go
into the scrollback; the others are live.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import cast

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from palaver.chat.interface import Chat
from palaver.errors import PalaverError
from palaver.events import Failed, Finished
from palaver.repl.input import KeyActions, LineSource
from palaver.repl.reply_view import PAINTS_PER_SECOND, ReplyView
from palaver.repl.screen import Colours, Screen, console
from palaver.repl.settings import ThinkingDisplay
from palaver.repl.status import fills_context, statistics_line
from palaver.repl.text import one_line
from palaver.store import StoredMessage

MIN_COLUMN = 32
"""Columns that are narrower than this are shown one after the other."""
_GAP = " │ "


class ColumnScreen(Screen):
    """A screen that collects its lines instead of writing them."""

    def __init__(self, width: int, terminal: Console) -> None:
        super().__init__(console(io.StringIO(), width, cast(Colours | None, terminal.color_system)), live=True)
        self.finished: list[str] = []
        self.below: list[str] = []

    def update(self, done: Iterable[RenderableType], live: Iterable[RenderableType] | None = ()) -> None:
        self.finished += self.lines(done)
        if live is not None:
            self.below = self.lines(live)


def column_width(width: int, columns: int) -> int | None:
    """The width of each column; None if they don't fit side by side."""
    each = (width - len(_GAP) * (columns - 1)) // columns
    return each if each >= MIN_COLUMN else None


class ComparisonView:
    def __init__(self, screen: Screen, names: Sequence[str], width: int, display: ThinkingDisplay) -> None:
        self._screen = screen
        self._width = width
        self._columns = [ColumnScreen(width, screen.console) for _ in names]
        self.views = [ReplyView(column, display) for column in self._columns]
        self._shown = 0
        """The rows that are in the scrollback."""
        for column, name in zip(self._columns, names, strict=True):
            column.update([Text(one_line(name, width), style="name"), Text("─" * width, style="note")])

    def toggle(self) -> None:
        for view in self.views:
            view.toggle()

    def paint(self) -> None:
        for view in self.views:
            view.paint()
        final = min(len(column.finished) for column in self._columns)
        self._write(final, [[*column.finished, *column.below] for column in self._columns])

    def close(self, statistics: Sequence[str]) -> None:
        """Writes the rest of all columns, and a line about each."""
        for view, column, line in zip(self.views, self._columns, statistics, strict=True):
            view.close()
            column.update([Text(), Text(line, style="note")])
        rows = [column.finished for column in self._columns]
        self._write(max(map(len, rows)), rows)

    def _write(self, final: int, columns: Sequence[Sequence[str]]) -> None:
        rows = list(zip_longest(*columns, fillvalue=""))
        done = [self._join(row) for row in rows[self._shown : final]]
        self._screen.update(done, [self._join(row) for row in rows[max(final, self._shown) :]])
        self._shown = max(final, self._shown)

    def _join(self, cells: Sequence[str]) -> Text:
        row = Text(no_wrap=True, overflow="crop")
        for number, cell in enumerate(cells):
            if number:
                row.append(_GAP, style="note")
            text = Text.from_ansi(cell)
            row.append_text(text)
            if number < len(cells) - 1:
                row.append(" " * max(0, self._width - cell_len(text.plain)))
        return row


class ComparisonFollower:
    """Follows all replies of a comparison at once. Ctrl+C stops all of them."""

    def __init__(self, chat: Chat, view: ComparisonView, lines: LineSource, screen: Screen) -> None:
        self._chat = chat
        self._view = view
        self._lines = lines
        self._screen = screen
        self._reply_ids: list[str] = []
        self._stopping: list[asyncio.Task[None]] = []

    async def follow(self, reply_ids: Sequence[str], width: int, stop: bool = False) -> list[Finished | Failed | None]:
        """Shows the replies up to their ends. `stop`: stops them at once."""
        self._reply_ids = list(reply_ids)
        keys = KeyActions(self._on_interrupt, self._view.toggle, self._screen.clear)
        with self._lines.watch_keys(keys):
            if stop:
                self._on_interrupt()
            painter = asyncio.create_task(self._paint())
            try:
                await self._read_all(reply_ids)
            finally:
                if painter.done():
                    painter.result()
                painter.cancel()
                replies = [await self._message(id) for id in reply_ids]
                pairs = zip(self._view.views, replies, strict=True)
                self._view.close([await self._statistics(view, reply, width) for view, reply in pairs])
            for stopping in self._stopping:
                with suppress(PalaverError):
                    await stopping
        return [view.ending for view in self._view.views]

    async def _read_all(self, reply_ids: Sequence[str]) -> None:
        """Reads all replies. If one can't be read, it ends the others before it raises the error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for view, reply_id in zip(self._view.views, reply_ids, strict=True):
                    tasks.create_task(self._read(view, reply_id))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _read(self, view: ReplyView, reply_id: str) -> None:
        async with self._chat.events(reply_id) as entries:
            async for entry in entries:
                view.handle(entry)

    async def _paint(self) -> None:
        while True:
            await asyncio.sleep(1 / PAINTS_PER_SECOND)
            self._view.paint()

    async def _message(self, id: str) -> StoredMessage | None:
        with suppress(PalaverError):
            return await self._chat.message(id)
        return None

    async def _statistics(self, view: ReplyView, reply: StoredMessage | None, width: int) -> str:
        if view.ending is None:
            return ""
        after = reply.reply if reply is not None else None
        is_full = False
        with suppress(PalaverError):
            is_full = await fills_context(self._chat, after)
        return statistics_line(view.ending, view.time_to_first_token, None, after, width, is_full)

    def _on_interrupt(self) -> None:
        if not self._stopping:
            self._stopping = [asyncio.create_task(self._chat.stop_reply(id)) for id in self._reply_ids]
