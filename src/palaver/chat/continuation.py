"""How a reply goes on: the same message where that can be, else a sibling that begins with all it said."""

from __future__ import annotations

from asyncio import to_thread
from dataclasses import replace

from palaver.chat.model import Model, draw_seed, extend_limit
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.reply_stream import ReplyRequest
from palaver.chat.turns import NewTurn, Turns
from palaver.errors import BadParameter
from palaver.generation import Step
from palaver.store import Conflict, Conversation, ReplySettings, ReplyStatus, Store, StoredMessage
from palaver.store.replies import was_resumed_with
from palaver.store.token_codec import given_tokens


class Continuation:
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder) -> None:
        self._store = store
        self._turns = turns
        self._requests = requests

    async def go_on(
        self, model: Model, conversation: Conversation, reply: StoredMessage, key: str | None = None
    ) -> StoredMessage:
        """The rest of a reply that is not whole: from its tokens where this model knows them, else from its words."""
        if reply.reply is None or not is_same_tokenizer(model, reply):
            return await self._from_text(model, conversation, reply, key)
        request = await to_thread(self._requests.of, model, reply, conversation.owner_id)
        steps = await to_thread(self._store.replies.tokens, reply.id)
        if reply.reply.status is ReplyStatus.LENGTH:
            request = replace(request, sampling=extend_limit(request.sampling, len(steps)))
        try:
            return await self._turns.resume(model, reply, request, steps, key)
        except Conflict:
            latest = await to_thread(self._store.messages.get, reply.id)
            if latest.reply is not None and latest.reply.status is ReplyStatus.RUNNING:
                return latest  # somebody else was quicker
        return await self._beside(model, conversation, reply, request, reply.reply.settings, steps, key)

    async def done(self, reply: StoredMessage, key: str) -> StoredMessage | None:
        """What a wish with this key has led to before: the same reply, gone on with, or another beside it."""
        if was_resumed_with(reply, key):
            return reply
        return await to_thread(self._store.replies.keyed, reply.conversation_id, reply.parent_id, key)

    async def fork(
        self,
        model: Model,
        conversation: Conversation,
        reply: StoredMessage,
        tokens: int,
        instead: int | None,
        key: str | None = None,
    ) -> StoredMessage:
        """A sibling that begins with the reply's first tokens, then `instead`. Without it the rest is drawn anew: with
        another seed, unless the conversation has one, as the same one would say the same again."""
        if tokens < 0:
            raise BadParameter("tokens", tokens, "must not be negative")
        if reply.reply is None or not is_same_tokenizer(model, reply):
            raise Conflict("The reply's tokens are not known to this model.")
        steps = (await to_thread(self._store.replies.tokens, reply.id))[:tokens]
        if instead is not None:
            if not 0 <= instead < model.engine.info.vocabulary_size:
                raise BadParameter("instead", instead, "there is no such token")
            steps = (*steps, *given_tokens((instead,)))
        request = await to_thread(self._requests.of, model, reply, conversation.owner_id)
        made_by = reply.reply.settings
        if request.answer_at is not None and request.answer_at >= tokens:  # asked for later than the fork begins
            request, made_by = replace(request, answer_at=None), replace(made_by, answer_at=None)
        if instead is None and "seed" not in conversation.parameters:
            sampling = replace(request.sampling, seed=draw_seed())
            request, made_by = replace(request, sampling=sampling), replace(made_by, sampling=sampling)
        return await self._beside(model, conversation, reply, request, made_by, steps, key)

    async def _from_text(
        self, model: Model, conversation: Conversation, reply: StoredMessage, key: str | None
    ) -> StoredMessage:
        """A sibling that begins with the words of a reply whose tokens are not known."""
        path = await to_thread(self._store.messages.path, reply.parent_id) if reply.parent_id else ()
        asked = await to_thread(self._requests.new, model, conversation, path, (), {})
        begun = await to_thread(self._store.messages.full, reply)
        prompt = await to_thread(model.prompt, asked.request, (), begun)
        steps = given_tokens(prompt.reply_ids)
        return await self._beside(model, conversation, reply, asked.request, asked.settings, steps, key)

    async def _beside(
        self,
        model: Model,
        conversation: Conversation,
        reply: StoredMessage,
        request: ReplyRequest,
        made_by: ReplySettings,
        steps: tuple[Step, ...],
        key: str | None,
    ) -> StoredMessage:
        kept = {name: value for name, value in made_by.options.items() if name != "resumed"}
        beginning = NewTurn(
            conversation.id,
            reply.parent_id,
            request,
            replace(made_by, options=kept).continued_by(model.engine.info.fingerprint, len(steps)),
            steps,
            key=key,
            expected_head=conversation.head_id,
        )
        return await self._turns.begin(model, beginning)
