"""What a turn emits: a closed union, consumed with `match`, and how it folds into a reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
    parts: list[Part] = []
    notices: list[str] = []
    finished: Finished | None = None
    failed: Failed | None = None
    for event in events:
        match event:
            case ThinkingDelta(text):
                _append_thinking(parts, text)
            case AnswerDelta(text):
                _append_text(parts, text)
            case ToolCallOpened(_, id, name, in_thought):
                parts.append(ToolCall(id, name, "", in_thought))
            case ToolCallDelta(index, arguments):
                _append_arguments(parts, index, arguments)
            case Notice(text):
                notices.append(text)
            case Finished():
                finished = event
            case Failed():
                failed = event
            case PhaseOpened(phase):
                _append_phase(parts, phase)
            case Started():
                pass
            case _:
                assert_never(event)
    return Folded(Message(Role.ASSISTANT, tuple(parts)), tuple(notices), finished, failed)


def _append_phase(parts: list[Part], phase: Phase) -> None:
    """A thought that was opened is part of the reply, even an empty one: to continue it, that must be known."""
    if phase is Phase.THINKING and not (parts and isinstance(parts[-1], Thinking)):
        parts.append(Thinking(""))


def _append_thinking(parts: list[Part], text: str) -> None:
    if parts and isinstance(parts[-1], Thinking):
        parts[-1] = Thinking(parts[-1].text + text)
    else:
        parts.append(Thinking(text))


def _append_text(parts: list[Part], text: str) -> None:
    if parts and isinstance(parts[-1], Text):
        parts[-1] = Text(parts[-1].text + text)
    else:
        parts.append(Text(text))


def _append_arguments(parts: list[Part], index: int, arguments: str) -> None:
    places = [place for place, part in enumerate(parts) if isinstance(part, ToolCall)]
    call = parts[places[index]]
    assert isinstance(call, ToolCall)
    parts[places[index]] = replace(call, arguments=call.arguments + arguments)
