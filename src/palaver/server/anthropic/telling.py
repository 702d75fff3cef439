"""Replies in Anthropic's words: blocks that open, grow and close, and the same folded when they are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from pydantic_core import from_json

from palaver.events import (
    AnswerDelta,
    Finished,
    Notice,
    PhaseOpened,
    ReadEvent,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
)
from palaver.generation import Finish
from palaver.phases import Phase
from palaver.server.openai.speaking import Totals
from palaver.store.records import new_id

Event = dict[str, Any]
Sign = Callable[[str], str]
"""From what was thought in a block to the block's signature."""
PING: Event = {"type": "ping"}


@dataclass
class Blocks:
    """The content of one reply, block by block; what a block's kind is never changes."""

    sign: Sign | None = None
    shows_thinking: bool = True
    opened: Callable[[], None] = lambda: None
    """Told of every thought that begins."""
    notices: list[str] = field(default_factory=list)
    calls: int = 0
    _count: int = -1
    _kind: str = ""
    _thought: list[str] = field(default_factory=list)

    def open(self, phase: Phase) -> Iterator[Event]:
        """What is known before the first token: a thought that the prompt has opened."""
        if phase is Phase.THINKING:
            yield from self._thinking()

    def take(self, events: Sequence[ReadEvent]) -> Iterator[Event]:
        for event in events:
            match event:
                case ThinkingDelta(text):
                    yield from self._thinking()
                    self._thought.append(text)
                    if self.shows_thinking:
                        yield self._delta("thinking_delta", "thinking", text)
                case AnswerDelta(text):
                    yield from self._block("text", {"type": "text", "text": ""})
                    yield self._delta("text_delta", "text", text)
                case ToolCallOpened(_, id, name):
                    self.calls += 1
                    yield from self.close()
                    yield from self._block("tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
                case ToolCallDelta(_, arguments):
                    yield self._delta("input_json_delta", "partial_json", arguments)
                case PhaseOpened(phase):
                    yield from self.open(phase)
                case Notice(text):
                    self.notices.append(text)
                case _:
                    assert_never(event)

    def close(self) -> Iterator[Event]:
        if not self._kind:
            return
        if self._kind == "thinking" and self.sign is not None:
            yield self._delta("signature_delta", "signature", self.sign("".join(self._thought)))
        self._kind, self._thought = "", []
        yield {"type": "content_block_stop", "index": self._count}

    def _thinking(self) -> Iterator[Event]:
        if self._kind != "thinking":
            yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self.opened()

    def _block(self, kind: str, block: Event) -> Iterator[Event]:
        if self._kind == kind:
            return
        yield from self.close()
        self._count, self._kind = self._count + 1, kind
        yield {"type": "content_block_start", "index": self._count, "content_block": block}

    def _delta(self, type: str, name: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self._count, "delta": {"type": type, name: text}}


def message_start(model: str, totals: Totals, about: Event) -> Event:
    """`about`: what is said of the message beyond Anthropic's own fields."""
    message = {"id": f"msg_{new_id()}", "type": "message", "role": "assistant", "model": model, "content": []}
    return {
        "type": "message_start",
        "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": usage(totals), **about},
    }


def message_end(ending: tuple[str, str | None], totals: Totals, notices: Sequence[str]) -> Iterator[Event]:
    reason, stop = ending
    delta: Event = {"stop_reason": reason, "stop_sequence": stop}
    if notices:
        delta["notices"] = list(notices)
    yield {"type": "message_delta", "delta": delta, "usage": usage(totals)}
    yield {"type": "message_stop"}


def usage(totals: Totals) -> dict[str, Any]:
    """What was computed before is no part of `input_tokens`."""
    return {
        "input_tokens": totals.prompt - totals.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.reply,
        "output_tokens_details": {"thinking_tokens": totals.thinking},
    }


def ending(finished: Finished | None, calls: int, full: bool, theirs: Sequence[str]) -> tuple[str, str | None]:
    """The reason, and the stop sequence that was met.

    `full`: whether the context ended it rather than its own length; `theirs`: the request's stop sequences, because
    what the template declares besides ends a turn like any other end.
    """
    if finished is None:
        return "end_turn", None
    if finished.stop is not None and finished.stop in theirs:
        return "stop_sequence", finished.stop
    if finished.finish is Finish.LENGTH:
        return ("model_context_window_exceeded" if full else "max_tokens"), None
    if finished.finish is Finish.STOPPED:
        return "pause_turn", None
    return ("tool_use" if calls else "end_turn"), None


class Whole:
    """The events of a stream folded into the message that they tell of."""

    def __init__(self) -> None:
        self._message: Event = {}
        self._pieces: list[list[str]] = []

    def take(self, event: Event) -> None:
        match event:
            case {"type": "message_start", "message": message}:
                self._message = {**message, "content": []}
            case {"type": "content_block_start", "content_block": block}:
                self._message["content"].append(dict(block))
                self._pieces.append([])
            case {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": signature}}:
                self._message["content"][-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": delta}:
                self._pieces[-1] += [text for name, text in delta.items() if name != "type"]
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                self._message |= {**delta, "usage": usage}

    def value(self) -> Event:
        for block, pieces in zip(self._message["content"], self._pieces, strict=True):
            text = "".join(pieces)
            match block["type"]:
                case "tool_use":
                    block["input"] = _input(text)
                case kind:
                    block[kind] = text
        return self._message


def _input(text: str) -> Any:
    """A call's arguments, as far as they came; nothing where they are no JSON."""
    try:
        return from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
