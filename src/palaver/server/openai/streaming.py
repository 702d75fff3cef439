"""The choices of a completion: reply streams as deltas, and the deltas as a stream of chunks or one folded value."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from json.encoder import encode_basestring as quoted
from typing import Any, Protocol, assert_never, cast

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream, SeamTrimmer, seam_trimmer
from palaver.encoding import adapter
from palaver.errors import ShuttingDown
from palaver.events import (
    AnswerDelta,
    DraftBlock,
    Event,
    Failed,
    Finished,
    Notice,
    PhaseOpened,
    ReadEvent,
    ReplyBatch,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Usage,
    Waiting,
    fold,
)
from palaver.generation import Finish, Step
from palaver.messages import Message
from palaver.phases import Phase, Vocabulary
from palaver.server.errors import error_body, log_unexpected
from palaver.server.limits import ConcurrencyLimiter
from palaver.server.metrics import Metrics, TokenPace
from palaver.server.openai.request import ChatCall, OutputOptions, UsageChunks, api_field_names
from palaver.server.sse import (
    EventStream,
    close_on_failure,
    close_stream,
    encode_json,
    encode_sse,
    first_chunk,
    first_seconds,
    run_while_connected,
)
from palaver.server.state import ReplyIndex
from palaver.store import Conflict
from palaver.store.records import new_id

MIN_LOGPROB = -9999.0
_TEXT_DELTAS = (AnswerDelta, ThinkingDelta)


def logprob_entries(steps: Iterable[Step], vocabulary: Vocabulary, top: int) -> tuple[dict[str, Any], ...]:
    """The log-probabilities of the tokens in OpenAI's format, each with `top` alternatives."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = vocabulary[token_id] if token_id < len(vocabulary) else b""
        known = logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # it is not a number for tokens that were not sampled
        return {"token": data.decode("utf-8", "replace"), "logprob": known, "bytes": list(data)}

    return tuple(
        {
            **token(step.token_id, step.logprob),
            "top_logprobs": [token(one.token_id, one.logprob) for one in step.alternatives[:top]],
        }
        for step in steps
    )


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The next events of one choice, or its end, with their token ids and log-probabilities."""

    index: int
    events: tuple[ReadEvent, ...] = ()
    finished: Finished | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    audio: str = ""
    """Base64. The audio since the last delta of a spoken reply."""
    draft: DraftBlock | None = None
    """The block that is being denoised, where the request asks for drafts."""


@dataclass
class ChoiceStream:
    """One choice: reads the batches of its reply stream as deltas. Leaving it closes the reply stream.

    What the reply contained before this request is not repeated.
    """

    index: int
    model: Model
    reply_stream: ReplyStream
    output: OutputOptions
    metrics: Metrics
    partial: Message | None = None
    """The reply to continue, as the client sent it."""
    tool_calls: int = 0
    finished: Finished | None = None

    def __post_init__(self) -> None:
        self._seam = seam_trimmer(self.reply_stream, self.partial)
        self._pace = TokenPace(self.metrics)
        self.tool_calls = _count_tool_calls(self.reply_stream.opening.events)

    async def __aenter__(self) -> ChoiceStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.reply_stream.__aexit__(*error)
        finally:
            self._pace.stop_waiting()
            self.metrics.count_reply(self.usage, self.finished.finish.value if self.finished else "left")

    @property
    def usage(self) -> Usage:
        """The tokens so far, without the reply tokens that it continues."""
        stream = self.reply_stream
        thinking = stream.thinking_tokens - stream.opening.thinking_tokens
        return Usage(stream.started.prompt_tokens, stream.started.cached_tokens, len(stream.steps), thinking)

    @property
    def finish_reason(self) -> str:
        if self.finished is None:
            return "stop"
        if self.tool_calls and self.finished.finish is Finish.END:
            return "function_call" if self.output.legacy else "tool_calls"
        return "length" if self.finished.finish is Finish.LENGTH else "stop"

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop token id that ended the reply."""
        if self.finished is None or self.finished.finish not in (Finish.STOP_STRING, Finish.END):
            return None
        if self.finished.stop is not None:
            return self.finished.stop
        last = self.reply_stream.steps[-1].token_id if self.reply_stream.steps else None
        return last if last in self.reply_stream.request.sampling.stop_ids else None

    @property
    def opens_thinking(self) -> bool:
        """Whether the prompt has opened a thought, and it is shown as one."""
        split = self.output.thinking and not self.reply_stream.request.options.unsplit
        return split and self.reply_stream.opening.phase is Phase.THINKING

    def read(self, batch: ReplyBatch) -> ChoiceDelta | None:
        """The delta of one batch. Raises the error of a stored turn that failed."""
        first = batch.events[0]
        if isinstance(first, _TEXT_DELTAS) and batch.steps:  # most batches
            return self._delta(batch, cast("tuple[ReadEvent, ...]", batch.events))
        match first:
            case Waiting():
                self._pace.start_waiting()
                return ChoiceDelta(self.index)
            case Started():
                self._pace.stop_waiting()
                return ChoiceDelta(self.index)
            case Finished() as finished:
                self.finished = finished
                return self._delta(batch, _final_events(finished))
            case Failed() as failed:
                raise self.reply_stream.failure(failed)
            case Snapshot():
                raise Conflict("The reply's tokens are not known to this model.")
            case DraftBlock() as draft:
                return ChoiceDelta(self.index, draft=draft) if self.output.drafts else None
            case _ if batch.steps:
                return self._delta(batch, cast("tuple[ReadEvent, ...]", batch.events))
            case _:  # the part of the reply that is continued
                return None

    def _delta(self, batch: ReplyBatch, events: tuple[ReadEvent, ...]) -> ChoiceDelta:
        read = events if self._seam is None else _trim(self._seam, events)
        if batch.steps:
            self._pace.observe(len(batch.steps))
        self.tool_calls += _count_tool_calls(read)
        ids = tuple(step.token_id for step in batch.steps) if self.output.token_ids else ()
        logprobs: tuple[dict[str, Any], ...] = ()
        if self.output.logprobs:
            logprobs = logprob_entries(batch.answer_steps, self.model.vocabulary, self.output.top_logprobs)
        return ChoiceDelta(self.index, read, self.finished, ids, logprobs)


_Arrivals = asyncio.Queue[ChoiceDelta | BaseException | None]


class CompletionStream:
    """All choices of one request. Its owner reads `deltas` once and closes it."""

    def __init__(
        self,
        call: ChatCall,
        reply_streams: Sequence[ReplyStream],
        metrics: Metrics,
        limiter: ConcurrencyLimiter | None = None,
        reply_index: ReplyIndex | None = None,
    ) -> None:
        """The stream holds its places in `limiter` while it is read, and adds finished replies to `reply_index`."""
        self.call = call
        self.choices = [
            ChoiceStream(index, call.model, reply_stream, call.output, metrics, call.partial)
            for index, reply_stream in enumerate(reply_streams)
        ]
        self._limiter = limiter
        self._reply_index = reply_index
        self._shutting_down = False
        self._running = len(self.choices)

    def stop(self) -> None:
        """Stops the replies because the server shuts down: `deltas` then raises ShuttingDown."""
        self._shutting_down = True
        for choice in self.choices:
            choice.reply_stream.stop()

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._running

    def usage(self) -> dict[str, Any]:
        """The usage so far, in OpenAI's format. The prompt counts once, replies all."""
        usages = [choice.usage for choice in self.choices]
        prompt, reply = usages[0].prompt_tokens, sum(usage.reply_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": reply,
            "total_tokens": prompt + reply,
            "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": sum(usage.thinking_tokens for usage in usages)},
        }

    async def deltas(self) -> AsyncGenerator[ChoiceDelta]:
        """Raises QueueFull where the limiter has no place left. Closing it closes the reply streams."""
        with self._acquire_places():
            if len(self.choices) == 1:
                async with self.choices[0] as choice:
                    async for batch in choice.reply_stream.batches():
                        if (delta := choice.read(batch)) is not None:
                            yield self._checked(delta)
                return
            async with _merged(self.choices) as arrivals:
                running = len(self.choices)
                while running:
                    arrival = await arrivals.get()
                    if arrival is None:
                        running -= 1
                    elif isinstance(arrival, BaseException):
                        raise arrival
                    else:
                        yield self._checked(arrival)

    def _acquire_places(self) -> AbstractContextManager[None]:
        if self._limiter is None:
            return nullcontext()
        return self._limiter.acquire(self.call.request.owner, self.stop, len(self.choices))

    def _checked(self, delta: ChoiceDelta) -> ChoiceDelta:
        if delta.finished is None:
            return delta
        if self._shutting_down and delta.finished.finish is Finish.STOPPED:
            raise ShuttingDown
        self._running -= 1
        if self._reply_index is not None:
            request, reply = self.call.request, self.choices[delta.index].reply_stream.reply()
            self._reply_index.add(request.owner, request.messages, reply.message, reply.token_ids)
        return delta


@asynccontextmanager
async def _merged(choices: Sequence[ChoiceStream]) -> AsyncIterator[_Arrivals]:
    """A queue of the deltas of all choices; None stands for the end of one."""
    arrivals: _Arrivals = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(choice, arrivals)) for choice in choices]
    try:
        yield arrivals
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(choice: ChoiceStream, arrivals: _Arrivals) -> None:
    """Puts the choice's deltas into the queue, then None, or the error that ended it, whatever its type."""
    try:
        async with choice:
            async for batch in choice.reply_stream.batches():
                if (delta := choice.read(batch)) is not None:
                    arrivals.put_nowait(delta)
    except BaseException as error:
        arrivals.put_nowait(error)
        raise
    arrivals.put_nowait(None)


def _final_events(finished: Finished) -> tuple[ReadEvent, ...]:
    """The events of the end, without trailing white space of a thought that was cut: the thought may be continued."""
    if finished.finish not in (Finish.LENGTH, Finish.STOPPED):
        return finished.tail
    return tuple(e for e in finished.tail if not (isinstance(e, ThinkingDelta) and not e.text.strip()))


def _count_tool_calls(events: Sequence[Event]) -> int:
    count = 0
    for event in events:  # runs for every token: a plain loop is the fastest
        if type(event) is ToolCallOpened:
            count += 1
    return count


def _trim(seam: SeamTrimmer, events: Sequence[ReadEvent]) -> tuple[ReadEvent, ...]:
    return tuple(new for event in events if (new := seam.trim(event)) is not None)


DONE = encode_sse(b"[DONE]")


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The fields that all chunks of one completion share."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"chatcmpl-{new_id()}")
    created: int = field(default_factory=lambda: int(time.time()))

    def value(self, object: str) -> dict[str, Any]:
        about = {"id": self.id, "object": object, "created": self.created, "model": self.model}
        return {**about, "system_fingerprint": self.fingerprint}


def chunk_header(model: Model) -> ChunkHeader:
    fingerprint = hashlib.sha256(f"{model.tokenizer}/{model.engine.info.fingerprint}".encode()).hexdigest()
    return ChunkHeader(model.name, f"fp_{fingerprint[:16]}")


class CompletionEncoder(Protocol):
    """Encodes one completion in the format of its API: as chunks, or folded into one value."""

    def encode_opening(self) -> bytes: ...

    def encode(self, delta: ChoiceDelta) -> bytes: ...

    def encode_usage(self) -> bytes: ...

    async def fold(self, deltas: AsyncGenerator[ChoiceDelta]) -> dict[str, Any]: ...


class ChatEncoder:
    """A chat completion. Chunks are JSON text around the deltas, which is cheaper per token than `json.dumps`."""

    def __init__(self, completion: CompletionStream, extra: Mapping[str, Any] | None = None) -> None:
        """`extra`: fields of the first chunk, or of the folded completion."""
        self._completion = completion
        self._output = completion.call.output
        self._extra_fields = {**_prompt_ids(completion), **(extra or {})}
        self._chat_header = chunk_header(completion.call.model)
        self._header = self._chat_header.value("chat.completion.chunk")
        self._prefix = json.dumps(self._header, separators=(",", ":"))[:-1] + ',"choices":[{"index":'
        output = self._output
        self._text_only = not (output.logprobs or output.token_ids or output.audio or output.usage is UsageChunks.EVERY)
        """Whether a chunk of text has no other fields."""
        self._suffix = "]}" if self._output.usage is UsageChunks.FINISH else '],"usage":null}'

    def _set_usage(self) -> None:
        """Puts the usage so far into all further chunks."""
        self._suffix = f'],"usage":{json.dumps(self._completion.usage(), separators=(",", ":"))}}}'

    def encode_opening(self) -> bytes:
        """The chunks before the first token: the role, and an empty `reasoning_content` if the reply opens thinking."""
        if self._output.usage is UsageChunks.EVERY:
            self._set_usage()
        return b"".join(self._opening(choice.index, choice.opens_thinking) for choice in self._completion.choices)

    def _opening(self, index: int, opens_thinking: bool) -> bytes:
        thinking = ',"reasoning_content":""' if opens_thinking else ""
        audio = f',"audio":{{"id":"{self._output.audio.id}"}}' if self._output.audio else ""
        delta = f'{{"role":"assistant","content":null{thinking}{audio}}}'
        if self._extra_fields and index == 0:
            return encode_json({**json.loads(self._json(index, delta)), **self._extra_fields})
        return self._chunk(index, delta)

    def encode(self, choice: ChoiceDelta) -> bytes:
        """One chunk with all of the delta, so that a client that is cut off has all of it or nothing.

        The finish reason and the stop reason of the last delta get a chunk of their own.
        """
        if self._text_only and choice.finished is None and len(choice.events) == 1:  # most chunks
            match choice.events[0]:
                case AnswerDelta(text) if text:
                    return self._text_chunk(choice.index, "content", text)
                case ThinkingDelta(text) if text and self._output.thinking:
                    return self._text_chunk(choice.index, "reasoning_content", text)
        if self._output.usage is UsageChunks.EVERY:
            self._set_usage()
        extra, delta = self._extra(choice), self._delta(choice)
        if choice.finished is None:
            return self._chunk(choice.index, delta, extra) if delta != "{}" or extra else b""
        ended = self._completion.choices[choice.index]
        before = self._chunk(choice.index, delta) if delta != "{}" else b""
        if self._output.audio is not None:
            before += self._chunk(choice.index, f'{{"audio":{{"expires_at":{self._output.audio.expires_at}}}}}')
        notices = [event.text for event in choice.events if isinstance(event, Notice)]
        extra += f',"stop_reason":{json.dumps(ended.stop_reason)}'
        if notices:
            extra += f',"notices":{json.dumps(notices)}'
        if self._output.usage is UsageChunks.FINISH and self._completion.finished:
            self._set_usage()
        return before + self._chunk(choice.index, "{}", extra, ended.finish_reason)

    def encode_usage(self) -> bytes:
        """The last chunk, without choices."""
        return encode_json({**self._header, "choices": [], "usage": self._completion.usage()})

    async def fold(self, deltas: AsyncGenerator[ChoiceDelta]) -> dict[str, Any]:
        builders = [ChoiceBuilder() for _ in self._completion.choices]
        async with aclosing(deltas):
            async for delta in deltas:
                builders[delta.index].add(delta)
        choices = [builder.value(choice) for builder, choice in zip(builders, self._completion.choices, strict=True)]
        value = {**self._chat_header.value("chat.completion"), "choices": choices}
        return {**value, "usage": self._completion.usage(), **self._extra_fields}

    def _text_chunk(self, index: int, field: str, text: str) -> bytes:
        """As `_chunk` for a delta with one text."""
        delta = f'"delta":{{"{field}":{quoted(text)}}},"finish_reason":null}}'
        return f"data: {self._prefix}{index},{delta}{self._suffix}\n\n".encode()

    def _chunk(self, index: int, delta: str, extra: str = "", reason: str | None = None) -> bytes:
        return encode_sse(self._json(index, delta, extra, reason).encode())

    def _json(self, index: int, delta: str, extra: str = "", reason: str | None = None) -> str:
        finish = f'"{reason}"' if reason else "null"
        return f'{self._prefix}{index},"delta":{delta}{extra},"finish_reason":{finish}}}{self._suffix}'

    def _extra(self, choice: ChoiceDelta) -> str:
        extra = ""
        if self._output.logprobs:
            content = {"content": list(choice.logprobs), "refusal": None} if choice.logprobs else None
            extra += f',"logprobs":{json.dumps(content)}'
        if self._output.token_ids:
            extra += f',"token_ids":{json.dumps(choice.token_ids)}'
        if choice.draft is not None:
            extra += f',"draft":{adapter(DraftBlock).dump_json(choice.draft).decode()}'
        return extra

    def _delta(self, choice: ChoiceDelta) -> str:
        thinking = answer = ""
        calls: dict[int, _ToolCallFields] = {}
        for event in choice.events:
            match event:
                case AnswerDelta(text):
                    answer += text
                case ThinkingDelta(text):
                    thinking += text if self._output.thinking else ""
                case ToolCallOpened(index, id, name):
                    calls[index] = _ToolCallFields(id, name)
                case ToolCallDelta(index, arguments):
                    calls.setdefault(index, _ToolCallFields()).arguments += arguments
                case PhaseOpened() | Notice():
                    pass
                case _:
                    assert_never(event)
        parts = [f'"reasoning_content":{quoted(thinking)}'] if thinking else []
        if self._output.audio is not None and (answer or choice.audio):
            parts.append(_audio_delta(answer, choice.audio))
        elif answer:
            parts.append(f'"content":{quoted(answer)}')
        if calls:
            parts.append(self._tool_calls(calls))
        return f"{{{','.join(parts)}}}"

    def _tool_calls(self, calls: Mapping[int, _ToolCallFields]) -> str:
        if self._output.legacy:
            return f'"function_call":{next(iter(calls.values())).function()}'
        encoded = (f'{{"index":{index},{call.head()}"function":{call.function()}}}' for index, call in calls.items())
        return f'"tool_calls":[{",".join(encoded)}]'


@dataclass(slots=True)
class _ToolCallFields:
    """The fields of a tool call in one chunk: its id and name, a piece of its arguments, or both."""

    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def head(self) -> str:
        return "" if self.id is None else f'"id":{quoted(self.id)},"type":"function",'

    def function(self) -> str:
        name = "" if self.name is None else f'"name":{quoted(self.name)},'
        return f'{{{name}"arguments":{quoted(self.arguments)}}}'


def _audio_delta(transcript: str, data: str) -> str:
    parts = [f'"transcript":{quoted(transcript)}'] if transcript else []
    parts += [f'"data":"{data}"'] if data else []
    return f'"audio":{{{",".join(parts)}}}'


@dataclass
class ChoiceBuilder:
    """Folds the deltas of one choice, for a response that is not streamed."""

    events: list[ReadEvent] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    audio: str = ""

    def add(self, delta: ChoiceDelta) -> None:
        self.events += delta.events
        self.logprobs += delta.logprobs
        self.token_ids += delta.token_ids
        self.audio += delta.audio

    def value(self, choice: ChoiceStream) -> dict[str, Any]:
        output, folded = choice.output, fold(_with_opened_calls(self.events))
        value: dict[str, Any] = {"index": choice.index, "message": message_value(folded.message, output)}
        if output.audio is not None and folded.message.text:
            value["message"] |= {"content": None, "audio": output.audio.value(self.audio, folded.message.text)}
        value["finish_reason"], value["stop_reason"] = choice.finish_reason, choice.stop_reason
        value["logprobs"] = {"content": self.logprobs, "refusal": None} if output.logprobs else None
        if output.token_ids:
            value["token_ids"] = self.token_ids
        return {**value, "notices": list(folded.notices)} if folded.notices else value


def _with_opened_calls(events: Sequence[ReadEvent]) -> list[ReadEvent]:
    """Opens a call without a name for arguments whose call was opened before the continued reply."""
    opened: set[int] = set()
    out: list[ReadEvent] = []
    for event in events:
        if isinstance(event, ToolCallOpened):
            opened.add(event.index)
        elif isinstance(event, ToolCallDelta) and event.index not in opened:
            opened.add(event.index)
            out.append(ToolCallOpened(event.index, "", ""))
        out.append(event)
    return out


def message_value(message: Message, output: OutputOptions) -> dict[str, Any]:
    """Missing fields are null, or left out where clients take their presence for a value."""
    value: dict[str, Any] = {"role": "assistant", "content": message.text or None, "refusal": None}
    if message.thinking and output.thinking:
        value["reasoning_content"] = message.thinking
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    if calls and output.legacy:
        value["function_call"] = calls[0]
    elif calls:
        named = zip(message.tool_calls, calls, strict=True)
        value["tool_calls"] = [{"id": call.id, "type": "function", "function": function} for call, function in named]
    return value


async def respond(
    request: Request,
    completion: CompletionStream,
    deltas: AsyncGenerator[ChoiceDelta],
    encoder: CompletionEncoder,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`deltas` are those of the completion."""
    async with close_on_failure(deltas):
        with api_field_names():
            if not completion.call.output.stream:
                folded = await run_while_connected(request, encoder.fold(deltas))
                return JSONResponse(folded, headers=dict(headers or {}))
            first = await first_chunk(request, deltas, first_seconds(completion.call.request))
        return EventStream(_chunks(encoder, deltas, first, completion.call.output.usage), headers)


async def _chunks(
    encoder: CompletionEncoder,
    deltas: AsyncGenerator[ChoiceDelta],
    first: asyncio.Future[ChoiceDelta],
    usage: UsageChunks,
) -> AsyncGenerator[bytes]:
    try:
        if opening := encoder.encode_opening():
            yield opening
        delta = await first
        while True:
            if chunk := encoder.encode(delta):
                yield chunk
            delta = await anext(deltas)
    except StopAsyncIteration:
        if usage is not UsageChunks.FINISH:
            yield encoder.encode_usage()
        yield DONE
    except Exception as error:
        log_unexpected(error)
        yield encode_sse(error_body(error)) + DONE
    finally:
        await close_stream(first, deltas)


def _prompt_ids(completion: CompletionStream) -> dict[str, list[int]]:
    prompt = completion.choices[0].reply_stream.prompt
    return {"prompt_token_ids": list(prompt.context_ids)} if completion.call.output.token_ids else {}
