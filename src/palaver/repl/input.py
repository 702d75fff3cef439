"""Where what is said to the session comes from: a person at a prompt, or a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TextIO

from palaver.repl.plain import interrupts


@dataclass(frozen=True, slots=True)
class TypedLine:
    text: str
    edited: str | None = None
    """The id of the message of which this is another wording."""


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The message that the Up key edits."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class KeyActions:
    """What keys do while no prompt is shown."""

    interrupted: Callable[[], object]
    toggled: Callable[[], object] = lambda: None


class ReplyDropped(Exception):
    """Ctrl+C came again within a second: the reply that was stopped is not wanted."""


class LineSource(Protocol):
    is_person: bool

    async def read(self, begun: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        """The next message or command. EOFError when there are no more, Dropped for the second of two Ctrl+C."""
        ...

    async def ask(self, question: str) -> str:
        """A short answer, on the side. EOFError where nobody can be asked."""
        ...

    def watching(self, watched: KeyActions) -> AbstractContextManager[None]:
        """Inside, keys are looked at without a prompt."""
        ...


class StreamLineSource:
    """A line a message, from a pipe or from a terminal that can do nothing else."""

    def __init__(self, stream: TextIO, prompt_to: TextIO | None = None) -> None:
        self._stream = stream
        self._prompt_to = prompt_to
        self.is_person = prompt_to is not None

    async def read(self, begun: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        return TypedLine(await self._line("> "))

    async def ask(self, question: str) -> str:
        if self._prompt_to is None:
            raise EOFError
        return await self._line(f"{question} ")

    def watching(self, watched: KeyActions) -> AbstractContextManager[None]:
        return interrupts(watched.interrupted)

    async def _line(self, prompt: str) -> str:
        if self._prompt_to is not None:
            print(prompt, end="", file=self._prompt_to, flush=True)
        with interrupts(lambda: None):  # the terminal itself throws the line away
            line = await asyncio.to_thread(self._stream.readline)
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")
