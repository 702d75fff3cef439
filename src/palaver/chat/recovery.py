"""After a crash: resumes the replies that a dead process left running, or marks them interrupted."""

from __future__ import annotations

import asyncio
import logging

from palaver.chat.model import Model
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.turns import Turns
from palaver.events import fold
from palaver.messages import Part
from palaver.store import ReplyEnding, ReplyStatus, Store, StoredMessage

_log = logging.getLogger(__name__)


class Recovery:
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder, resume: bool) -> None:
        self._store = store
        self._turns = turns
        self._requests = requests
        self._resume = resume

    async def run(self, model: Model) -> None:
        """Recovers each reply on its own. One that fails is marked interrupted and keeps its tokens."""
        for id in await self._turns.claim_orphans(self._resume):
            try:
                await self._recover(model, id)
            except Exception as error:
                _log.warning("a reply that another process left was not recovered: %s", error)
                if self._resume:
                    await self._turns.end_recovering(id, ReplyEnding(ReplyStatus.INTERRUPTED, None))

    async def _recover(self, model: Model, id: str) -> None:
        reply = await asyncio.to_thread(self._store.messages.get, id)
        if self._resume:
            await self._take_over(model, reply)
        elif is_same_tokenizer(model, reply):
            parts = await asyncio.to_thread(self._fold_tokens, model, reply)
            await asyncio.to_thread(self._store.replies.rewrite, id, parts)

    async def _take_over(self, model: Model, reply: StoredMessage) -> None:
        assert reply.reply is not None
        if not is_same_tokenizer(model, reply):
            await self._turns.end_recovering(reply.id, ReplyEnding(ReplyStatus.INTERRUPTED, None))
            return
        conversation = await asyncio.to_thread(self._store.conversations.get, reply.conversation_id)
        request = await asyncio.to_thread(self._requests.rebuild, model, reply, conversation.owner_id)
        steps = await asyncio.to_thread(self._store.replies.tokens, reply.id)
        await self._turns.take_over(model, reply, request, steps)

    def _fold_tokens(self, model: Model, reply: StoredMessage) -> tuple[Part, ...]:
        """The parts of the message that the reply's tokens encode."""
        owner = self._store.conversations.get(reply.conversation_id, deleted=True).owner_id
        request = self._requests.rebuild(model, reply, owner)
        reader = model.reader(request, model.prompt(request, self._store.replies.token_ids(reply.id)))
        return fold((*reader.open(), *reader.close())).message.parts


def is_same_tokenizer(model: Model, reply: StoredMessage) -> bool:
    """Whether the reply's token ids are of this model's tokenizer."""
    return reply.reply is not None and reply.reply.settings.tokenizer == model.tokenizer
