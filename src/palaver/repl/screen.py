"""What a person sees: lines that are done, which scroll away and are never touched again, and a few live ones below.

Every change is one write. Only live lines are written again, and of those only what changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TextIO

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
        "thought": "dim",
        "call": "magenta",
    }
)
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronised output: terminals that know it show the change at once, others ignore it."""
_REFLOWING = ("TMUX", "VTE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE")


def console(out: TextIO, width: int | None = None) -> Console:
    """Text is taken as it is: square brackets are no markup, colons no emoji."""
    return Console(file=out, theme=THEME, highlight=False, markup=False, emoji=False, width=width)


def has_cursor(out: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether live lines are possible: a terminal whose cursor can be moved."""
    return out.isatty() and environment.get("TERM", "") not in ("dumb", "unknown", "")


class Screen:
    def __init__(self, console: Console, live: bool, environment: Mapping[str, str] = os.environ) -> None:
        self.console = console
        self.is_live = live
        self._live: list[str] = []
        self._width = 0
        """How wide the terminal was when the live lines were written."""
        self._reflows = any(name in environment for name in _REFLOWING)

    @property
    def width(self) -> int:
        return self.console.width

    def show(self, *renderables: RenderableType) -> None:
        """Puts something above the live lines, for good."""
        self.update(renderables, None)

    def note(self, text: str) -> None:
        self.show(Text(text, style="note"))

    def error(self, text: object) -> None:
        self.show(Text(str(text), style="error"))

    def update(self, done: Iterable[RenderableType], live: Iterable[RenderableType] | None = ()) -> None:
        """`done` goes to the scrollback, `live` takes the place of the live lines; None leaves them as they are."""
        finished = self.lines(done)
        below = self._live if live is None else self.lines(live)[-(self.console.height - 1) :]
        if not self.is_live:
            self._write("".join(f"{line}\n" for line in finished))
        elif finished or below != self._live:
            self._write(self._painted(finished, below))

    def lines(self, renderables: Iterable[RenderableType]) -> list[str]:
        """How they look at the terminal's present width, with the codes for colours."""
        with self.console.capture() as capture:
            for renderable in renderables:
                self.console.print(renderable)
        text = capture.get()
        return text.removesuffix("\n").split("\n") if text else []

    def _painted(self, finished: list[str], below: list[str]) -> str:
        lines = [*finished, *below]
        same = self._unchanged(lines)
        shorter = len(self._live) > len(lines)
        out = [_BEGIN, self._to_first_changed(same), "\x1b[J" if shorter else ""]
        out.append("\r\n".join(f"\x1b[2K{line}" for line in lines[same:]))
        out += ["\r\n" if finished and not below else "", _HIDE if below else _SHOW, _END]
        self._live, self._width = below, self.width
        return "".join(out)

    def _unchanged(self, lines: list[str]) -> int:
        """How many lines at the start stay as they are. The last one is always written again."""
        if self._width != self.width:
            return 0
        limit = max(0, min(len(lines), len(self._live)) - 1)
        return next((place for place in range(limit) if lines[place] != self._live[place]), limit)

    def _to_first_changed(self, same: int) -> str:
        up = self._rows() - 1 - same
        return "\r" + (f"\x1b[{up}A" if up > 0 else "") if self._live else ""

    def _rows(self) -> int:
        """How many rows the live lines take: more than were written where the terminal got narrower and reflows."""
        if not self._reflows or self.width >= self._width:
            return len(self._live)
        widths = (cell_len(Text.from_ansi(line).plain) for line in self._live)
        return sum(max(1, -(-width // self.width)) for width in widths)

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()
