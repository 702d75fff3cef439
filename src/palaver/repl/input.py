"""Input of a session: the protocol of line sources, and the one that reads a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Protocol, TextIO

from palaver.errors import RequestError
from palaver.repl import strings
from palaver.repl.signals import handle_interrupt

DOUBLE_PRESS_SECONDS = 1.0
"""A second Ctrl+C within this time drops the stopped reply."""


@dataclass(frozen=True, slots=True)
class TypedLine:
    text: str
    edited_id: str | None = None
    """The id of the message that this line edits."""


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The message that the Up key edits."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class KeyActions:
    """Callbacks for Ctrl+C, Ctrl+T and Ctrl+L while no prompt is shown."""

    on_interrupt: Callable[[], object]
    on_toggle: Callable[[], object] = lambda: None
    on_clear: Callable[[], object] = lambda: None


class ReplyDropped(Exception):
    """A second Ctrl+C within a second: the stopped reply is dropped."""


class LineSource(Protocol):
    is_interactive: bool

    async def read(self, initial: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        """The next message or command. Raises EOFError at the end, ReplyDropped for the second of two Ctrl+C, and
        RequestError for a line that is not UTF-8."""
        ...

    async def ask(self, question: str) -> str:
        """Asks a short question. Raises EOFError if the source is not interactive."""
        ...

    def watch_keys(self, actions: KeyActions) -> AbstractContextManager[None]:
        """Inside the context, keys call the actions although no prompt is shown."""
        ...

    def released(self) -> AbstractContextManager[None]:
        """Inside the context, another program may read from the terminal."""
        ...


class StreamLineSource:
    """One line per message, from a pipe or a terminal without cursor control."""

    def __init__(self, stream: TextIO, prompt_to: TextIO | None = None) -> None:
        if isinstance(stream, TextIOWrapper):  # so that a byte that is not UTF-8 is an error of its line alone
            stream.reconfigure(errors="surrogateescape")
        self._stream = stream
        self._line_count = 0
        self._prompt_to = prompt_to
        self.is_interactive = prompt_to is not None

    async def read(self, initial: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        """The next line. A backslash at its end joins it with the following one, as at the prompt."""
        lines = [await self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            try:
                lines.append(await self._line("  "))
            except EOFError:
                break
        for number, line in enumerate(lines, self._line_count - len(lines) + 1):
            _check_utf8(line, number)
        return TypedLine("\n".join(lines))

    async def ask(self, question: str) -> str:
        if self._prompt_to is None:
            raise EOFError
        line = await self._line(f"{question} ")
        _check_utf8(line, self._line_count)
        return line

    def watch_keys(self, actions: KeyActions) -> AbstractContextManager[None]:
        return handle_interrupt(actions.on_interrupt)

    def released(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def _line(self, prompt: str) -> str:
        if self._prompt_to is not None:
            print(prompt, end="", file=self._prompt_to, flush=True)
        with handle_interrupt(lambda: None):  # the terminal itself discards the line
            line = await asyncio.to_thread(self._stream.readline)
        if not line:
            raise EOFError
        self._line_count += 1
        return line.removesuffix("\n").removesuffix("\r")


def _check_utf8(line: str, number: int) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        position = len(line[: error.start].encode())
        raise RequestError(strings.LINE_NOT_UTF8.format(number=f"{number:,}", position=position)) from None
