"""Replies in Anthropic's words: blocks that open, grow and close, and the same folded when they are whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, assert_never

from fastapi import Request
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
from palaver.server.anthropic.errors import anthropic_error
from palaver.server.anthropic.schemas import MessagesRequest
from palaver.server.anthropic.signatures import sign
from palaver.server.errors import log_unexpected
from palaver.server.openai.choices import ChoiceDelta, ChoiceStream, ChoiceUsage
from palaver.server.openai.disconnect import close_stream
from palaver.server.sse import EventStream
from palaver.store.records import new_id

Event = dict[str, Any]
Sign = Callable[[str], str]
"""From what was thought in a block to the block's signature."""
PING: Event = {"type": "ping"}


@dataclass
class ContentBlocks:
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


def message_start(model: str, totals: ChoiceUsage, about: Event) -> Event:
    """`about`: what is said of the message beyond Anthropic's own fields."""
    message = {"id": f"msg_{new_id()}", "type": "message", "role": "assistant", "model": model, "content": []}
    return {
        "type": "message_start",
        "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": anthropic_usage(totals), **about},
    }


def message_end(ending: tuple[str, str | None], totals: ChoiceUsage, notices: Sequence[str]) -> Iterator[Event]:
    reason, stop = ending
    delta: Event = {"stop_reason": reason, "stop_sequence": stop}
    if notices:
        delta["notices"] = list(notices)
    yield {"type": "message_delta", "delta": delta, "usage": anthropic_usage(totals)}
    yield {"type": "message_stop"}


def anthropic_usage(totals: ChoiceUsage) -> dict[str, Any]:
    """What was computed before is no part of `input_tokens`."""
    return {
        "input_tokens": totals.prompt - totals.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.reply,
        "output_tokens_details": {"thinking_tokens": totals.thinking},
    }


def anthropic_stop_reason(
    finished: Finished | None, calls: int, full: bool, theirs: Sequence[str]
) -> tuple[str, str | None]:
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


class AnthropicMessageBuilder:
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


class AnthropicReply:
    """A reply without a conversation. Its owner reads `events` once and closes it."""

    def __init__(self, body: MessagesRequest, choice: ChoiceStream) -> None:
        self._body = body
        self._choice = choice
        self._signed = len(choice.utterance.prompt.reply_ids)
        """How many of the reply's tokens a signature told already, or were there before."""
        self._thought_at = (0, 0)
        """Where the last thought began: tokens of the reply, and those of them that were thought."""

    async def events(
        self, stream: AsyncGenerator[ChoiceDelta], first: asyncio.Future[ChoiceDelta]
    ) -> AsyncGenerator[Event]:
        choice = self._choice
        blocks = ContentBlocks(self._sign, choice.shown.thinking, self._opened)
        try:
            yield message_start(choice.model.name, self._begun_totals(), {})
            for event in blocks.open(choice.utterance.phase):
                yield event
            yield PING
            async with aclosing(_all(stream, first)) as tellings:
                async for told in tellings:
                    for event in blocks.take(told.events):
                        yield event
            for event in (*blocks.close(), *message_end(self._ending(blocks), choice.totals, blocks.notices)):
                yield event
        finally:
            await close_stream(first, stream)

    def _begun_totals(self) -> ChoiceUsage:
        """What is known at the beginning: the prompt, and once it is read what of it had been computed before."""
        totals = self._choice.totals
        return ChoiceUsage(totals.prompt or len(self._choice.utterance.prompt), totals.cached)

    def _opened(self) -> None:
        utterance = self._choice.utterance
        self._thought_at = (utterance.said, utterance.usage.thinking_tokens)

    def _sign(self, thought: str) -> str:
        """A thought's tokens end where its last one was thought; the marker that closes it is one of them."""
        utterance = self._choice.utterance
        said, thinking = self._thought_at
        end = said + utterance.usage.thinking_tokens - thinking
        ids, self._signed = utterance.token_ids[self._signed : end], end
        return sign(self._choice.model.tokenizer, ids, thought, whole=not self._choice.shown.thinking)

    def _ending(self, blocks: ContentBlocks) -> tuple[str, str | None]:
        choice, utterance = self._choice, self._choice.utterance
        limit = utterance.request.sampling.max_tokens
        finished = choice.finish
        full = finished is not None and finished.finish is Finish.LENGTH and (limit is None or utterance.said < limit)
        return anthropic_stop_reason(finished, blocks.calls, full, self._body.stop_sequences or ())


async def _all(stream: AsyncGenerator[ChoiceDelta], first: asyncio.Future[ChoiceDelta]) -> AsyncGenerator[ChoiceDelta]:
    """The stream with its first word, which was waited for already."""
    try:
        yield await first
    except StopAsyncIteration:
        return
    async for told in stream:
        yield told


def stream_response(
    events: AsyncGenerator[Event], request: Request, headers: Mapping[str, str] | None = None
) -> EventStream:
    return EventStream(_sent(events, request.state.request_id), headers, quiet=_event(PING))


async def fold_message(events: AsyncGenerator[Event]) -> Event:
    whole = AnthropicMessageBuilder()
    async with aclosing(events):
        async for event in events:
            whole.take(event)
    return whole.value()


async def _sent(events: AsyncGenerator[Event], request_id: str) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        try:
            async for event in events:
                yield _event(event)
        except Exception as error:
            log_unexpected(error)
            yield _event(anthropic_error(error, request_id))


def _event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
