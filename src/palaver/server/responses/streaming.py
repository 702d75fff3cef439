"""Streaming of responses: reads a stored turn or a stateless reply, and encodes it with a `ResponseEncoder`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from palaver.chat.interface import ServerChat
from palaver.chat.parameters import LOOP
from palaver.chat.reply_stream import ReplyRequest
from palaver.chat.subscription import ended_event
from palaver.chat.tool_loop import runs_here
from palaver.errors import BadParameter, PalaverError, ShuttingDown
from palaver.events import (
    AnswerDelta,
    DraftBlock,
    Failed,
    Finished,
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
)
from palaver.generation import Finish
from palaver.messages import Part, Text, Thinking, Tool, ToolCall
from palaver.phases import Phase
from palaver.sampling import Sampling
from palaver.server.errors import INTERNAL, error_status, log_unexpected
from palaver.server.openai.streaming import ChoiceDelta, ChoiceStream, logprob_entries
from palaver.server.responses.encoder import (
    Event,
    ResponseEncoder,
    ResponseEnding,
    ResponseOutputOptions,
    encode_events,
)
from palaver.server.responses.history import ResponseRecord, StoredResponse, read_record, response_id
from palaver.server.responses.mcp import (
    ItemStep,
    RoundOutcome,
    RoundReader,
    StillRunning,
    follow_round,
    list_steps,
    reply_before,
)
from palaver.server.responses.schemas import ENCRYPTED_CONTENT, LOGPROBS
from palaver.server.sse import close_stream
from palaver.server.state import ServerState
from palaver.store import ReplyStatus, StoredMessage
from palaver.store.encoding import StoredPart
from palaver.store.records import new_id

_STATUSES = {
    Finish.END: "completed",
    Finish.STOP_STRING: "completed",
    Finish.LENGTH: "incomplete",
    Finish.STOPPED: "cancelled",
}
_FROM_START = -1


async def start_tracked(
    state: ServerState, chat: ServerChat, owner: str, start: Callable[[], Awaitable[StoredMessage]]
) -> StoredMessage:
    """Starts the reply and follows it to its end in a task. Raises QueueFull or ShuttingDown before anything starts."""
    with ExitStack() as permit:
        permit.enter_context(state.limiter.acquire(owner, _on_shutdown))
        reply = await start()
        if reply.id in state.response_watchers or reply.reply is None or reply.reply.status is not ReplyStatus.RUNNING:
            return reply  # a retry with the same idempotency key
        task = asyncio.create_task(_follow(state, chat, owner, reply.id, permit.pop_all()))
    state.response_watchers[reply.id] = task
    task.add_done_callback(lambda _: state.response_watchers.pop(reply.id, None))
    return reply


async def wait_indexed(state: ServerState, reply: str) -> None:
    """Waits until a response that has ended is in the index, so that a client may continue from it at once."""
    if (task := state.response_watchers.get(reply)) is not None:
        await asyncio.wait({task})


def _on_shutdown() -> None:
    """Does nothing: the service itself parks all turns when the server shuts down."""


async def _follow(state: ServerState, chat: ServerChat, owner: str, reply: str, permit: ExitStack) -> None:
    with suppress(PalaverError):  # the conversation may have been deleted in the meantime
        with permit:
            async with chat.events(reply) as entries:
                async for _ in entries:
                    pass
        await index_reply(state, chat, owner, reply)


async def index_reply(state: ServerState, chat: ServerChat, owner: str, reply: str) -> None:
    """Adds a reply that has ended to the index."""
    branch = await chat.load_messages(await chat.path(reply))
    state.response_index.add(owner, branch, reply)


class ReplyParked(PalaverError):
    """The reply was interrupted by a shutdown or a change of the model. It resumes at the next request for it."""


@dataclass(frozen=True, slots=True)
class ResponseDelta:
    """One step of a response: events with their log-probabilities, and the ending with the last one."""

    events: tuple[ReadEvent, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    ending: ResponseEnding | None = None
    steps: tuple[ItemStep, ...] = ()
    """Of items of tool servers, before the events."""
    reply: StoredMessage | None = None
    """The reply of these events and those after, where it is another."""


async def follow_response(
    state: ServerState,
    chat: ServerChat,
    owner: str,
    response: StoredResponse,
    logprobs: bool,
    from_start: bool = True,
    wait: bool = True,
) -> AsyncGenerator[ResponseDelta]:
    """Follows a stored response over all replies that tool calls lead to.

    Raises ReplyParked if it was interrupted, and StillRunning if it has not ended and `wait` is false. `from_start` is
    false if the client resumes after a sequence number.
    """
    reply, after_approval = response.reply, response.after_approval
    rounds, usage = RoundReader(state, chat, owner, wait), Usage()
    lists = () if after_approval else tuple(list_steps(reply, await reply_before(chat, reply)))
    while True:
        if not after_approval:
            entered: StoredMessage | None = reply
            read = _follow_reply if wait else _read_reply
            async with aclosing(read(state, chat, reply, logprobs, from_start)) as deltas:
                async for delta in deltas:
                    delta = replace(delta, reply=entered, steps=lists)
                    entered, lists = None, ()
                    if delta.ending is None:
                        yield delta
                    else:
                        last, ending = delta, delta.ending
            if wait and reply.id != response.reply.id:
                await index_reply(state, chat, owner, reply.id)
            usage = _add_usage(usage, ending.usage)
            ending = replace(ending, usage=usage)
            if ending.status != "completed" or await rounds.get(reply.id) is None:
                yield replace(last, ending=ending)
                return
            yield replace(last, ending=None)
        outcome = RoundOutcome()
        async for step in follow_round(rounds, await chat.message(reply.id), after_approval):
            if isinstance(step, RoundOutcome):
                outcome = step
            else:
                yield ResponseDelta(steps=(step,))
        if outcome.next_id is None:
            ended = (await chat.message(reply.id)).reply
            at = ended.ended_at if ended is not None and outcome.status == "completed" else None
            completed_at = None if at is None else int(at.timestamp())
            yield ResponseDelta(ending=ResponseEnding(outcome.status, usage, outcome.error, completed_at))
            return
        reply, after_approval = await chat.message(outcome.next_id), False


def _add_usage(one: Usage, other: Usage | None) -> Usage:
    if other is None:
        return one
    return Usage(*(getattr(one, field.name) + getattr(other, field.name) for field in fields(Usage)))


async def _read_reply(
    state: ServerState, chat: ServerChat, reply: StoredMessage, logprobs: bool, from_start: bool
) -> AsyncGenerator[ResponseDelta]:
    """A stored reply as it is now. Raises StillRunning after what there is of a reply that runs."""
    assert reply.reply is not None
    if reply.reply.status is ReplyStatus.RUNNING:
        stream = await chat.reply_stream(reply.id, wait=False)
        if stream.is_here:  # else another process runs it, or it waits for the model
            yield ResponseDelta(tuple(stream.log.events()))
        raise StillRunning(is_queued=stream.is_here and not stream.log.started)
    yield ResponseDelta(tuple(replay_deltas(reply.parts)))
    last = stored_ending(reply, ended_event(reply))
    yield ResponseDelta(ending=ResponseEnding("cancelled", last.usage) if read_record(reply).cancelled else last)


async def _follow_reply(
    state: ServerState, chat: ServerChat, reply: StoredMessage, logprobs: bool, from_start: bool
) -> AsyncGenerator[ResponseDelta]:
    """Follows a stored reply from its beginning to its end. Raises ReplyParked if it was interrupted.

    `from_start` is false if the client resumes after a sequence number. A reply of another tokenizer is only
    known as a whole, without its numbers and log-probabilities, and can't be resumed.
    """
    stream = await chat.reply_stream(reply.id)
    async with stream, aclosing(stream.batches()) as batches:
        async for batch in batches:
            entries = _logprobs(state, reply, batch) if logprobs else ()
            match batch.events[0]:
                case Waiting() | Started() | DraftBlock():
                    yield ResponseDelta()
                case Finished() | Failed() as last:
                    await wait_indexed(state, reply.id)
                    yield ResponseDelta(last.tail, entries, await _ending(chat, reply, last))
                case Snapshot(message):
                    if not from_start:
                        raise BadParameter("starting_after", "...", "the model of this response is not loaded")
                    yield ResponseDelta(tuple(replay_deltas(message.parts)))
                case _:
                    yield ResponseDelta(cast("tuple[ReadEvent, ...]", batch.events), entries)


def _logprobs(state: ServerState, reply: StoredMessage, batch: ReplyBatch) -> tuple[dict[str, Any], ...]:
    if not batch.answer_steps:
        return ()
    assert reply.reply is not None
    settings = reply.reply.settings
    model = state.service.models.reader_for(settings.model, settings.tokenizer)
    if model is None:
        return ()
    return logprob_entries(batch.answer_steps, model.vocabulary, read_record(reply).top_logprobs)


def replay_deltas(parts: Iterable[StoredPart | Part]) -> list[ReadEvent]:
    """The events that a reader would emit for these parts."""
    events: list[ReadEvent] = []
    calls = 0
    for part in parts:
        match part:
            case Text(text):
                events.append(AnswerDelta(text))
            case Thinking(text):
                events += [PhaseOpened(Phase.THINKING), *([ThinkingDelta(text)] if text else ())]
            case ToolCall(id, name, arguments):
                events += [ToolCallOpened(calls, id, name), *([ToolCallDelta(calls, arguments)] if arguments else ())]
                calls += 1
    return events


def stored_ending(reply: StoredMessage, last: Finished | Failed) -> ResponseEnding:
    """The ending of a reply that has ended."""
    assert reply.reply is not None
    if isinstance(last, Failed):
        return ResponseEnding("failed", reply.reply.usage, last.error)
    at = reply.reply.ended_at
    return _finished(last, last.usage, at.timestamp() if at is not None else None)


def _finished(last: Finished, usage: Usage, at: float | None) -> ResponseEnding:
    status = _STATUSES[last.finish]
    return ResponseEnding(status, usage, None, int(at) if at is not None and status == "completed" else None)


async def _ending(chat: ServerChat, reply: StoredMessage, last: Finished | Failed) -> ResponseEnding:
    latest = await chat.message(reply.id)
    unfinished = latest.reply is not None and latest.reply.status in (ReplyStatus.INTERRUPTED, ReplyStatus.RUNNING)
    if isinstance(last, Failed) and unfinished:
        raise ReplyParked(last.error)
    return stored_ending(latest, last)


async def read_choice(
    choice: ChoiceStream, stream: AsyncGenerator[ChoiceDelta], first: asyncio.Future[ChoiceDelta]
) -> AsyncGenerator[ResponseDelta]:
    """The deltas of a reply that is not stored. The usage of a continued reply counts only its new tokens."""
    try:
        yield ResponseDelta((PhaseOpened(Phase.THINKING),) if choice.opens_thinking else ())
        delta: ChoiceDelta | None = await first
        while delta is not None:
            ending = _finished(delta.finished, choice.usage, time.time()) if delta.finished is not None else None
            yield ResponseDelta(delta.events, delta.logprobs, ending)
            delta = await anext(stream, None)
    finally:
        await close_stream(first, stream)


def stored_encoder(response: StoredResponse, include: Sequence[str] = ()) -> ResponseEncoder:
    """The encoder of a stored response; `include` adds to what its request included."""
    reply, record = response.reply, response.record
    assert reply.reply is not None
    settings = reply.reply.settings
    header = response_header(reply.id, reply.created_at.timestamp(), settings.model, record)
    served = settings.options.get(LOOP, {}).get("tools", {})
    header |= _effective_parameters(
        settings.sampling, [tool for tool in settings.tools if tool.name not in served], record
    )
    header |= {"id": response.id, "conversation": {"id": reply.conversation_id}, "store": True}
    return ResponseEncoder(reply.id, header, _output_options(record, include))


def stateless_encoder(model: str, request: ReplyRequest, record: ResponseRecord) -> ResponseEncoder:
    """The encoder of a response that is not stored."""
    id = new_id()
    header = response_header(id, time.time(), model, record)
    header |= _effective_parameters(request.sampling, request.tools, record)
    return ResponseEncoder(id, header, _output_options(record))


def _output_options(record: ResponseRecord, include: Sequence[str] = ()) -> ResponseOutputOptions:
    included = {*record.include, *include}
    return ResponseOutputOptions(record.summary is not None, ENCRYPTED_CONTENT in included, LOGPROBS in included)


def response_header(reply: str, created_at: float, model: str, record: ResponseRecord) -> dict[str, Any]:
    """The fields that are known before the reply starts."""
    return {
        "id": response_id(reply),
        "object": "response",
        "created_at": int(created_at),
        "completed_at": None,
        "status": "in_progress",
        "background": record.background,
        "model": model,
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "instructions": record.instructions,
        "previous_response_id": record.previous,
        "conversation": None,
        "metadata": record.metadata,
        "parallel_tool_calls": record.parallel,
        "reasoning": {"effort": record.effort, "summary": record.summary},
        "store": False,
        "text": {"format": record.format},
        "tool_choice": record.tool_choice,
        "top_logprobs": record.top_logprobs,
        "truncation": record.truncation,
        "user": record.user,
    }


def _effective_parameters(sampling: Sampling, tools: Sequence[Tool], record: ResponseRecord) -> dict[str, Any]:
    """The parameters in effect: those of the request, or else the model's defaults."""
    return {
        "max_output_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tools": [
            *(_tool_value(tool, tool.name in record.strict) for tool in tools),
            *({name: value for name, value in one.items() if name != "name"} for one in record.mcp),
        ],
    }


def _tool_value(tool: Tool, strict: bool) -> dict[str, Any]:
    header = {"type": "function", "name": tool.name, "description": tool.description or None}
    return {**header, "parameters": dict(tool.parameters), "strict": strict}


async def stream_events(
    encoder: ResponseEncoder, source: AsyncGenerator[ResponseDelta], after: int = _FROM_START
) -> AsyncGenerator[bytes]:
    """The encoded events after a sequence number."""
    events: list[Event] = []
    emitted = False
    async with aclosing(_events(encoder, source)) as batches:
        async for events in batches:
            if chunk := encode_events(
                event for event in events if event["sequence_number"] > after or _is_error(event)
            ):
                emitted = True
                yield chunk
    last = events[-1]["sequence_number"]
    if not emitted:
        if after > last:
            raise BadParameter("starting_after", after, f"the events of this response are 0 to {last}")
        yield b""


def feed_delta(encoder: ResponseEncoder, delta: ResponseDelta) -> list[Event]:
    """Feeds all but the ending."""
    if delta.reply is not None and delta.reply.reply is not None:
        encoder.enter_reply(delta.reply.id, partial(runs_here, delta.reply.reply.settings))
    return [*encoder.feed_steps(delta.steps), *encoder.feed(delta.events, delta.logprobs)]


async def complete_response(encoder: ResponseEncoder, source: AsyncGenerator[ResponseDelta]) -> dict[str, Any]:
    """The whole response, once it has ended."""
    async with aclosing(source):
        async for delta in source:
            feed_delta(encoder, delta)
            if delta.ending is not None:
                value: dict[str, Any] = encoder.finish(delta.ending)[-1]["response"]
                return value
    raise AssertionError("a reply has an end")


async def _events(encoder: ResponseEncoder, source: AsyncGenerator[ResponseDelta]) -> AsyncGenerator[list[Event]]:
    """Raises BadParameter only before the first event; any other error becomes the last event."""
    opening = encoder.start()
    try:
        async with aclosing(source):
            async for delta in source:
                events = [*opening, *feed_delta(encoder, delta)]
                opening = []
                if delta.ending is not None:
                    events += encoder.finish(delta.ending)
                if events:
                    yield events
    except BadParameter:
        raise
    except (ReplyParked, ShuttingDown) as error:
        yield [*opening, encoder.error_event("shutting_down", str(error))]
    except PalaverError as error:
        yield [*opening, *encoder.finish(ResponseEnding("failed", error=str(error)))]
    except Exception as error:
        log_unexpected(error)
        yield [*opening, encoder.error_event(error_status(error).code, INTERNAL)]


def _is_error(event: Event) -> bool:
    return bool(event["type"] == "error")
