"""The events of a turn, and the two streams they come in."""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

from pydantic import Field

from palaver import events, generation, phases
from palaver.chat.turn_log import LogEntry as ChatEntry
from palaver.wire.base import Told
from palaver.wire.errors import Error
from palaver.wire.messages import Message
from palaver.wire.turns import Change


class Usage(Told):
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    thinking_tokens: int

    @classmethod
    def of(cls, usage: events.Usage) -> Usage:
        return cls.model_validate(usage)

    def value(self) -> events.Usage:
        return events.Usage(**dict(self))


class Waiting(Told):
    """The turn stands in the queue; 1 is the next to be let in."""

    type: Literal["waiting"]
    position: int
    seconds: float | None


class Started(Told):
    """The prompt is in the cache, the first token comes next."""

    type: Literal["started"]
    prompt_tokens: int
    cached_tokens: int
    notice: str = ""
    """What the reader should know of how the reply goes on: another engine than before."""


class Snapshot(Told):
    """All that was said up to here, in place of events that can't be told again."""

    type: Literal["snapshot"]
    message: Message


class PhaseOpened(Told):
    """From here on the model is thinking, answering or calling a tool."""

    type: Literal["phase_opened"]
    phase: phases.Phase
    tokens: int = 0


class ThinkingDelta(Told):
    """`tokens`: how many tokens of the reply were thought up to here, as in `PhaseOpened`."""

    type: Literal["thinking_delta"]
    text: str
    tokens: int = 0


class AnswerDelta(Told):
    type: Literal["answer_delta"]
    text: str


class ToolCallOpened(Told):
    type: Literal["tool_call_opened"]
    index: int
    id: str
    name: str
    in_thought: bool


class ToolCallDelta(Told):
    """A further piece of the arguments' JSON text."""

    type: Literal["tool_call_delta"]
    index: int
    arguments: str


class Notice(Told):
    """Something the reader of the reply should know, in one sentence."""

    type: Literal["notice"]
    text: str


AnyRead = PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice
ReadEvent = Annotated[AnyRead, Field(discriminator="type")]


class Finished(Told):
    """`tail` is what was held back because it could have become a marker; taken back where the reply goes on."""

    type: Literal["finished"]
    finish: generation.Finish
    usage: Usage
    stop: str | None
    tail: list[ReadEvent]


class Failed(Told):
    """The turn ended with an error; what was said so far stays."""

    type: Literal["failed"]
    error: str
    tail: list[ReadEvent]


AnyEvent = Waiting | Started | Snapshot | AnyRead | Finished | Failed
Event = Annotated[AnyEvent, Field(discriminator="type")]


class Entry(Told):
    """One event of one turn. `number` counts the numbered events up to here: come back with it."""

    number: int
    event: Event

    @classmethod
    def of(cls, entry: ChatEntry) -> Entry:
        return cls(number=entry.number, event=event_of(entry.event))

    def value(self) -> ChatEntry:
        return ChatEntry(self.number, event_value(self.event))


class Opened(Told):
    """The first of a stream of many turns. What changed before it was not told."""

    type: Literal["opened"]


class TurnEvent(Told):
    type: Literal["turn"]
    turn: str
    number: int
    event: Event

    @classmethod
    def of(cls, turn: str, entry: ChatEntry) -> TurnEvent:
        return cls(type="turn", turn=turn, number=entry.number, event=event_of(entry.event))

    def value(self) -> ChatEntry:
        return ChatEntry(self.number, event_value(self.event))


class Changed(Told):
    type: Literal["change"]
    change: Change


class Refused(Told):
    """This turn can't be read; the others go on."""

    type: Literal["refused"]
    turn: str
    error: Error


class Closing(Told):
    """The server goes down: come back in a moment."""

    type: Literal["closing"]


StreamItem = Annotated[Opened | TurnEvent | Changed | Refused | Closing, Field(discriminator="type")]


def event_of(event: events.Event) -> AnyEvent:
    match event:
        case events.Waiting(position, seconds):
            return Waiting(type="waiting", position=position, seconds=seconds)
        case events.Started(prompt_tokens, cached_tokens, notice):
            return Started(type="started", prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, notice=notice)
        case events.Snapshot(message):
            return Snapshot(type="snapshot", message=Message.of(message))
        case events.Finished(finish, usage, stop, tail):
            return Finished(type="finished", finish=finish, usage=Usage.of(usage), stop=stop, tail=_tail_of(tail))
        case events.Failed(error, tail):
            return Failed(type="failed", error=error, tail=_tail_of(tail))
        case _:
            return _read_of(event)


def event_value(event: AnyEvent) -> events.Event:
    match event:
        case Waiting(position=position, seconds=seconds):
            return events.Waiting(position, seconds)
        case Started():
            return events.Started(event.prompt_tokens, event.cached_tokens, event.notice)
        case Snapshot(message=message):
            return events.Snapshot(message.value())
        case Finished(tail=tail):
            return events.Finished(event.finish, event.usage.value(), event.stop, tuple(map(_read_value, tail)))
        case Failed(error=error, tail=tail):
            return events.Failed(error, tuple(map(_read_value, tail)))
        case _:
            return _read_value(event)


def _tail_of(tail: tuple[events.ReadEvent, ...]) -> list[AnyRead]:
    return [_read_of(event) for event in tail]


def _read_of(event: events.ReadEvent) -> AnyRead:
    match event:
        case events.ThinkingDelta(text, tokens):
            return ThinkingDelta(type="thinking_delta", text=text, tokens=tokens)
        case events.AnswerDelta(text):
            return AnswerDelta(type="answer_delta", text=text)
        case events.PhaseOpened(phase, tokens):
            return PhaseOpened(type="phase_opened", phase=phase, tokens=tokens)
        case events.ToolCallOpened(index, id, name, in_thought):
            return ToolCallOpened(type="tool_call_opened", index=index, id=id, name=name, in_thought=in_thought)
        case events.ToolCallDelta(index, arguments):
            return ToolCallDelta(type="tool_call_delta", index=index, arguments=arguments)
        case events.Notice(text):
            return Notice(type="notice", text=text)
        case _:
            assert_never(event)


def _read_value(event: AnyRead) -> events.ReadEvent:
    match event:
        case ThinkingDelta(text=text, tokens=tokens):
            return events.ThinkingDelta(text, tokens)
        case AnswerDelta(text=text):
            return events.AnswerDelta(text)
        case PhaseOpened(phase=phase, tokens=tokens):
            return events.PhaseOpened(phase, tokens)
        case ToolCallOpened():
            return events.ToolCallOpened(event.index, event.id, event.name, event.in_thought)
        case ToolCallDelta():
            return events.ToolCallDelta(event.index, event.arguments)
        case Notice(text=text):
            return events.Notice(text)
        case _:
            assert_never(event)
