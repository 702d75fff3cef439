"""Live lines and the scrollback above them."""

from __future__ import annotations

import pytest
from rich.text import Text

from palaver.repl.screen import Screen, has_cursor
from tests.repl.emulator import TerminalEmulator, make_screen


def texts(*lines: str) -> list[Text]:
    return [Text(line) for line in lines]


def test_done_lines_go_above_live_ones() -> None:
    emulator = TerminalEmulator()
    screen = make_screen(emulator)
    screen.update(texts("a"), texts("live 1", "live 2"))
    assert emulator.shown() == "a\nlive 1\nlive 2"
    screen.update(texts("b", "c"), texts("live 3"))
    assert emulator.shown() == "a\nb\nc\nlive 3"
    screen.show(Text("d"))
    assert emulator.shown() == "a\nb\nc\nd\nlive 3"
    screen.update(())
    assert emulator.shown() == "a\nb\nc\nd"
    screen.update(texts("e"))
    assert emulator.shown() == "a\nb\nc\nd\ne"
    assert emulator.screen.cursor.y == 5
    assert not emulator.screen.cursor.hidden


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("done", range(3))
@pytest.mark.parametrize("before", range(6))
def test_any_number_of_lines_follows_any_other(before: int, done: int, after: int) -> None:
    emulator = TerminalEmulator(10)
    screen = make_screen(emulator)
    screen.show(Text("above"))
    counts = {"o": before, "d": done, "n": after}
    old, finished, new = ([f"{name}{n:09}" for n in range(count)] for name, count in counts.items())
    screen.update((), texts(*old))
    emulator.first_touched_row()
    screen.update(texts(*finished), texts(*new))
    assert emulator.shown() == "\n".join(["above", *finished, *new])
    first = emulator.first_touched_row()
    assert first is None or first > 0


def test_only_what_changed_is_written_again() -> None:
    emulator = TerminalEmulator()
    screen = make_screen(emulator)
    screen.update((), texts("same", "same too", "old"))
    written = emulator.characters
    emulator.first_touched_row()
    screen.update((), texts("same", "same too", "new"))
    assert emulator.first_touched_row() == 2
    assert emulator.characters - written < 40
    written = emulator.characters
    screen.update((), texts("same", "same too", "new"))
    assert emulator.characters == written


def test_more_live_lines_than_rows_show_the_last() -> None:
    emulator = TerminalEmulator(20, 10)
    screen = make_screen(emulator)
    screen.update((), texts(*(f"line {n}" for n in range(30))))
    assert emulator.shown().splitlines()[-1] == "line 29"
    assert len(emulator.shown().splitlines()) == 9


@pytest.mark.parametrize("columns", [40, 120])
def test_after_a_resize_what_was_done_is_still_there(columns: int) -> None:
    emulator = TerminalEmulator(80)
    screen = make_screen(emulator)
    screen.update(texts("done"), texts("x" * 70, "y" * 70))
    emulator.screen.resize(500, columns)
    screen.console.size = (columns, 500)
    screen.update(texts("more"), texts("live"))
    assert emulator.shown() == "done\nmore\nlive"


def test_a_terminal_that_reflows_is_known() -> None:
    """In such a terminal the live lines occupy more rows after it got narrower."""
    emulator = TerminalEmulator(80)
    screen = make_screen(emulator, VTE_VERSION="7000")
    screen.update((), texts("x" * 70, "y" * 70))
    screen.console.size = (40, 500)
    screen.update((), texts("live"))
    assert screen._row_count() == 1
    assert "\x1b[3A" in _moves(screen, 80, 40, ["x" * 70, "y" * 70])


def _moves(screen: Screen, before: int, after: int, lines: list[str]) -> str:
    screen._live, screen._width = lines, before
    screen.console.size = (after, 500)
    return screen._to_first_changed(0)


def test_where_the_cursor_can_not_be_moved() -> None:
    assert has_cursor(TerminalEmulator(), {"TERM": "xterm"})
    assert not has_cursor(TerminalEmulator(), {"TERM": "dumb"})
    assert not has_cursor(TerminalEmulator(), {})
    emulator = TerminalEmulator()
    screen = Screen(make_screen(emulator).console, live=False)
    screen.update(texts("done"), texts("live"))
    assert emulator.shown() == "done"
