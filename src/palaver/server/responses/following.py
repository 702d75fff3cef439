"""A stored response as it is said: the turn's events from its beginning, and with each what belongs to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.service import Service
from palaver.errors import BadParameter, PalaverError
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
from palaver.messages import Part, Text, Thinking, ToolCall
from palaver.phases import Phase
from palaver.server.openai.logprobs import AnswerLogprobs
from palaver.server.responses.attending import attended_to
from palaver.server.responses.kept import kept
from palaver.server.responses.telling import Ending
from palaver.server.state import State
from palaver.store import ReplyStatus, StoredMessage
from palaver.store.json_values import StoredPart

_ENDED = {
    Finish.END: "completed",
    Finish.STOP_STRING: "completed",
    Finish.LENGTH: "incomplete",
    Finish.STOPPED: "cancelled",
}
_UNLIKELY = -9999.0


class PutAside(PalaverError):
    """The reply was put aside, with the server or its model: it goes on when somebody asks for it again."""


@dataclass(frozen=True, slots=True)
class Said:
    """Something of a reply: events, or its end, and what belongs to them."""

    events: tuple[ReadEvent, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    ending: Ending | None = None


async def followed(
    state: State, chat: Chat, reply: StoredMessage, logprobs: bool, from_start: bool
) -> AsyncGenerator[Said]:
    """All of it to its end. PutAside where it has none yet; `from_start` is false where a reader wants only what comes
    after a number, which can't be told of a reply whose tokens mean nothing to the model in use."""
    tokens = await _tokens(state.service, reply) if logprobs else None
    async with chat.events(reply.id) as entries:
        if tokens is not None:
            yield Said(tokens.opening())
        async for entry in entries:
            match entry.event:
                case Waiting() | Started():
                    yield Said()
                case Finished() | Failed() as last:
                    for said in await tokens.news() if tokens is not None else ():
                        yield said
                    rest = tokens.rest() if tokens is not None else ()
                    await attended_to(state, reply.id)
                    yield Said(last.tail, rest, await _ending(chat, reply, last))
                case Snapshot(message):
                    if not from_start:
                        raise BadParameter("starting_after", "...", "the model that said this is not in use")
                    tokens = None
                    yield Said(tuple(again(message.parts)))
                case event:
                    if tokens is None:
                        yield Said((event,))
                        continue
                    for said in await tokens.news():
                        yield said


def again(parts: Iterable[StoredPart | Part]) -> list[ReadEvent]:
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


def ended(reply: StoredMessage, last: Finished | Failed) -> Ending:
    """How a reply that is over ended."""
    assert reply.reply is not None
    if isinstance(last, Failed):
        return Ending("failed", reply.reply.usage, last.error)
    status = _ENDED[last.finish]
    at = reply.reply.ended_at
    return Ending(status, last.usage, None, int(at.timestamp()) if at is not None and status == "completed" else None)


async def _ending(chat: Chat, reply: StoredMessage, last: Finished | Failed) -> Ending:
    latest = await chat.message(reply.id)
    open_still = latest.reply is not None and latest.reply.status in (ReplyStatus.INTERRUPTED, ReplyStatus.RUNNING)
    if isinstance(last, Failed) and open_still:
        raise PutAside(last.error)
    return ended(latest, last)


async def _tokens(service: Service, reply: StoredMessage) -> _Tokens | None:
    """None where the tokens mean nothing to the model in use: then there are no log-probabilities."""
    try:
        model = service.models.current()
    except PalaverError:
        return None
    if not is_same_tokenizer(model, reply):
        return None
    return await asyncio.to_thread(_Tokens, service, model, reply)


class _Tokens:
    """A reply read once more beside its turn, token by token, so that each text has its log-probabilities."""

    def __init__(self, service: Service, model: Model, reply: StoredMessage) -> None:
        self._service = service
        self._reply = reply
        owner = service.store.conversations.get(reply.conversation_id).owner_id
        request = service.requests.of(model, reply, owner)
        sampling = replace(request.sampling, logprobs=kept(reply).top_logprobs)
        utterance = model.utterance(replace(request, sampling=sampling))
        self._answers = AnswerLogprobs(utterance, model.vocabulary)
        self._reader = model.reader(request, ())
        self._read = 0

    def opening(self) -> tuple[ReadEvent, ...]:
        return tuple(self._reader.open())

    async def news(self) -> list[Said]:
        """What the tokens say that are there now and were not read before."""
        steps = await self._steps()
        fresh, self._read = steps[self._read :], len(steps)
        return [self._said(step) for step in fresh]

    def rest(self) -> tuple[dict[str, Any], ...]:
        return self._answers.take((), True)

    def _said(self, step: Step) -> Said:
        drawn = step if step.logprob == step.logprob else replace(step, logprob=_UNLIKELY)
        return Said(tuple(self._reader.feed(step.token_id)), self._answers.take((drawn,), False))

    async def _steps(self) -> Sequence[Step]:
        turn = self._service.turns.get(self._reply.id)
        if turn is not None and not turn.utterance.prompt.reply_ids:
            return tuple(turn.utterance.steps)
        return await asyncio.to_thread(self._service.store.replies.tokens, self._reply.id)
