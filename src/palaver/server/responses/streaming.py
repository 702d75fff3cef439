"""A stored response as it is said: the turn's events from its beginning, and with each what belongs to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.service import Service
from palaver.errors import BadParameter, PalaverError, ShuttingDown
from palaver.events import (
    AnswerDelta,
    Failed,
    Finished,
    PhaseOpened,
    ReadEvent,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Waiting,
)
from palaver.generation import Finish, Step
from palaver.messages import Part, Text, Thinking, Tool, ToolCall
from palaver.phases import Phase
from palaver.sampling import Sampling
from palaver.server.errors import INTERNAL, error_status, log_unexpected
from palaver.server.openai.choices import AnswerLogprobs
from palaver.server.responses.encoder import (
    Event,
    ResponseEncoder,
    ResponseEnding,
    ResponseOutputOptions,
    encode_events,
)
from palaver.server.responses.history import ResponseRecord, read_record, response_id
from palaver.server.responses.schemas import LOGPROBS, SEALED
from palaver.server.state import ServerState
from palaver.store import ReplyStatus, StoredMessage
from palaver.store.json_values import StoredPart


async def begin_tracked(
    state: ServerState, chat: Chat, owner: str, begin: Callable[[], Awaitable[StoredMessage]]
) -> StoredMessage:
    """The reply, begun. QueueFull or ShuttingDown, and nothing begun, where there is no room for it."""
    with ExitStack() as floor:
        floor.enter_context(state.floor.taken(owner, _put_aside))
        reply = await begin()
        if reply.id in state.attending or reply.reply is None or reply.reply.status is not ReplyStatus.RUNNING:
            return reply  # it was asked for before, under the same key
        task = asyncio.create_task(_attend(state, chat, owner, reply.id, floor.pop_all()))
    state.attending[reply.id] = task
    task.add_done_callback(lambda _: state.attending.pop(reply.id, None))
    return reply


async def wait_indexed(state: ServerState, reply: str) -> None:
    """Waits until a response that has ended is remembered: whoever hears of its end may go on from it at once."""
    if (task := state.attending.get(reply)) is not None:
        await asyncio.wait({task})


def _put_aside() -> None:
    """With the server's end all turns are put aside: nothing has to be stopped for that."""


async def _attend(state: ServerState, chat: Chat, owner: str, reply: str, floor: ExitStack) -> None:
    with suppress(PalaverError):  # its conversation may be deleted meanwhile
        with floor:
            async with chat.events(reply) as entries:
                async for _ in entries:
                    pass
        path = await chat.path(reply)
        branch = await asyncio.to_thread(state.service.store.messages.full_path, path)
        state.branches.keep(owner, branch, reply)


_ENDED = {
    Finish.END: "completed",
    Finish.STOP_STRING: "completed",
    Finish.LENGTH: "incomplete",
    Finish.STOPPED: "cancelled",
}
_UNLIKELY = -9999.0


class ReplyParked(PalaverError):
    """The reply was put aside, with the server or its model: it goes on when somebody asks for it again."""


@dataclass(frozen=True, slots=True)
class ResponseDelta:
    """Something of a reply: events, or its end, and what belongs to them."""

    events: tuple[ReadEvent, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    ending: ResponseEnding | None = None


async def follow_response(
    state: ServerState, chat: Chat, reply: StoredMessage, logprobs: bool, from_start: bool
) -> AsyncGenerator[ResponseDelta]:
    """All of it to its end. PutAside where it has none yet; `from_start` is false where a reader wants only what comes
    after a number, which can't be told of a reply whose tokens mean nothing to the model in use."""
    tokens = await _tokens(state.service, reply) if logprobs else None
    async with chat.events(reply.id) as entries:
        if tokens is not None:
            yield ResponseDelta(tokens.opening())
        async for entry in entries:
            match entry.event:
                case Waiting() | Started():
                    yield ResponseDelta()
                case Finished() | Failed() as last:
                    for said in await tokens.news() if tokens is not None else ():
                        yield said
                    rest = tokens.rest() if tokens is not None else ()
                    await wait_indexed(state, reply.id)
                    yield ResponseDelta(last.tail, rest, await _ending(chat, reply, last))
                case Snapshot(message):
                    if not from_start:
                        raise BadParameter("starting_after", "...", "the model that said this is not in use")
                    tokens = None
                    yield ResponseDelta(tuple(replay_deltas(message.parts)))
                case event:
                    if tokens is None:
                        yield ResponseDelta((event,))
                        continue
                    for said in await tokens.news():
                        yield said


def replay_deltas(parts: Iterable[StoredPart | Part]) -> list[ReadEvent]:
    """All that was said, as if it came now."""
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
    """How a reply that is over ended."""
    assert reply.reply is not None
    if isinstance(last, Failed):
        return ResponseEnding("failed", reply.reply.usage, last.error)
    status = _ENDED[last.finish]
    at = reply.reply.ended_at
    return ResponseEnding(
        status, last.usage, None, int(at.timestamp()) if at is not None and status == "completed" else None
    )


async def _ending(chat: Chat, reply: StoredMessage, last: Finished | Failed) -> ResponseEnding:
    latest = await chat.message(reply.id)
    open_still = latest.reply is not None and latest.reply.status in (ReplyStatus.INTERRUPTED, ReplyStatus.RUNNING)
    if isinstance(last, Failed) and open_still:
        raise ReplyParked(last.error)
    return stored_ending(latest, last)


async def _tokens(service: Service, reply: StoredMessage) -> _TokenLogprobs | None:
    """None where the tokens mean nothing to the model in use: then there are no log-probabilities."""
    try:
        model = service.models.current()
    except PalaverError:
        return None
    if not is_same_tokenizer(model, reply):
        return None
    return await asyncio.to_thread(_TokenLogprobs, service, model, reply)


class _TokenLogprobs:
    """A reply read once more beside its turn, token by token, so that each text has its log-probabilities."""

    def __init__(self, service: Service, model: Model, reply: StoredMessage) -> None:
        self._service = service
        self._reply = reply
        owner = service.store.conversations.get(reply.conversation_id).owner_id
        request = service.requests.of(model, reply, owner)
        sampling = replace(request.sampling, logprobs=read_record(reply).top_logprobs)
        utterance = model.utterance(replace(request, sampling=sampling))
        self._answers = AnswerLogprobs(utterance, model.vocabulary)
        self._reader = model.reader(request, ())
        self._read = 0

    def opening(self) -> tuple[ReadEvent, ...]:
        return tuple(self._reader.open())

    async def news(self) -> list[ResponseDelta]:
        """What the tokens say that are there now and were not read before."""
        steps = await self._steps()
        fresh, self._read = steps[self._read :], len(steps)
        return [self._said(step) for step in fresh]

    def rest(self) -> tuple[dict[str, Any], ...]:
        return self._answers.take((), True)

    def _said(self, step: Step) -> ResponseDelta:
        drawn = step if step.logprob == step.logprob else replace(step, logprob=_UNLIKELY)
        return ResponseDelta(tuple(self._reader.feed(step.token_id)), self._answers.take((drawn,), False))

    async def _steps(self) -> Sequence[Step]:
        turn = self._service.turns.get(self._reply.id)
        if turn is not None and not turn.utterance.prompt.reply_ids:
            return tuple(turn.utterance.steps)
        return await asyncio.to_thread(self._service.store.replies.tokens, self._reply.id)


def stored_encoder(reply: StoredMessage, include: Sequence[str] = ()) -> ResponseEncoder:
    """Of a response that is stored; `include` is what a reader asks for besides what was asked for at first."""
    assert reply.reply is not None
    known, made_by = read_record(reply), reply.reply.settings
    about = response_header(response_id(reply.id), int(reply.created_at.timestamp()), made_by.model, known)
    about |= effective_parameters(made_by.sampling, made_by.tools, known)
    about |= {"conversation": {"id": reply.conversation_id}, "store": True}
    return ResponseEncoder(reply.id, about, output_options(known, include))


def output_options(known: ResponseRecord, include: Sequence[str] = ()) -> ResponseOutputOptions:
    wanted = {*known.include, *include}
    return ResponseOutputOptions(known.summary is not None, SEALED in wanted, LOGPROBS in wanted)


def response_header(id: str, created_at: int, model: str, known: ResponseRecord) -> dict[str, Any]:
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": known.background,
        "model": model,
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "instructions": known.instructions,
        "previous_response_id": known.previous,
        "conversation": None,
        "metadata": known.metadata,
        "parallel_tool_calls": known.parallel,
        "reasoning": {"effort": known.effort, "summary": known.summary},
        "store": False,
        "text": {"format": known.format},
        "tool_choice": known.tool_choice,
        "top_logprobs": known.top_logprobs,
        "truncation": known.truncation,
        "user": known.user,
    }


def effective_parameters(sampling: Sampling, tools: Sequence[Tool], known: ResponseRecord) -> dict[str, Any]:
    """What the reply is made with: the request's own values, or the model's where it named none."""
    return {
        "max_output_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tools": [_tool(tool, tool.name in known.strict) for tool in tools],
    }


def _tool(tool: Tool, strict: bool) -> dict[str, Any]:
    about = {"type": "function", "name": tool.name, "description": tool.description or None}
    return {**about, "parameters": dict(tool.parameters), "strict": strict}


_FROM_START = -1


async def stream_events(
    telling: ResponseEncoder, source: AsyncGenerator[ResponseDelta], after: int = _FROM_START
) -> AsyncGenerator[bytes]:
    """The events after that number."""
    events: list[Event] = []
    told_any = False
    async with aclosing(_events(telling, source)) as batches:
        async for events in batches:
            if piece := encode_events(
                event for event in events if event["sequence_number"] > after or _is_failure(event)
            ):
                told_any = True
                yield piece
    last = events[-1]["sequence_number"]
    if not told_any:
        if after > last:
            raise BadParameter("starting_after", after, f"the events of this response are 0 to {last}")
        yield b""


async def complete_response(telling: ResponseEncoder, source: AsyncGenerator[ResponseDelta]) -> dict[str, Any]:
    """The response when it has ended."""
    async with aclosing(source):
        async for said in source:
            telling.take(said.events, said.logprobs)
            if said.ending is not None:
                value: dict[str, Any] = telling.end(said.ending)[-1]["response"]
                return value
    raise AssertionError("a reply has an end")


async def _events(telling: ResponseEncoder, source: AsyncGenerator[ResponseDelta]) -> AsyncGenerator[list[Event]]:
    """BadParameter where it can't be told at all, and then before anything is."""
    opening = telling.opening()
    try:
        async with aclosing(source):
            async for said in source:
                events = [*opening, *telling.take(said.events, said.logprobs)]
                opening = []
                if said.ending is not None:
                    events += telling.end(said.ending)
                if events:
                    yield events
    except BadParameter:
        raise
    except (ReplyParked, ShuttingDown) as error:
        yield [*opening, telling.failure("shutting_down", str(error))]
    except PalaverError as error:
        yield [*opening, *telling.end(ResponseEnding("failed", error=str(error)))]
    except Exception as error:
        log_unexpected(error)
        yield [*opening, telling.failure(error_status(error).code, INTERNAL)]


def _is_failure(event: Event) -> bool:
    return bool(event["type"] == "error")
