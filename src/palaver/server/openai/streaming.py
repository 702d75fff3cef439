"""Replies in OpenAI's words: chunks while they come, and the same folded when they are whole."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from json.encoder import encode_basestring as quoted
from typing import Any, assert_never

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream
from palaver.events import (
    AnswerDelta,
    Finished,
    Notice,
    PhaseOpened,
    ReadEvent,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    fold,
)
from palaver.generation import Finish
from palaver.messages import Message
from palaver.server.errors import error_body, log_unexpected
from palaver.server.openai.choices import ChoiceDelta, ChoiceStream, CompletionStream
from palaver.server.openai.disconnect import (
    close_on_failure,
    close_stream,
    first_chunk,
    first_seconds,
    run_while_connected,
)
from palaver.server.openai.request import OutputOptions, Usage
from palaver.server.openai.sampling_params import api_field_names
from palaver.server.sse import EventStream
from palaver.store.records import new_id

DONE = b"data: [DONE]\n\n"
_REASONS = {Finish.END: "stop", Finish.STOP_STRING: "stop", Finish.LENGTH: "length", Finish.STOPPED: "stop"}


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What every chunk of one answer says of it."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"chatcmpl-{new_id()}")
    created: int = field(default_factory=lambda: int(time.time()))

    def value(self, kind: str) -> dict[str, Any]:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "system_fingerprint": self.fingerprint}


def chunk_header(model: Model) -> ChunkHeader:
    made_by = hashlib.sha256(f"{model.tokenizer}/{model.engine.info.fingerprint}".encode()).hexdigest()
    return ChunkHeader(model.name, f"fp_{made_by[:16]}")


class ChunkEncoder:
    """Writes chunks by hand around the text, which is what costs least for each token."""

    def __init__(self, heading: ChunkHeader, shown: OutputOptions, first: Mapping[str, Any] | None = None) -> None:
        """`first`: what the first chunk alone says."""
        self._heading = heading.value("chat.completion.chunk")
        self._shown = shown
        self._first = first
        self._head = "data: " + json.dumps(self._heading, separators=(",", ":"))[:-1] + ',"choices":[{"index":'
        self._end = "]}\n\n" if shown.usage is Usage.FINISH else '],"usage":null}\n\n'

    def count(self, usage: Mapping[str, Any]) -> None:
        """Puts the usage into the chunks from here on."""
        self._end = _counted(usage)

    def opening(self, index: int, thinks: bool = False) -> bytes:
        """Whose the message is, and whether it opens with a thought: sent before the first token."""
        thought = ',"reasoning_content":""' if thinks else ""
        audio = f',"audio":{{"id":"{self._shown.audio.id}"}}' if self._shown.audio else ""
        piece = self._chunk(index, f'{{"role":"assistant","content":null{thought}{audio}}}')
        if self._first and index == 0:
            piece = _event({**json.loads(piece[len("data: ") :]), **self._first})
        return piece.encode()

    def of(
        self, told: ChoiceDelta, ending: tuple[str, str | int | None] | None, usage: Mapping[str, Any] | None = None
    ) -> bytes:
        """All that came with the last tokens, in one chunk, so that a client that is cut off has all of it or nothing.
        `ending` is given with the last, which has a chunk of its own; `usage` goes into that one."""
        extra, delta = self._extra(told), self._delta(told)
        if ending is None:
            return self._chunk(told.index, delta, extra).encode() if delta != "{}" or extra else b""
        reason, stop = ending
        said = self._chunk(told.index, delta) if delta != "{}" else ""
        if self._shown.audio is not None:
            said += self._chunk(told.index, f'{{"audio":{{"expires_at":{self._shown.audio.expires_at}}}}}')
        notices = [event.text for event in told.events if isinstance(event, Notice)]
        extra += f',"stop_reason":{json.dumps(stop)}'
        if notices:
            extra += f',"notices":{json.dumps(notices)}'
        if usage is not None:
            self.count(usage)
        return (said + self._chunk(told.index, "{}", extra, reason)).encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        return _event({**self._heading, "choices": [], "usage": usage}).encode()

    def _chunk(self, index: int, delta: str, extra: str = "", reason: str | None = None) -> str:
        finish = f'"{reason}"' if reason else "null"
        return f'{self._head}{index},"delta":{delta}{extra},"finish_reason":{finish}}}{self._end}'

    def _extra(self, told: ChoiceDelta) -> str:
        extra = ""
        if self._shown.logprobs:
            content = {"content": list(told.logprobs), "refusal": None} if told.logprobs else None
            extra += f',"logprobs":{json.dumps(content)}'
        if self._shown.token_ids:
            extra += f',"token_ids":{json.dumps(told.token_ids)}'
        return extra

    def _delta(self, told: ChoiceDelta) -> str:
        thinking = answer = ""
        calls: dict[int, _CallDelta] = {}
        for event in told.events:
            match event:
                case AnswerDelta(text):
                    answer += text
                case ThinkingDelta(text):
                    thinking += text if self._shown.thinking else ""
                case ToolCallOpened(index, id, name):
                    calls[index] = _CallDelta(id, name)
                case ToolCallDelta(index, arguments):
                    calls.setdefault(index, _CallDelta()).arguments += arguments
                case PhaseOpened() | Notice():
                    pass
                case _:
                    assert_never(event)
        parts = [f'"reasoning_content":{quoted(thinking)}'] if thinking else []
        if self._shown.audio is not None and (answer or told.sound):
            parts.append(_audio(answer, told.sound))
        elif answer:
            parts.append(f'"content":{quoted(answer)}')
        if calls:
            parts.append(self._calls(calls))
        return f"{{{','.join(parts)}}}"

    def _calls(self, calls: Mapping[int, _CallDelta]) -> str:
        if self._shown.legacy:
            return f'"function_call":{next(iter(calls.values())).function()}'
        written = (f'{{"index":{index},{call.head()}"function":{call.function()}}}' for index, call in calls.items())
        return f'"tool_calls":[{",".join(written)}]'


@dataclass(slots=True)
class _CallDelta:
    """What came of a call: its opening, a piece of its arguments, or both."""

    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def head(self) -> str:
        return "" if self.id is None else f'"id":{quoted(self.id)},"type":"function",'

    def function(self) -> str:
        name = "" if self.name is None else f'"name":{quoted(self.name)},'
        return f'{{{name}"arguments":{quoted(self.arguments)}}}'


def _audio(transcript: str, data: str) -> str:
    parts = [f'"transcript":{quoted(transcript)}'] if transcript else []
    parts += [f'"data":"{data}"'] if data else []
    return f'"audio":{{{",".join(parts)}}}'


def _counted(usage: Mapping[str, Any]) -> str:
    """The end of a chunk that has the usage."""
    return f'],"usage":{json.dumps(usage, separators=(",", ":"))}}}\n\n'


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def finish_reason(finished: Finished | None, shown: OutputOptions, calls: int) -> str:
    if finished is not None and calls and finished.finish is Finish.END:
        return "function_call" if shown.legacy else "tool_calls"
    return _REASONS[finished.finish] if finished is not None else "stop"


def stop_reason(finished: Finished | None, utterance: ReplyStream | None = None) -> str | int | None:
    """The string, or the token id, that ended the reply."""
    if finished is None or finished.finish not in (Finish.STOP_STRING, Finish.END):
        return None
    if finished.stop is not None or utterance is None:
        return finished.stop
    last = utterance.steps[-1].token_id if utterance.steps else None
    return last if last in utterance.request.sampling.stop_ids else None


def choice_ending(choice: ChoiceStream) -> tuple[str, str | int | None]:
    """How a choice ended: its reason, and what stopped it."""
    reason = finish_reason(choice.finish, choice.shown, choice.calls)
    return reason, stop_reason(choice.finish, choice.utterance)


@dataclass
class ChoiceBuilder:
    """One choice as it grows, for clients that want it whole."""

    events: list[ReadEvent] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sound: str = ""

    def take(self, told: ChoiceDelta) -> None:
        self.events += told.events
        self.logprobs += told.logprobs
        self.token_ids += told.token_ids
        self.sound += told.sound

    def value(self, index: int, shown: OutputOptions, ending: tuple[str, str | int | None]) -> dict[str, Any]:
        folded = fold(_with_calls(self.events))
        told: dict[str, Any] = {"index": index, "message": message_value(folded.message, shown)}
        if shown.audio is not None and folded.message.text:
            told["message"] |= {"content": None, "audio": shown.audio.value(self.sound, folded.message.text)}
        told["finish_reason"], told["stop_reason"] = ending
        told["logprobs"] = {"content": self.logprobs, "refusal": None} if shown.logprobs else None
        if shown.token_ids:
            told["token_ids"] = self.token_ids
        return {**told, "notices": list(folded.notices)} if folded.notices else told


def _with_calls(events: Sequence[ReadEvent]) -> list[ReadEvent]:
    """A reply that goes on in the midst of a call tells of arguments alone: they belong to a call without a name."""
    known: set[int] = set()
    out: list[ReadEvent] = []
    for event in events:
        if isinstance(event, ToolCallOpened):
            known.add(event.index)
        elif isinstance(event, ToolCallDelta) and event.index not in known:
            known.add(event.index)
            out.append(ToolCallOpened(event.index, "", ""))
        out.append(event)
    return out


def message_value(message: Message, shown: OutputOptions) -> dict[str, Any]:
    """What is not there is null, or left out where clients take its presence for a word."""
    value: dict[str, Any] = {"role": "assistant", "content": message.text or None, "refusal": None}
    if message.thinking and shown.thinking:
        value["reasoning_content"] = message.thinking
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    if calls and shown.legacy:
        value["function_call"] = calls[0]
    elif calls:
        named = zip(message.tool_calls, calls, strict=True)
        value["tool_calls"] = [{"id": call.id, "type": "function", "function": function} for call, function in named]
    return value


async def respond(
    request: Request,
    speaking: CompletionStream,
    stream: AsyncGenerator[ChoiceDelta],
    more: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`stream` is what is said of it; `more` is told with the whole, or with the first chunk."""
    about = {**_prompt_ids(speaking), **(more or {})}
    async with close_on_failure(stream):
        with api_field_names():
            if not speaking.asked.shown.stream:
                whole = await run_while_connected(request, _whole(speaking, stream))
                return JSONResponse({**whole, **about}, headers=dict(headers or {}))
            first = await first_chunk(request, stream, first_seconds(speaking.asked.request))
        return EventStream(_chunks(speaking, stream, first, about), headers)


async def _chunks(
    speaking: CompletionStream,
    stream: AsyncGenerator[ChoiceDelta],
    first: asyncio.Future[ChoiceDelta],
    about: Mapping[str, Any],
) -> AsyncGenerator[bytes]:
    what = speaking.asked
    chunks = ChunkEncoder(chunk_header(what.model), what.shown, about)
    try:
        if what.shown.usage is Usage.EVERY:
            chunks.count(speaking.usage())
        yield b"".join(chunks.opening(choice.index, choice.opens_thinking) for choice in speaking.choices)
        told = await first
        while True:
            if piece := _piece(chunks, speaking, told):
                yield piece
            told = await anext(stream)
    except StopAsyncIteration:
        if what.shown.usage is not Usage.FINISH:
            yield chunks.usage(speaking.usage())
        yield DONE
    except Exception as error:
        log_unexpected(error)
        yield b"data: " + error_body(error) + b"\n\n" + DONE
    finally:
        await close_stream(first, stream)


def _piece(chunks: ChunkEncoder, speaking: CompletionStream, told: ChoiceDelta) -> bytes:
    where = speaking.asked.shown.usage
    if where is Usage.EVERY:
        chunks.count(speaking.usage())
    if told.finished is None:
        return chunks.of(told, None)
    last = speaking.usage() if where is Usage.FINISH and speaking.finished else None
    return chunks.of(told, choice_ending(speaking.choices[told.index]), last)


async def _whole(speaking: CompletionStream, stream: AsyncGenerator[ChoiceDelta]) -> dict[str, Any]:
    what = speaking.asked
    wholes = [ChoiceBuilder() for _ in speaking.choices]
    async with aclosing(stream):
        async for told in stream:
            wholes[told.index].take(told)
    choices = [
        whole.value(choice.index, what.shown, choice_ending(choice))
        for whole, choice in zip(wholes, speaking.choices, strict=True)
    ]
    value = {**chunk_header(what.model).value("chat.completion"), "choices": choices}
    return {**value, "usage": speaking.usage()}


def _prompt_ids(speaking: CompletionStream) -> dict[str, list[int]]:
    prompt = speaking.choices[0].utterance.prompt
    return {"prompt_token_ids": list(prompt.context_ids)} if speaking.asked.shown.token_ids else {}
