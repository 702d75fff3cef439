"""A thought while it is thought: a few dim lines, or all of it; afterwards one line."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from palaver.repl.safe import safe
from palaver.repl.settings import Thoughts

SHOWN = 6
"""Lines of a collapsed thought."""
_TAIL = 4000
"""Characters that are enough to fill them, and after which an open line is cut."""


def seconds(value: float) -> str:
    """3.2 s, 2 min 5 s"""
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


class Thought:
    """One thought of a reply. `done` and `live` as in every section of a reply."""

    def __init__(self, mode: Thoughts, now: float | None, before: int = 0) -> None:
        """`now`: None where it is open, but the prompt is still read. `before`: how many tokens of the reply were
        thought before this thought."""
        self.mode = mode
        self._begun = now
        self._before = before
        self._counted = before
        self._text: list[str] = []
        self._open = ""
        """Expanded: the line that still grows. Collapsed: the last lines."""
        self._first = True

    def begin(self, now: float) -> None:
        """From here on its time is taken."""
        self._begun = now

    def count(self, tokens: int) -> None:
        """How many tokens of the reply were thought up to now, this thought's among them."""
        self._counted = max(self._counted, tokens)

    def feed(self, text: str) -> None:
        text = safe(text)
        self._text.append(text)
        self._open += text
        if self.mode is not Thoughts.EXPANDED and len(self._open) > 2 * _TAIL:
            self._open = self._open[-_TAIL:]

    def toggle(self, mode: Thoughts) -> None:
        """In full from its start on; what was shown in full stays where it is."""
        if mode is Thoughts.EXPANDED and self.mode is not mode:
            self._open = "".join(self._text)
            self._first = True
        self.mode = mode

    def done(self) -> list[RenderableType]:
        if self.mode is not Thoughts.EXPANDED:
            return []
        place = self._open.rfind("\n")
        if place < 0 and len(self._open) > _TAIL:
            place = self._open.rfind(" ")
        if place < 0:
            return []
        text, self._open = self._open[:place], self._open[place + 1 :]
        return self._lines(text)

    def live(self, now: float) -> list[RenderableType]:
        head = Text(f"thinking · {self._told(now)}" if self._begun is not None else "thinking", style="thought")
        match self.mode:
            case Thoughts.COLLAPSED:
                return [head, Barred(self._open.strip("\n"), SHOWN)]
            case Thoughts.HIDDEN:
                return [head]
            case Thoughts.EXPANDED:
                return [Barred(self._open), head]

    def close(self, now: float) -> list[RenderableType]:
        shown = [*self.done(), *(self._lines(self._open) if self._open.strip() else ())]
        if self.mode is Thoughts.HIDDEN:
            return []
        told = Text(f"thought for {self._told(now)}", style="thought")
        return [*(shown if self.mode is Thoughts.EXPANDED else ()), told]

    def _told(self, now: float) -> str:
        count = self._counted - self._before
        return seconds(now - (now if self._begun is None else self._begun)) + (f" · {tokens(count)}" if count else "")

    def _lines(self, text: str) -> list[RenderableType]:
        text = text.lstrip("\n") if self._first else text
        self._first = self._first and not text
        return [Barred(text)] if text else []


class Barred:
    """Dim text with a bar at its left, so that it can be told from an answer without colours too."""

    def __init__(self, text: str, last: int = 0) -> None:
        self._text = text
        self._last = last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(self._text if not self._last else self._text[-_TAIL:], style="thought", overflow="fold")
        if not text.plain:
            return
        lines = console.render_lines(text, options.update(width=max(1, options.max_width - 2)), pad=False)
        for line in lines[-self._last :] if self._last else lines:
            yield Segment("│ ", console.get_style("thought"))
            yield from line
            yield Segment.line()


def shown(thoughts: Iterable[str]) -> list[RenderableType]:
    """Thoughts of a past reply, in full."""
    return [Barred(safe(thought).strip("\n")) for thought in thoughts if thought.strip()]
