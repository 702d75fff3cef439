"""Encodes a reply as stream events of the Messages API, and folds the events into a message."""

from __future__ import annotations

import asyncio
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
    Usage,
)
from palaver.generation import Finish
from palaver.phases import Phase
from palaver.server.anthropic.schemas import MessagesRequest
from palaver.server.anthropic.signatures import sign
from palaver.server.errors import anthropic_error, log_unexpected
from palaver.server.openai.streaming import ChoiceDelta, ChoiceStream
from palaver.server.sse import EventStream, close_stream, encode_json, with_first
from palaver.store.records import new_id

Event = dict[str, Any]
Sign = Callable[[str], str]
"""Makes the signature of a thinking block from its text."""
PING: Event = {"type": "ping"}


@dataclass
class ContentBlocks:
    """Encodes a reply's content as a sequence of content blocks, one open at a time."""

    sign: Sign | None = None
    shows_thinking: bool = True
    on_thinking: Callable[[], None] = lambda: None
    """Called when a thinking block starts."""
    notices: list[str] = field(default_factory=list)
    calls: int = 0
    _index: int = -1
    _block_type: str = ""
    _thinking_text: list[str] = field(default_factory=list)

    def open(self, phase: Phase) -> Iterator[Event]:
        """Starts a thinking block if the phase is thinking, before its first token."""
        if phase is Phase.THINKING:
            yield from self._start_thinking()

    def feed(self, events: Sequence[ReadEvent]) -> Iterator[Event]:
        for event in events:
            match event:
                case ThinkingDelta(text):
                    yield from self._start_thinking()
                    self._thinking_text.append(text)
                    if self.shows_thinking:
                        yield self._delta("thinking_delta", "thinking", text)
                case AnswerDelta(text):
                    yield from self._start_block("text", {"type": "text", "text": ""})
                    yield self._delta("text_delta", "text", text)
                case ToolCallOpened(_, id, name):
                    self.calls += 1
                    yield from self.close()
                    yield from self._start_block("tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
                case ToolCallDelta(_, arguments):
                    yield self._delta("input_json_delta", "partial_json", arguments)
                case PhaseOpened(phase):
                    yield from self.open(phase)
                case Notice(text):
                    self.notices.append(text)
                case _:
                    assert_never(event)

    def close(self) -> Iterator[Event]:
        if not self._block_type:
            return
        if self._block_type == "thinking" and self.sign is not None:
            yield self._delta("signature_delta", "signature", self.sign("".join(self._thinking_text)))
        self._block_type, self._thinking_text = "", []
        yield {"type": "content_block_stop", "index": self._index}

    def _start_thinking(self) -> Iterator[Event]:
        if self._block_type != "thinking":
            yield from self._start_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self.on_thinking()

    def _start_block(self, block_type: str, block: Event) -> Iterator[Event]:
        if self._block_type == block_type:
            return
        yield from self.close()
        self._index, self._block_type = self._index + 1, block_type
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, type: str, name: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": type, name: text}}


def message_start(model: str, usage: Usage, extra: Mapping[str, Any]) -> Event:
    """`extra`: fields of the message beyond Anthropic's own."""
    message = {"id": f"msg_{new_id()}", "type": "message", "role": "assistant", "model": model, "content": []}
    return {
        "type": "message_start",
        "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": anthropic_usage(usage), **extra},
    }


def message_end(stop_reason: tuple[str, str | None], usage: Usage, notices: Sequence[str]) -> Iterator[Event]:
    reason, stop_sequence = stop_reason
    delta: Event = {"stop_reason": reason, "stop_sequence": stop_sequence}
    if notices:
        delta["notices"] = list(notices)
    yield {"type": "message_delta", "delta": delta, "usage": anthropic_usage(usage)}
    yield {"type": "message_stop"}


def anthropic_usage(usage: Usage) -> dict[str, Any]:
    """`input_tokens` does not include the cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.reply_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thinking_tokens},
    }


def anthropic_stop_reason(
    finished: Finished | None, calls: int, context_full: bool, stop_sequences: Sequence[str]
) -> tuple[str, str | None]:
    """The stop reason and the stop sequence.

    `context_full`: whether the context ended the reply rather than `max_tokens`. `stop_sequences` are the request's; a
    stop string of the template counts as a normal end.
    """
    if finished is None:
        return "end_turn", None
    if finished.stop is not None and finished.stop in stop_sequences:
        return "stop_sequence", finished.stop
    if finished.finish is Finish.LENGTH:
        return ("model_context_window_exceeded" if context_full else "max_tokens"), None
    if finished.finish is Finish.STOPPED:
        return "pause_turn", None
    return ("tool_use" if calls else "end_turn"), None


class AnthropicMessageBuilder:
    """Folds the events of a stream into the message."""

    def __init__(self) -> None:
        self._message: Event = {}
        self._pieces: list[list[str]] = []

    def feed(self, event: Event) -> None:
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
                    block["input"] = _tool_input(text)
                case block_type:
                    block[block_type] = text
        return self._message


def _tool_input(text: str) -> Any:
    """A call's arguments, which may be incomplete; empty if they are not JSON."""
    try:
        return from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}


class AnthropicReply:
    """A reply in Anthropic's format. Its owner reads `events` once and closes it."""

    def __init__(self, body: MessagesRequest, choice: ChoiceStream, stored: Mapping[str, Any] | None = None) -> None:
        """`stored`: the ids of a reply in a conversation. Its thinking is not signed: the conversation has the token
        ids."""
        self._body = body
        self._choice = choice
        self._stored = stored
        self._signed = len(choice.reply_stream.prompt.reply_ids)
        """The count of reply tokens that are in a signature, or that the request sent."""
        self._thinking_start = (0, 0)
        """At the start of the last thinking block: the reply's token count, and its count of thinking tokens."""

    async def events(
        self, stream: AsyncGenerator[ChoiceDelta], first: asyncio.Future[ChoiceDelta] | None = None
    ) -> AsyncGenerator[Event]:
        """`first` is the first delta, if the caller has awaited it."""
        first = first or asyncio.ensure_future(anext(stream))
        choice, sign = self._choice, self._sign if self._stored is None else None
        blocks = ContentBlocks(sign, choice.output.thinking, self._on_thinking)
        try:
            yield message_start(choice.model.name, self._initial_usage(), self._stored or {})
            for event in blocks.open(choice.reply_stream.opening.phase):
                yield event
            yield PING
            async with aclosing(with_first(first, stream)) as deltas:
                async for delta in deltas:
                    for event in blocks.feed(delta.events):
                        yield event
            for event in (*blocks.close(), *message_end(self._stop_reason(blocks), choice.usage, blocks.notices)):
                yield event
        finally:
            await close_stream(first, stream)

    def _initial_usage(self) -> Usage:
        """The prompt's tokens and, if they are known yet, those from the cache. A stored reply may still wait."""
        if self._stored is not None:
            return Usage()
        return Usage(self._choice.usage.prompt_tokens, self._choice.usage.cached_tokens)

    def _on_thinking(self) -> None:
        reply_stream = self._choice.reply_stream
        self._thinking_start = (reply_stream.token_count, reply_stream.usage.thinking_tokens)

    def _sign(self, text: str) -> str:
        """Signs the tokens up to the last one that was thinking, the closing marker included."""
        reply_stream = self._choice.reply_stream
        start, thinking = self._thinking_start
        end = start + reply_stream.usage.thinking_tokens - thinking
        ids, self._signed = reply_stream.token_ids[self._signed : end], end
        return sign(self._choice.model.tokenizer, ids, text, include_text=not self._choice.output.thinking)

    def _stop_reason(self, blocks: ContentBlocks) -> tuple[str, str | None]:
        choice, reply_stream = self._choice, self._choice.reply_stream
        limit = reply_stream.request.sampling.max_tokens
        finished = choice.finished
        at_limit = limit is not None and reply_stream.token_count >= limit
        context_full = finished is not None and finished.finish is Finish.LENGTH and not at_limit
        return anthropic_stop_reason(finished, blocks.calls, context_full, self._body.stop_sequences or ())


def stream_response(
    events: AsyncGenerator[Event], request: Request, headers: Mapping[str, str] | None = None
) -> EventStream:
    return EventStream(_encode_stream(events, request.state.request_id), headers, keep_alive=_encode_event(PING))


async def fold_message(events: AsyncGenerator[Event]) -> Event:
    builder = AnthropicMessageBuilder()
    async with aclosing(events):
        async for event in events:
            builder.feed(event)
    return builder.value()


async def _encode_stream(events: AsyncGenerator[Event], request_id: str) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        try:
            async for event in events:
                yield _encode_event(event)
        except Exception as error:
            log_unexpected(error)
            yield _encode_event(anthropic_error(error, request_id))


def _encode_event(event: Event) -> bytes:
    return encode_json(event, event["type"])
