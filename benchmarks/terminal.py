"""What the terminal costs: painting a long reply, and a thousand turns.

    python3 -m benchmarks.terminal            painting: cost by place in a reply of 20,000 tokens
    python3 -m benchmarks.terminal turns      the real program at a pseudo-terminal, a thousand turns

Ratios within one run count; seconds depend on the machine.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil

from palaver.chat.turn_log import LogEntry
from palaver.events import AnswerDelta, Started, ThinkingDelta
from palaver.repl.reply_view import ReplyView
from palaver.repl.screen import Screen, console
from palaver.repl.settings import ThinkingDisplay

TOKENS = 20_000
WINDOW = 2_500
PAINT_EVERY = 4
"""Tokens between two paints: sixty a second, painted fifteen times."""
TURNS = 1000
FRESH = 25
"""Turns after which a new conversation is begun, so that the context is never full."""


class Counted(io.StringIO):
    """A terminal that counts what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.characters += len(text)
        return len(text)


def tokens(kind: str) -> Iterator[str]:
    """A reply without end, a token at a time."""
    units = {
        "prose": ["Some", " words", " of", " a", " **bold**", " answer", ".", "\n\n"],
        "one paragraph": ["and", " so", " on", ","],
        "code": ["def", " f", "(", "x", "):", "\n    ", "return", " x", " + 1", "\n\n"],
        "list": ["- ", "an", " item", " of", " a", " list", "\n"],
        "table": ["| ", "one", " | ", "two", " |", "\n"],
        "thought": ["hm", ",", " what", " about", " this", "?", "\n"],
    }[kind]
    yield from {"code": ["```", "python", "\n"], "table": ["| a | b |\n", "|---|---|\n"]}.get(kind, [])
    while True:
        yield from units


def painting(kind: str) -> list[tuple[float, int]]:
    """Seconds and characters for each window of the reply."""
    out = Counted()
    made = console(out, 80)
    made.size = (80, 24)
    thoughts = ThinkingDisplay.EXPANDED if kind == "thought" else ThinkingDisplay.COLLAPSED
    view = ReplyView(Screen(made, live=True, environment={"TERM": "xterm"}), thoughts)
    view.handle(LogEntry(0, Started(1, 0)))
    event = ThinkingDelta if kind == "thought" else AnswerDelta
    windows, source = [], tokens(kind)
    for start in range(0, TOKENS, WINDOW):
        began, written = time.process_time(), out.characters
        for number in range(start, start + WINDOW):
            view.handle(LogEntry(number + 1, event(next(source))))
            if number % PAINT_EVERY == 0:
                view.paint()
        windows.append((time.process_time() - began, out.characters - written))
    return windows


def paint() -> None:
    print(f"a reply of {TOKENS:,} tokens, painted every {PAINT_EVERY}; windows of {WINDOW:,} tokens\n")
    print("| kind | ms a paint, 2nd window | last window | ratio | characters a token, 2nd | last |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in ("prose", "one paragraph", "code", "list", "table", "thought"):
        windows = painting(kind)
        (early, few), (late, many) = windows[1], windows[-1]
        paints = WINDOW / PAINT_EVERY
        print(
            f"| {kind} | {1000 * early / paints:.2f} | {1000 * late / paints:.2f} | {late / early:.2f} "
            f"| {few / WINDOW:.0f} | {many / WINDOW:.0f} |"
        )


def turns() -> None:
    """The program's memory and the time of a turn, early and late."""
    from tests.repl.terminal import Terminal

    with tempfile.TemporaryDirectory() as folder:
        flags = ["--set", "max_tokens=4", "--set", "seed=1", "--think", "off"]
        command = [sys.executable, "-m", "palaver", "chat", "--local", "--data", folder, *flags]
        with Terminal(command) as terminal:
            terminal.wait(" is ready · ", 120)
            terminal.prompt()
            took, memory = [], []
            for number in range(TURNS):
                if number % FRESH == 0:
                    terminal.do("/new")
                began = time.monotonic()
                terminal.do(f"What is {number} + 1?")
                took.append(time.monotonic() - began)
                memory.append(resident(terminal.pid))
                terminal.forget()
    tenth = TURNS // 10
    early, late = sorted(took[tenth : 2 * tenth]), sorted(took[-tenth:])
    print(f"{TURNS:,} turns: median {1000 * early[tenth // 2]:.0f} ms in the second tenth, ", end="")
    print(f"{1000 * late[tenth // 2]:.0f} ms in the last: ratio {late[tenth // 2] / early[tenth // 2]:.2f}")
    first, last = memory[2 * tenth] / 1024, memory[-1] / 1024
    print(f"resident: {first:.1f} MB after {2 * tenth}, {last:.1f} MB after {TURNS}: ratio {last / first:.3f}")


def resident(pid: int) -> int:
    """In kilobytes."""
    return psutil.Process(pid).memory_info().rss // 1024


if __name__ == "__main__":
    turns() if sys.argv[1:] == ["turns"] else paint()
