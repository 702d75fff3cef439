"""Chat requests that name a conversation: the new messages and the reply are stored there.

A client may send the whole history, as OpenAI's clients do, or only its new message. The history is matched with the
conversation's tree from the root; messages that do not match start a branch. A single message is appended at the
head. The turn belongs to the server: it continues when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from fastapi import Request
from fastapi.responses import Response

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.replay import first_generated
from palaver.chat.reply_stream import ReplyRequest, ReplyStream
from palaver.chat.turns import Turn
from palaver.errors import EngineError, ShuttingDown
from palaver.events import Failed, Finished, Snapshot, Started, Waiting
from palaver.generation import Ended, Output, Prefilled, Prompt, Queued, Step
from palaver.messages import Message
from palaver.sampling import Sampling
from palaver.server.metrics import Metrics
from palaver.server.openai.audio import spoken_choice
from palaver.server.openai.choices import CompletionStream
from palaver.server.openai.history import PartialReply, StoredRequest, choice_parameters, start_replies
from palaver.server.openai.messages import parse_history
from palaver.server.openai.request import (
    CONVERSATION_HEADER,
    ChatCall,
    OutputOptions,
    api_field_names,
    check_model,
    check_nested_fields,
    ignored_header,
    ignored_request_fields,
    output_options,
)
from palaver.server.openai.schemas import ChatRequest
from palaver.server.openai.streaming import respond
from palaver.server.state import ServerState
from palaver.store import Conflict, StoredMessage


async def stream_stored_turn(
    state: ServerState, chat: Chat, model: Model, reply: StoredMessage, logprobs: int, unsplit: bool
) -> ReplyStream:
    """A reply stream over the tokens of a stored turn. Closing it does not stop the turn.

    `logprobs` is the number of alternatives of each token; `unsplit` is whether thinking is part of the text.
    """
    turn = state.service.turns.get(reply.id)
    if turn is not None:
        request, prompt = turn.reply_stream.request, turn.reply_stream.prompt
    else:
        request, prompt = await asyncio.to_thread(_load_turn, state, model, reply)
    sampling, options = replace(request.sampling, logprobs=logprobs), replace(request.options, unsplit=unsplit)
    request = replace(request, sampling=sampling, options=options)
    reader = model.format.reader(prompt, sampling.stop, request.tools, options)
    return ReplyStream(request, prompt, reader, _TurnSource(state, chat, reply))


def _load_turn(state: ServerState, model: Model, reply: StoredMessage) -> tuple[ReplyRequest, Prompt]:
    """The request and prompt of a turn that has ended, or that runs in another process."""
    owner = state.service.store.conversations.get(reply.conversation_id).owner_id
    request = state.service.requests.rebuild(model, reply, owner)
    steps = state.service.store.replies.tokens(reply.id)
    prefill = [step.token_id for step in steps[: first_generated(steps)]]
    return request, model.prompt(request, prefill)


@dataclass(frozen=True, slots=True)
class _TurnSource:
    """A `TokenSource` whose tokens are those of a turn."""

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

    async def _outputs(self, prefilled: int) -> AsyncGenerator[Output]:
        """`prefilled` is the number of tokens that the turn started with."""
        count = 0
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
                new = (await self._steps(prefilled))[count:]
                for step in new:
                    yield step
                count += len(new)
                match entry.event:
                    case Finished(finish, stop=stop):
                        yield Ended(finish, stop)
                    case Failed(error):
                        raise self._failure(error)

    async def _steps(self, prefilled: int) -> Sequence[Step]:
        if (turn := self._turn) is not None:
            return turn.reply_stream.steps
        steps = await asyncio.to_thread(self.state.service.store.replies.tokens, self.reply.id)
        return steps[prefilled:]

    def _failure(self, message: str) -> Exception:
        turn = self._turn
        if turn is not None and turn.error is not None:
            return turn.error
        return ShuttingDown() if self.state.closing.is_set() else EngineError(message)


class _TurnOutputs:
    """The outputs of a turn. Stopping them stops the turn."""

    def __init__(self, outputs: AsyncGenerator[Output], turn: Turn | None) -> None:
        self._outputs = outputs
        self._turn = turn

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        return await anext(self._outputs)

    def stop(self) -> None:
        if self._turn is not None:
            self._turn.reply_stream.stop()

    def answer_now(self) -> None:
        if self._turn is not None:
            self._turn.reply_stream.answer_now()


async def answer_in_conversation(
    request: Request, body: ChatRequest, name: str, owner: str, state: ServerState
) -> Response:
    chat, model = state.service.chat(owner), state.service.models.current()
    key, output = request.headers.get("idempotency-key"), output_options(body)
    with api_field_names():
        check_nested_fields(body)
        check_model(body.model, model, state.settings)
        history = parse_history(body, state.settings.limits.messages)
        spoken = None
        if output.audio is not None:
            spoken = await spoken_choice(output.audio, output.stream, owner, state)
        partial = None
        if history.partial is not None:
            reuse = body.continue_final_message in (None, True)
            partial = PartialReply(history.partial, history.partial_ids, reuse)
        parameters = choice_parameters(body, model, state)
        stored = await start_replies(chat, model, parameters, history.messages, name, state, key, partial)
        unsplit = body.reasoning_format == "none"
        logprobs, continued = body.top_logprobs or 0, history.partial
        completion = await stored_choices(state, chat, model, stored, output, logprobs, unsplit, continued)
    deltas = completion.deltas() if spoken is None else spoken.with_audio(completion.deltas())
    ignored = ignored_header(ignored_request_fields(body, state.settings, model.format))
    headers = {CONVERSATION_HEADER: stored.conversation, **ignored}
    return await respond(request, completion, deltas, stored.value(), headers)


async def stored_choices(
    state: ServerState,
    chat: Chat,
    model: Model,
    stored: StoredRequest,
    output: OutputOptions,
    logprobs: int = 0,
    unsplit: bool = False,
    partial: Message | None = None,
) -> CompletionStream:
    """The stored replies as the choices of a completion. Metrics of turns are counted elsewhere."""
    reply_streams = [
        await stream_stored_turn(state, chat, model, await chat.message(reply), logprobs, unsplit)
        for reply in stored.replies
    ]
    call = ChatCall(model, reply_streams[0].request, len(reply_streams), output, partial)
    return CompletionStream(call, reply_streams, Metrics())
