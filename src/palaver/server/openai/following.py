"""A turn of a conversation, followed token by token: so it is told exactly as a reply without a conversation is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.replay import first_generated
from palaver.chat.reply_stream import ReplyRequest, ReplyStream
from palaver.chat.turns import Turn
from palaver.errors import EngineError, ShuttingDown
from palaver.events import Failed, Finished, Snapshot, Started, Waiting
from palaver.generation import Ended, Output, Prefilled, Prompt, Queued, Step
from palaver.sampling import Sampling
from palaver.server.state import State
from palaver.store import Conflict, StoredMessage


async def followed(
    state: State, chat: Chat, model: Model, reply: StoredMessage, logprobs: int, unsplit: bool
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
    return ReplyStream(request, prompt, reader, _Turns(state, chat, reply))


def _recorded(state: State, model: Model, reply: StoredMessage) -> tuple[ReplyRequest, Prompt]:
    """What decided a turn that is over, or that another process runs, and what it began with."""
    owner = state.service.store.conversations.get(reply.conversation_id).owner_id
    request = state.service.requests.of(model, reply, owner)
    steps = state.service.store.replies.tokens(reply.id)
    begun = [step.token_id for step in steps[: first_generated(steps)]]
    return request, model.prompt(request, begun)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Generates what a turn says."""

    state: State
    chat: Chat
    reply: StoredMessage

    @asynccontextmanager
    async def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> AsyncIterator[_Heard]:
        async with aclosing(self._outputs(len(prompt.reply_ids))) as outputs:
            yield _Heard(outputs, self._turn)

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


class _Heard:
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
