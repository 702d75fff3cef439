"""A terminal emulator that stands in for stdout, and views that write to it."""

from __future__ import annotations

import io

import pyte

from palaver.chat.turn_log import LogEntry
from palaver.events import Event, Failed, Finished, Snapshot, Started, Waiting
from palaver.repl.reply_view import ReplyView
from palaver.repl.screen import Screen, console
from palaver.repl.settings import ThinkingDisplay


class TerminalEmulator(io.StringIO):
    """A text stream that emulates a terminal, tall enough that nothing scrolls away, and counts writes."""

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

    def first_touched_row(self) -> int | None:
        """The first row that was written to since the last call."""
        rows, self.screen.dirty = self.screen.dirty, set()
        return min(rows, default=None)

    def shown(self) -> str:
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip()


def make_screen(emulator: TerminalEmulator, **environment: str) -> Screen:
    variables = {"TERM": "xterm-256color", **environment}
    terminal_console = console(emulator, emulator.screen.columns)
    terminal_console._environ = variables
    terminal_console.size = (emulator.screen.columns, emulator.screen.lines)
    return Screen(terminal_console, live=True, environment=variables)


class FakeClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def log_entries(*events: Event) -> list[LogEntry]:
    """The events with the numbers that a turn log gives them."""
    entries, number = [], 0
    for event in events:
        number += not isinstance(event, Waiting | Started | Snapshot | Finished | Failed)
        entries.append(LogEntry(number, event))
    return entries


def make_view(
    emulator: TerminalEmulator,
    thinking_display: ThinkingDisplay = ThinkingDisplay.COLLAPSED,
    last_event: int = 0,
) -> tuple[ReplyView, FakeClock]:
    clock = FakeClock()
    view = ReplyView(
        make_screen(emulator),
        thinking_display,
        last_event=last_event,
        clock=clock,
    )
    return view, clock
