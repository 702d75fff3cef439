"""What a training conversation is made of. All values are frozen; nothing here draws or renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model writes it."""

    name: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    thinking: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Expect:
    """What an evaluation looks for in a reply; `bar` names the figure it counts for, `kind` the check."""

    bar: str
    kind: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question with the reply that is wanted."""

    user: str
    thinking: str
    answer: str
    expect: Expect | None = None
    calls: tuple[Call, ...] = ()

    def messages(self) -> tuple[Message, Message]:
        return Message("user", self.user), Message("assistant", self.answer, self.thinking, self.calls)

    def answered(self, answer: str, expect: Expect | None = None) -> Exchange:
        return replace(self, answer=answer, expect=expect)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply: written by the model, or by a grammar that leaves it no choice."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation whose last message is the reply to learn; earlier replies are context only."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    thinks: bool = True
    expect: Expect | None = None
    pieces: tuple[Piece, ...] = ()
    """The content of the last message in pieces, where a part of it is not to be learned."""
    terminal: bool = False
    """Whether the prompt says that the user is at a terminal: the template's variable `terminal`."""


def conversation(*exchanges: Exchange, system: str = "", tools: tuple[Json, ...] = (), thinks: bool = True) -> Sample:
    """The exchanges in their order as one sample; the last reply is the one to learn."""
    opening = (Message("system", system),) if system else ()
    turns = tuple(message for exchange in exchanges for message in exchange.messages())
    return Sample(opening + turns, tools, thinks, exchanges[-1].expect)
