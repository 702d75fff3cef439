"""A reply made again from its record: the same settings, the same seed, the same branch above it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaver.chat.model import Model
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.reply_request import RequestBuilder
from palaver.generation import Step
from palaver.store import Conflict, NotFound, Store


@dataclass(frozen=True, slots=True)
class ReplayResult:
    recorded: tuple[int, ...]
    made: tuple[int, ...]

    @property
    def same(self) -> bool:
        return self.recorded == self.made

    @property
    def difference(self) -> int | None:
        """The place of the first token that differs."""
        pairs = enumerate(zip(self.recorded, self.made, strict=False))
        first = next((place for place, (one, other) in pairs if one != other), None)
        return first if first is not None or self.same else min(len(self.recorded), len(self.made))


async def replay(store: Store, model: Model, reply_id: str) -> ReplayResult:
    """Generates the reply again, as far as it got. Words that no model drew are given, not made."""
    reply = await asyncio.to_thread(store.messages.get, reply_id)
    if reply.reply is None:
        raise NotFound("reply", reply_id)
    if not is_same_tokenizer(model, reply):
        raise Conflict(f"The reply was made by {reply.reply.settings.model!r}, whose tokens this model does not know.")
    steps = await asyncio.to_thread(store.replies.tokens, reply_id)
    conversation = await asyncio.to_thread(store.conversations.get, reply.conversation_id)
    request = await asyncio.to_thread(RequestBuilder(store).of, model, reply, conversation.owner_id)
    recorded = tuple(step.token_id for step in steps)
    if not recorded:
        return ReplayResult((), ())
    request = replace(request, sampling=replace(request.sampling, max_tokens=len(recorded)))
    made = await model.reply(request, recorded[: first_generated(steps)])
    return ReplayResult(recorded, made.token_ids)


def first_generated(steps: Sequence[Step]) -> int:
    """The place from which on a model drew every token."""
    return max((place + 1 for place, step in enumerate(steps) if step.logprob != step.logprob), default=0)
