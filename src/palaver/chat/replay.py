"""Generates a stored reply again from its settings, seed and branch, and compares the tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from palaver.chat.model import Model
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.reply_stream import first_generated
from palaver.store import Conflict, NotFound, Store


@dataclass(frozen=True, slots=True)
class ReplayResult:
    recorded: tuple[int, ...]
    replayed: tuple[int, ...]

    @property
    def same(self) -> bool:
        return self.recorded == self.replayed

    @property
    def difference(self) -> int | None:
        """The index of the first token that differs."""
        pairs = enumerate(zip(self.recorded, self.replayed, strict=False))
        first = next((index for index, (one, other) in pairs if one != other), None)
        return first if first is not None or self.same else min(len(self.recorded), len(self.replayed))


async def replay(store: Store, model: Model, reply_id: str) -> ReplayResult:
    """Generates the reply again, up to its length. Tokens that were not sampled are given as its beginning."""
    reply = await asyncio.to_thread(store.messages.get, reply_id)
    if reply.reply is None:
        raise NotFound("reply", reply_id)
    if not is_same_tokenizer(model, reply):
        raise Conflict(f"The reply was made by {reply.reply.settings.model!r}, whose tokens this model does not know.")
    steps = await asyncio.to_thread(store.replies.tokens, reply_id)
    conversation = await asyncio.to_thread(store.conversations.get, reply.conversation_id)
    request = await asyncio.to_thread(RequestBuilder(store).rebuild, model, reply, conversation.owner_id)
    recorded = tuple(step.token_id for step in steps)
    if not recorded:
        return ReplayResult((), ())
    request = replace(request, sampling=replace(request.sampling, max_tokens=len(recorded)))
    replayed = await model.reply(request, recorded[: first_generated(steps)])
    return ReplayResult(recorded, replayed.token_ids)
