"""Schemas of a turn's events, and of the items of the two event streams."""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

from pydantic import Field

from palaver import events, generation, phases
from palaver.chat.turn_log import LogEntry
from palaver.wire.errors import ErrorSchema
from palaver.wire.responses import ConversationChangeSchema
from palaver.wire.values import MessageSchema, UsageSchema, ValueModel


class WaitingSchema(ValueModel):
    """The turn stands in the queue; 1 is the next to be let in."""

    type: Literal["waiting"]
    position: int
    seconds: float | None


class StartedSchema(ValueModel):
    """The prompt is in the cache, the first token comes next."""

    type: Literal["started"]
    prompt_tokens: int
    cached_tokens: int
    notice: str = ""
    """A sentence for the user about how the reply is continued, such as by another engine."""


class SnapshotSchema(ValueModel):
    """All that was said up to here, in place of events that can't be told again."""

    type: Literal["snapshot"]
    message: MessageSchema


class PhaseOpenedSchema(ValueModel):
    """From here on the model is thinking, answering or calling a tool."""

    type: Literal["phase_opened"]
    phase: phases.Phase
    tokens: int = 0


class ThinkingDeltaSchema(ValueModel):
    """`tokens`: how many tokens of the reply were thought up to here, as in `PhaseOpened`."""

    type: Literal["thinking_delta"]
    text: str
    tokens: int = 0


class AnswerDeltaSchema(ValueModel):
    type: Literal["answer_delta"]
    text: str


class ToolCallOpenedSchema(ValueModel):
    type: Literal["tool_call_opened"]
    index: int
    id: str
    name: str
    in_thought: bool


class ToolCallDeltaSchema(ValueModel):
    """A further piece of the arguments' JSON text."""

    type: Literal["tool_call_delta"]
    index: int
    arguments: str


class NoticeSchema(ValueModel):
    """Something the reader of the reply should know, in one sentence."""

    type: Literal["notice"]
    text: str


ReadEventSchema = (
    PhaseOpenedSchema
    | ThinkingDeltaSchema
    | AnswerDeltaSchema
    | ToolCallOpenedSchema
    | ToolCallDeltaSchema
    | NoticeSchema
)
ReadEventField = Annotated[ReadEventSchema, Field(discriminator="type")]


class FinishedSchema(ValueModel):
    """`tail` is what was held back because it could have become a marker; taken back where the reply goes on."""

    type: Literal["finished"]
    finish: generation.Finish
    usage: UsageSchema
    stop: str | None
    tail: list[ReadEventField]


class FailedSchema(ValueModel):
    """The turn ended with an error; what was said so far stays."""

    type: Literal["failed"]
    error: str
    tail: list[ReadEventField]


EventSchema = WaitingSchema | StartedSchema | SnapshotSchema | ReadEventSchema | FinishedSchema | FailedSchema
EventField = Annotated[EventSchema, Field(discriminator="type")]


class LogEntrySchema(ValueModel):
    """One event of one turn. `number` counts the numbered events up to here: come back with it."""

    number: int
    event: EventField

    @classmethod
    def from_value(cls, entry: LogEntry) -> LogEntrySchema:
        return cls(number=entry.number, event=encode_event(entry.event))

    def to_value(self) -> LogEntry:
        return LogEntry(self.number, decode_event(self.event))


class StreamOpenedSchema(ValueModel):
    """The first of a stream of many turns. What changed before it was not told."""

    type: Literal["opened"]


class TurnEventSchema(ValueModel):
    type: Literal["turn"]
    turn: str
    number: int
    event: EventField

    @classmethod
    def from_value(cls, turn: str, entry: LogEntry) -> TurnEventSchema:
        return cls(type="turn", turn=turn, number=entry.number, event=encode_event(entry.event))

    def to_value(self) -> LogEntry:
        return LogEntry(self.number, decode_event(self.event))


class StreamChangeSchema(ValueModel):
    type: Literal["change"]
    change: ConversationChangeSchema


class TurnRefusedSchema(ValueModel):
    """This turn can't be read; the others go on."""

    type: Literal["refused"]
    turn: str
    error: ErrorSchema


class StreamClosingSchema(ValueModel):
    """The server goes down: come back in a moment."""

    type: Literal["closing"]


StreamItem = Annotated[
    StreamOpenedSchema | TurnEventSchema | StreamChangeSchema | TurnRefusedSchema | StreamClosingSchema,
    Field(discriminator="type"),
]


def encode_event(event: events.Event) -> EventSchema:
    match event:
        case events.Waiting(position, seconds):
            return WaitingSchema(type="waiting", position=position, seconds=seconds)
        case events.Started(prompt_tokens, cached_tokens, notice):
            return StartedSchema(
                type="started", prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, notice=notice
            )
        case events.Snapshot(message):
            return SnapshotSchema(type="snapshot", message=MessageSchema.from_value(message))
        case events.Finished(finish, usage, stop, tail):
            return FinishedSchema(
                type="finished", finish=finish, usage=UsageSchema.from_value(usage), stop=stop, tail=_encode_tail(tail)
            )
        case events.Failed(error, tail):
            return FailedSchema(type="failed", error=error, tail=_encode_tail(tail))
        case _:
            return _encode_read_event(event)


def decode_event(event: EventSchema) -> events.Event:
    match event:
        case WaitingSchema(position=position, seconds=seconds):
            return events.Waiting(position, seconds)
        case StartedSchema():
            return events.Started(event.prompt_tokens, event.cached_tokens, event.notice)
        case SnapshotSchema(message=message):
            return events.Snapshot(message.to_value())
        case FinishedSchema(tail=tail):
            return events.Finished(
                event.finish, event.usage.to_value(), event.stop, tuple(map(_decode_read_event, tail))
            )
        case FailedSchema(error=error, tail=tail):
            return events.Failed(error, tuple(map(_decode_read_event, tail)))
        case _:
            return _decode_read_event(event)


def _encode_tail(tail: tuple[events.ReadEvent, ...]) -> list[ReadEventSchema]:
    return [_encode_read_event(event) for event in tail]


def _encode_read_event(event: events.ReadEvent) -> ReadEventSchema:
    match event:
        case events.ThinkingDelta(text, tokens):
            return ThinkingDeltaSchema(type="thinking_delta", text=text, tokens=tokens)
        case events.AnswerDelta(text):
            return AnswerDeltaSchema(type="answer_delta", text=text)
        case events.PhaseOpened(phase, tokens):
            return PhaseOpenedSchema(type="phase_opened", phase=phase, tokens=tokens)
        case events.ToolCallOpened(index, id, name, in_thought):
            return ToolCallOpenedSchema(type="tool_call_opened", index=index, id=id, name=name, in_thought=in_thought)
        case events.ToolCallDelta(index, arguments):
            return ToolCallDeltaSchema(type="tool_call_delta", index=index, arguments=arguments)
        case events.Notice(text):
            return NoticeSchema(type="notice", text=text)
        case _:
            assert_never(event)


def _decode_read_event(event: ReadEventSchema) -> events.ReadEvent:
    match event:
        case ThinkingDeltaSchema(text=text, tokens=tokens):
            return events.ThinkingDelta(text, tokens)
        case AnswerDeltaSchema(text=text):
            return events.AnswerDelta(text)
        case PhaseOpenedSchema(phase=phase, tokens=tokens):
            return events.PhaseOpened(phase, tokens)
        case ToolCallOpenedSchema():
            return events.ToolCallOpened(event.index, event.id, event.name, event.in_thought)
        case ToolCallDeltaSchema():
            return events.ToolCallDelta(event.index, event.arguments)
        case NoticeSchema(text=text):
            return events.Notice(text)
        case _:
            assert_never(event)
