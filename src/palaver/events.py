"""What a turn emits: a closed union, consumed with `match`, and how it folds into a reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from palaver.generation import Finish
from palaver.messages import Message, Part, Role, Text, Thinking, ToolCall
from palaver.phases import Phase


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the cache, the first token comes next."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PhaseOpened:
    """From here on the model is thinking, answering or calling a tool; comes before the phase's first text."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    text: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallOpened:
    index: int
    id: str
    name: str
    in_thought: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A further piece of the arguments' JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the reader of the reply should know, in one sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply_tokens: int = 0
    thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    finish: Finish
    usage: Usage
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ended with an error; what was said so far stays."""

    error: str


ReadEvent = PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice
"""What a format's reader makes of tokens."""
Event = Started | ReadEvent | Finished | Failed


@dataclass(frozen=True, slots=True)
class Folded:
    """A stream of events as one value."""

    message: Message
    notices: tuple[str, ...] = ()
    finished: Finished | None = None
    failed: Failed | None = None


def fold(events: Iterable[Event]) -> Folded:
    reply = _Reply()
    finished: Finished | None = None
    failed: Failed | None = None
    for event in events:
        match event:
            case ThinkingDelta(text):
                reply.open(Thinking).append(text)
            case AnswerDelta(text):
                reply.open(Text).append(text)
            case ToolCallOpened():
                reply.call(event)
            case ToolCallDelta(index, arguments):
                reply.arguments[index].append(arguments)
            case Notice(text):
                reply.notices.append(text)
            case Finished():
                finished = event
            case Failed():
                failed = event
            case PhaseOpened(phase):
                if phase is Phase.THINKING:  # a thought that was opened is part of the reply, even an empty one
                    reply.open(Thinking)
            case Started():
                pass
            case _:
                assert_never(event)
    return Folded(Message(Role.ASSISTANT, reply.parts()), tuple(reply.notices), finished, failed)


class _Reply:
    """The parts of a reply as they grow; each keeps its pieces until all are there."""

    def __init__(self) -> None:
        self._parts: list[tuple[type[Text] | type[Thinking] | ToolCallOpened, list[str]]] = []
        self.arguments: list[list[str]] = []
        self.notices: list[str] = []

    def open(self, kind: type[Text] | type[Thinking]) -> list[str]:
        """The pieces of the last part, or of a new one where that is of another kind."""
        if not self._parts or self._parts[-1][0] is not kind:
            self._parts.append((kind, []))
        return self._parts[-1][1]

    def call(self, opened: ToolCallOpened) -> None:
        self.arguments.append([])
        self._parts.append((opened, self.arguments[-1]))

    def parts(self) -> tuple[Part, ...]:
        return tuple(_part(kind, "".join(pieces)) for kind, pieces in self._parts)


def _part(kind: type[Text] | type[Thinking] | ToolCallOpened, text: str) -> Part:
    if isinstance(kind, ToolCallOpened):
        return ToolCall(kind.id, kind.name, text, kind.in_thought)
    return kind(text)
