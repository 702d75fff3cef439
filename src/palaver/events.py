"""What a turn emits: a closed union, consumed with `match`, and how it folds into a reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from palaver.generation import Finish
from palaver.messages import Message, Part, Role, Text, Thinking, ToolCall
from palaver.phases import Phase


@dataclass(frozen=True, slots=True)
class Waiting:
    """The turn stands in the queue; 1 is the next to be let in."""

    position: int
    seconds: float | None = None
    """About how long it will take, where that is known."""


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the cache, the first token comes next."""

    prompt_tokens: int
    cached_tokens: int
    notice: str = ""
    """What the reader should know of how the reply goes on, in one sentence. It has no number, unlike a `Notice`: it
    follows from the engine, not from the tokens."""


@dataclass(frozen=True, slots=True)
class PhaseOpened:
    """From here on the model is thinking, answering or calling a tool; comes before the phase's first text."""

    phase: Phase
    tokens: int = field(default=0, compare=False)
    """How many tokens of the reply were thought up to here."""


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    text: str
    tokens: int = field(default=0, compare=False)
    """How many tokens of the reply were thought up to here."""


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


ReadEvent = PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice
"""What a format's reader makes of tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    finish: Finish
    usage: Usage
    stop: str | None = None
    tail: tuple[ReadEvent, ...] = ()
    """What was held back because it could have become a marker. Taken back where the reply goes on after all."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ended with an error; what was said so far stays."""

    error: str
    tail: tuple[ReadEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that was said up to here, in place of events that can't be told again."""

    message: Message


Event = Waiting | Started | Snapshot | ReadEvent | Finished | Failed


@dataclass(frozen=True, slots=True)
class Folded:
    """A stream of events as one value."""

    message: Message
    notices: tuple[str, ...] = ()
    finished: Finished | None = None
    failed: Failed | None = None


def fold(events: Iterable[Event]) -> Folded:
    reply = _Reply()
    ending: Finished | Failed | None = None
    for event in events:
        match event:
            case Finished() | Failed():
                ending = event
            case Waiting():
                pass
            case Started(notice=notice):
                reply.notices += [notice] if notice else []
            case Snapshot(message):
                reply = _Reply(message.parts)
            case _:
                ending = None  # the reply went on: what its first ending let go of is taken back
                reply.take(event)
    for event in ending.tail if ending else ():
        reply.take(event)
    finished = ending if isinstance(ending, Finished) else None
    failed = ending if isinstance(ending, Failed) else None
    return Folded(Message(Role.ASSISTANT, reply.parts()), tuple(reply.notices), finished, failed)


class _Reply:
    """The parts of a reply as they grow; each keeps its pieces until all are there."""

    def __init__(self, before: tuple[Part, ...] = ()) -> None:
        self._before = before
        self._parts: list[tuple[type[Text] | type[Thinking] | ToolCallOpened, list[str]]] = []
        self.arguments: dict[int, list[str]] = {}
        self.notices: list[str] = []

    def take(self, event: ReadEvent) -> None:
        match event:
            case ThinkingDelta(text):
                self.open(Thinking).append(text)
            case AnswerDelta(text):
                self.open(Text).append(text)
            case ToolCallOpened():
                self.call(event)
            case ToolCallDelta(index, arguments):
                self.arguments[index].append(arguments)
            case Notice(text):
                self.notices.append(text)
            case PhaseOpened(phase):
                if phase is Phase.THINKING:  # a thought that was opened is part of the reply, even an empty one
                    self.open(Thinking)
            case _:
                assert_never(event)

    def open(self, kind: type[Text] | type[Thinking]) -> list[str]:
        """The pieces of the last part, or of a new one where that is of another kind."""
        if not self._parts or self._parts[-1][0] is not kind:
            self._parts.append((kind, []))
        return self._parts[-1][1]

    def call(self, opened: ToolCallOpened) -> None:
        self.arguments[opened.index] = []
        self._parts.append((opened, self.arguments[opened.index]))

    def parts(self) -> tuple[Part, ...]:
        return (*self._before, *(_part(kind, "".join(pieces)) for kind, pieces in self._parts))


def _part(kind: type[Text] | type[Thinking] | ToolCallOpened, text: str) -> Part:
    if isinstance(kind, ToolCallOpened):
        return ToolCall(kind.id, kind.name, text, kind.in_thought)
    return kind(text)
