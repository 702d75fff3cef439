"""A chat request that names a conversation lands in it: what is new is kept there, and so is the reply.

A client may send the whole history, as OpenAI's clients do, or only what it says now. The history is looked for in
the conversation's tree from its root; what is not there begins a branch. One message alone is said where the
conversation was left. The turn belongs to the server: it goes on when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.replay import first_generated
from palaver.chat.reply_stream import ReplyRequest, ReplyStream
from palaver.chat.turns import Turn
from palaver.errors import BadParameter, EngineError, ShuttingDown
from palaver.events import Failed, Finished, Snapshot, Started, Waiting
from palaver.generation import Ended, Output, Prefilled, Prompt, Queued, Step
from palaver.messages import Message
from palaver.sampling import Sampling
from palaver.server.metrics import Metrics
from palaver.server.openai.audio_stream import spoken_choice
from palaver.server.openai.choices import CompletionStream
from palaver.server.openai.history import PartialReply, StoredRequest, begin_replies, choice_parameters
from palaver.server.openai.messages import parse_history
from palaver.server.openai.request import ChatCall, OutputOptions, check_model, ignored_of, output_options
from palaver.server.openai.sampling_params import api_field_names, check_nested_fields, ignored_header
from palaver.server.openai.schemas import ChatRequest
from palaver.server.openai.streaming import respond
from palaver.server.state import ServerState
from palaver.store import Conflict, StoredMessage


async def stream_stored_turn(
    state: ServerState, chat: Chat, model: Model, reply: StoredMessage, logprobs: int, unsplit: bool
) -> ReplyStream:
    """An utterance whose tokens are the turn's, read anew. Leaving it leaves the turn alone.

    `logprobs` is how many alternatives of each token are told; `unsplit` is whether thoughts are told as text.
    """
    turn = state.service.turns.get(reply.id)
    if turn is not None:
        request, prompt = turn.utterance.request, turn.utterance.prompt
    else:
        request, prompt = await asyncio.to_thread(_recorded, state, model, reply)
    sampling, options = replace(request.sampling, logprobs=logprobs), replace(request.options, unsplit=unsplit)
    request = replace(request, sampling=sampling, options=options)
    reader = model.format.reader(prompt, sampling.stop, request.tools, options)
    return ReplyStream(request, prompt, reader, _TurnSource(state, chat, reply))


def _recorded(state: ServerState, model: Model, reply: StoredMessage) -> tuple[ReplyRequest, Prompt]:
    """What decided a turn that is over, or that another process runs, and what it began with."""
    owner = state.service.store.conversations.get(reply.conversation_id).owner_id
    request = state.service.requests.of(model, reply, owner)
    steps = state.service.store.replies.tokens(reply.id)
    begun = [step.token_id for step in steps[: first_generated(steps)]]
    return request, model.prompt(request, begun)


@dataclass(frozen=True, slots=True)
class _TurnSource:
    """Generates what a turn says."""

    state: ServerState
    chat: Chat
    reply: StoredMessage

    @asynccontextmanager
    async def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> AsyncIterator[_TurnOutputs]:
        async with aclosing(self._outputs(len(prompt.reply_ids))) as outputs:
            yield _TurnOutputs(outputs, self._turn)

    @property
    def _turn(self) -> Turn | None:
        return self.state.service.turns.get(self.reply.id)

    async def _outputs(self, begun: int) -> AsyncGenerator[Output]:
        """`begun` is how many tokens it began with."""
        told = 0
        async with self.chat.events(self.reply.id) as entries:
            async for entry in entries:
                match entry.event:
                    case Waiting(position, seconds):
                        yield Queued(position, seconds)
                        continue
                    case Started(prompt_tokens, cached_tokens):
                        yield Prefilled(prompt_tokens, cached_tokens)
                        continue
                    case Snapshot():
                        raise Conflict("The reply's tokens are not known to this model.")
                fresh = (await self._steps(begun))[told:]
                for step in fresh:
                    yield step
                told += len(fresh)
                match entry.event:
                    case Finished(finish, stop=stop):
                        yield Ended(finish, stop)
                    case Failed(error):
                        raise self._failed(error)

    async def _steps(self, begun: int) -> Sequence[Step]:
        if (turn := self._turn) is not None:
            return turn.utterance.steps
        steps = await asyncio.to_thread(self.state.service.store.replies.tokens, self.reply.id)
        return steps[begun:]

    def _failed(self, why: str) -> Exception:
        turn = self._turn
        if turn is not None and turn.error is not None:
            return turn.error
        return ShuttingDown() if self.state.closing.is_set() else EngineError(why)


class _TurnOutputs:
    """The outputs of a turn; whoever stops them stops the turn."""

    def __init__(self, outputs: AsyncGenerator[Output], turn: Turn | None) -> None:
        self._outputs = outputs
        self._turn = turn

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        return await anext(self._outputs)

    def stop(self) -> None:
        if self._turn is not None:
            self._turn.utterance.stop()

    def answer_now(self) -> None:
        if self._turn is not None:
            self._turn.utterance.answer_now()


HEADER = "x-conversation"


def conversation_name(metadata: Mapping[str, Any] | None, headers: Mapping[str, str]) -> str | None:
    """The conversation that a request names."""
    inside = (metadata or {}).get("conversation")
    if inside is not None and not isinstance(inside, str):
        raise BadParameter("metadata.conversation", inside, "must be the id of a conversation, or new")
    return inside or headers.get(HEADER) or None


async def answer_in_conversation(
    request: Request, body: ChatRequest, name: str, owner: str, state: ServerState
) -> Response:
    chat, model = state.service.chat(owner), state.service.models.current()
    key, how = request.headers.get("idempotency-key"), output_options(body)
    with api_field_names():
        check_nested_fields(body)
        check_model(body.model, model, state.settings)
        given = parse_history(body, state.settings.limits.messages)
        sounding = await spoken_choice(how, owner, state)
        begun = None
        if given.begun is not None:
            begun = PartialReply(given.begun, given.said, body.continue_final_message in (None, True))
        place = await begin_replies(
            chat, model, choice_parameters(body, model, state), given.messages, name, state, key, begun
        )
        unsplit = body.reasoning_format == "none"
        speaking = await stored_choices(state, chat, model, place, how, body.top_logprobs or 0, unsplit, given.begun)
    stream = speaking.tell() if sounding is None else sounding.of(speaking.tell())
    ignored = ignored_header(ignored_of(body, state.settings, model.format))
    return await respond(request, speaking, stream, place.value(), {HEADER: place.conversation, **ignored})


async def stored_choices(
    state: ServerState,
    chat: Chat,
    model: Model,
    place: StoredRequest,
    how: OutputOptions,
    logprobs: int = 0,
    unsplit: bool = False,
    begun: Message | None = None,
) -> CompletionStream:
    """The replies that were begun, as replies without a conversation are told. The turns are counted already."""
    utterances = [
        await stream_stored_turn(state, chat, model, await chat.message(reply), logprobs, unsplit)
        for reply in place.replies
    ]
    asked = ChatCall(model, utterances[0].request, len(utterances), how, begun)
    return CompletionStream(asked, utterances, Metrics())
