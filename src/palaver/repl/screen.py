"""The screen: finished lines in the scrollback, which are never redrawn, and a few live lines below them.

Every update is one write. Only live lines are redrawn, from the first one that changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text
from rich.theme import Theme

THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold",
        "markdown.h2": "bold",
        "markdown.h3": "bold",
        "markdown.h4": "bold",
        "markdown.h5": "bold",
        "markdown.h6": "bold",
        "markdown.link": "blue",
        "markdown.link_url": "underline blue",
        "markdown.item.bullet": "dim",
        "markdown.item.number": "dim",
        "markdown.block_quote": "none",
        "note": "dim",
        "error": "red",
        "name": "bold",
        "example": "cyan",
        "thought": "dim",
        "call": "magenta",
    }
)
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_BEGIN_SYNC, _END_SYNC = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronised output: terminals that support it show the update at once, others ignore the codes."""
_REFLOWING_TERMINALS = ("TMUX", "VTE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE")


Colours = Literal["auto", "standard", "256", "truecolor", "windows"]


def console(out: TextIO, width: int | None = None, colours: Colours | None = "auto") -> Console:
    """A console that prints text literally: no markup in square brackets, no emoji codes."""
    return Console(file=out, theme=THEME, highlight=False, markup=False, emoji=False, width=width, color_system=colours)


def has_cursor(out: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether live lines are possible: a terminal whose cursor can be moved."""
    return out.isatty() and environment.get("TERM", "") not in ("dumb", "unknown", "")


class Screen:
    def __init__(self, console: Console, live: bool, environment: Mapping[str, str] = os.environ) -> None:
        self.console = console
        self.is_live = live
        self._live: list[str] = []
        self._width = 0
        """The terminal's width when the live lines were written."""
        self._reflows = any(name in environment for name in _REFLOWING_TERMINALS)

    @property
    def width(self) -> int:
        return self.console.width

    def show(self, *renderables: RenderableType) -> None:
        """Prints above the live lines, permanently."""
        self.update(renderables, None)

    def note(self, text: str) -> None:
        self.show(Text(text, style="note"))

    def error(self, text: object) -> None:
        self.show(Text(str(text), style="error"))

    def clear(self) -> None:
        """Clears the terminal. The live lines are written again at the top."""
        if self.is_live:
            live, self._live = self._live, []
            self._write("\x1b[2J\x1b[H" + self._paint([], live))

    def update(self, done: Iterable[RenderableType], live: Iterable[RenderableType] | None = ()) -> None:
        """Appends `done` to the scrollback and replaces the live lines by `live`; None keeps them."""
        finished = self.lines(done)
        below = self._live if live is None else self.lines(live)[-(self.console.height - 1) :]
        if not self.is_live:
            self._write("".join(f"{line}\n" for line in finished))
        elif finished or below != self._live:
            self._write(self._paint(finished, below))

    def lines(self, renderables: Iterable[RenderableType]) -> list[str]:
        """Renders to lines at the terminal's current width, with colour codes."""
        with self.console.capture() as capture:
            for renderable in renderables:
                self.console.print(renderable)
        text = capture.get()
        return text.removesuffix("\n").split("\n") if text else []

    def _paint(self, finished: list[str], below: list[str]) -> str:
        lines = [*finished, *below]
        same = self._unchanged_lines(lines)
        shorter = len(self._live) > len(lines)
        out = [_BEGIN_SYNC, self._to_first_changed(same), "\x1b[J" if shorter else ""]
        out.append("\r\n".join(f"\x1b[2K{line}" for line in lines[same:]))
        out += ["\r\n" if finished and not below else "", _HIDE_CURSOR if below else _SHOW_CURSOR, _END_SYNC]
        self._live, self._width = below, self.width
        return "".join(out)

    def _unchanged_lines(self, lines: list[str]) -> int:
        """The number of unchanged lines at the start. The last line always counts as changed."""
        if self._width != self.width:
            return 0
        limit = max(0, min(len(lines), len(self._live)) - 1)
        return next((index for index in range(limit) if lines[index] != self._live[index]), limit)

    def _to_first_changed(self, same: int) -> str:
        up = self._row_count() - 1 - same
        return "\r" + (f"\x1b[{up}A" if up > 0 else "") if self._live else ""

    def _row_count(self) -> int:
        """The rows that the live lines occupy: more than were written if the terminal reflowed to a smaller width."""
        if not self._reflows or self.width >= self._width:
            return len(self._live)
        widths = (cell_len(Text.from_ansi(line).plain) for line in self._live)
        return sum(max(1, -(-width // self.width)) for width in widths)

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()
