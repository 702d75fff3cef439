"""The events of a turn, a closed union, and how they fold into a reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, assert_never

from palaver.encoding import Tagged
from palaver.generation import Finish, Step
from palaver.messages import Message, Part, Role, Text, Thinking, ToolCall
from palaver.phases import Phase


@dataclass(frozen=True, slots=True)
class Waiting:
    """The turn is in the queue, where position 1 is the next to be admitted, or waits for its model to be loaded."""

    type: Literal["waiting"] = field(default="waiting", kw_only=True, repr=False)
    position: int
    """0 while the model is being loaded."""
    seconds: float | None = None
    """The estimated wait; None if it is not known."""
    loading: str = ""
    """The name of the model that is being loaded."""
    progress: float | None = None
    """How much of it is loaded, from 0 to 1; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is computed; the first token comes next."""

    type: Literal["started"] = field(default="started", kw_only=True, repr=False)
    prompt_tokens: int
    cached_tokens: int
    notice: str = ""
    """A sentence for the user about how the reply is continued. Unlike a `Notice` it has no number: it depends on the
    engine, not on the tokens."""
    thinking_seconds: float | None = 0.0
    """How long the reply has been thinking when this is sent: the sum of all its runs. None if that is not known."""


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The unfinished block of a reply that is written by denoising. It replaces the draft before it, and the text of
    the finished block replaces it. It has no number, and readers that are late get only the newest."""

    type: Literal["draft_block"] = field(default="draft_block", kw_only=True, repr=False)
    position: int
    """The number of tokens of the reply before the block."""
    texts: tuple[str | None, ...]
    """The text of each token; None while it is masked, empty for control tokens."""
    confidence: tuple[float, ...]
    """How sure the model is of each token, from 0 to 1; of a masked one, of the token that it would write."""


@dataclass(frozen=True, slots=True)
class PhaseOpened:
    """The model starts thinking, answering or calling a tool. Comes before the first text of the phase."""

    type: Literal["phase_opened"] = field(default="phase_opened", kw_only=True, repr=False)
    phase: Phase
    tokens: int = field(default=0, compare=False)
    """The number of thinking tokens up to here."""


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    type: Literal["thinking_delta"] = field(default="thinking_delta", kw_only=True, repr=False)
    text: str
    tokens: int = field(default=0, compare=False)
    """The number of thinking tokens up to here."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    type: Literal["answer_delta"] = field(default="answer_delta", kw_only=True, repr=False)
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallOpened:
    type: Literal["tool_call_opened"] = field(default="tool_call_opened", kw_only=True, repr=False)
    index: int
    id: str
    name: str
    in_thought: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of the arguments' JSON text."""

    type: Literal["tool_call_delta"] = field(default="tool_call_delta", kw_only=True, repr=False)
    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence for the user about the reply."""

    type: Literal["notice"] = field(default="notice", kw_only=True, repr=False)
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply_tokens: int = 0
    thinking_tokens: int = 0


ReadEvent = PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice
"""The events that a format's reader produces from tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    type: Literal["finished"] = field(default="finished", kw_only=True, repr=False)
    finish: Finish
    usage: Usage
    stop: str | None = None
    tail: tuple[Annotated[ReadEvent, Tagged], ...] = ()
    """Text that was held back because it could start a marker. Discarded if the reply is continued."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ended with an error. The text so far stays."""

    type: Literal["failed"] = field(default="failed", kw_only=True, repr=False)
    error: str
    tail: tuple[Annotated[ReadEvent, Tagged], ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The reply up to here, instead of events that can't be replayed."""

    type: Literal["snapshot"] = field(default="snapshot", kw_only=True, repr=False)
    message: Message


Event = Waiting | Started | DraftBlock | Snapshot | ReadEvent | Finished | Failed


@dataclass(frozen=True, slots=True)
class ReplyBatch:
    """The events that one token made, or one event of the turn, such as its end."""

    events: tuple[Event, ...]
    steps: tuple[Step, ...] = ()
    """The tokens since the last batch: the last one made the events, text of the others was held back. The events
    before the first sampled token have none."""
    answer_steps: tuple[Step, ...] = ()
    """The tokens, of this batch or of earlier ones, that are known since then to be text of the answer."""
    thinking_tokens: int = 0
    """The number of thinking tokens up to here."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A stream of events, folded into one value."""

    message: Message
    notices: tuple[str, ...] = ()
    finished: Finished | None = None
    failed: Failed | None = None


def fold(events: Iterable[Event]) -> Folded:
    reply = _ReplyBuilder()
    ending: Finished | Failed | None = None
    for event in events:
        match event:
            case Finished() | Failed():
                ending = event
            case Waiting() | DraftBlock():
                pass
            case Started(notice=notice):
                reply.notices += [notice] if notice else []
            case Snapshot(message):
                reply = _ReplyBuilder(message.parts)
            case _:
                ending = None  # the reply was continued: the tail of its first ending is discarded
                reply.add(event)
    for event in ending.tail if ending else ():
        reply.add(event)
    finished = ending if isinstance(ending, Finished) else None
    failed = ending if isinstance(ending, Failed) else None
    return Folded(Message(Role.ASSISTANT, reply.parts()), tuple(reply.notices), finished, failed)


class _ReplyBuilder:
    """Builds the parts of a reply from its events."""

    def __init__(self, before: tuple[Part, ...] = ()) -> None:
        self._before = before
        self._parts: list[tuple[type[Text] | type[Thinking] | ToolCallOpened, list[str]]] = []
        self.arguments: dict[int, list[str]] = {}
        self.notices: list[str] = []

    def add(self, event: ReadEvent) -> None:
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
                if phase is Phase.THINKING:  # opened thinking is part of the reply, even if it is empty
                    self.open(Thinking)
            case _:
                assert_never(event)

    def open(self, kind: type[Text] | type[Thinking]) -> list[str]:
        """The pieces of the last part, or of a new part if the last is of another kind."""
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
