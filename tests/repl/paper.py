"""A screen without a program: what is written to it is seen as a person would see it, and every write is watched."""

from __future__ import annotations

import io

import pyte

from palaver.chat.turn_log import LogEntry
from palaver.events import Event, Failed, Finished, Snapshot, Started, Waiting
from palaver.repl.reply_view import ReplyView
from palaver.repl.screen import Screen, console
from palaver.repl.settings import ThinkingDisplay


class Paper(io.StringIO):
    """Tall enough that nothing scrolls away."""

    def __init__(self, columns: int = 80, rows: int = 500) -> None:
        super().__init__()
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self.screen)
        self.characters = 0
        self.writes = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.characters += len(text)
        self.writes += 1
        self._stream.feed(text)
        return len(text)

    def touched(self) -> int | None:
        """The first row that was written to since the last call."""
        rows, self.screen.dirty = self.screen.dirty, set()
        return min(rows, default=None)

    def shown(self) -> str:
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip()


def screen_on(paper: Paper, **environment: str) -> Screen:
    whole = {"TERM": "xterm-256color", **environment}
    made = console(paper, paper.screen.columns)
    made._environ = whole
    made.size = (paper.screen.columns, paper.screen.lines)
    return Screen(made, live=True, environment=whole)


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def numbered(*events: Event) -> list[LogEntry]:
    """The entries as a turn's log would tell them."""
    entries, number = [], 0
    for event in events:
        number += not isinstance(event, Waiting | Started | Snapshot | Finished | Failed)
        entries.append(LogEntry(number, event))
    return entries


def view_on(
    paper: Paper, thoughts: ThinkingDisplay = ThinkingDisplay.COLLAPSED, known: int = 0
) -> tuple[ReplyView, Watch]:
    clock = Watch()
    return ReplyView(screen_on(paper), thoughts, known=known, clock=clock), clock
