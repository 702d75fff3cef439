"""The seam of a reply that goes on: its client holds what it was told, maybe with what was held back, and hears the
rest once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream
from palaver.events import AnswerDelta, Event, ReadEvent, ThinkingDelta, ToolCallDelta, fold
from palaver.messages import Message


class Seam:
    """Takes off the beginning of the new events what their client has already."""

    def __init__(self, held: dict[type[ReadEvent], str]) -> None:
        """By kind of event: what the client has beyond what the reader of its tokens tells of them."""
        self._held = held

    def take(self, event: ReadEvent) -> ReadEvent | None:
        """What of the event is new."""
        held = self._held.pop(type(event), "") if self._held else ""
        if not held:
            return event
        match event:
            case ThinkingDelta(text) | AnswerDelta(text):
                fresh = self._fresh(type(event), held, text)
                return replace(event, text=fresh) if fresh else None
            case ToolCallDelta(_, text):
                fresh = self._fresh(type(event), held, text)
                return replace(event, arguments=fresh) if fresh else None
            case _:
                return event

    def _fresh(self, kind: type[ReadEvent], held: str, text: str) -> str:
        if text.startswith(held):
            return text[len(held) :]
        if held.startswith(text):
            self._held[kind] = held[len(text) :]
            return ""
        return text


def seam(model: Model, utterance: ReplyStream, sent: Message | None) -> Seam | None:
    """`sent` is the begun reply as its client sent it; by its token ids alone, it is what those tell to their end."""
    prompt, request = utterance.prompt, utterance.request
    if not prompt.reply_ids and not prompt.healing:
        return None
    reader = model.format.reader(prompt, request.sampling.stop, request.tools, request.options)
    opened: Sequence[Event] = reader.open()
    told, has = fold(opened).message, fold([*opened, *reader.close()]).message
    if sent is not None and sent.parts:
        has = sent
    return Seam({kind: rest for kind, now, then in _texts(has, told) if (rest := _beyond(now, then))})


def _texts(has: Message, told: Message) -> list[tuple[type[ReadEvent], str, str]]:
    return [
        (ThinkingDelta, has.thinking, told.thinking),
        (AnswerDelta, has.text, told.text),
        (ToolCallDelta, _last_arguments(has), _last_arguments(told)),
    ]


def _last_arguments(message: Message) -> str:
    return message.tool_calls[-1].arguments if message.tool_calls else ""


def _beyond(now: str, then: str) -> str:
    return now[len(then) :] if now.startswith(then) else ""
