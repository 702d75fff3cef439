"""Continuing replies, on request and as forks; and generating a stored reply again to compare it."""

from __future__ import annotations

from asyncio import to_thread
from dataclasses import dataclass, replace

from palaver.chat.model import Model, draw_seed, extend_limit
from palaver.chat.reply_request import RequestBuilder, without_healing
from palaver.chat.reply_stream import ReplyRequest, first_generated
from palaver.chat.turns import NewStream, NewTurn, Turns
from palaver.errors import BadParameter
from palaver.generation import Step, prefill_steps
from palaver.store import (
    Conflict,
    Conversation,
    NotFound,
    ReplySettings,
    ReplyStatus,
    Store,
    StoredMessage,
)
from palaver.store.replies import was_resumed_with


class Continuation:
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder) -> None:
        self._store = store
        self._turns = turns
        self._requests = requests

    async def continue_reply(
        self, model: Model, owner: str, reply: StoredMessage, key: str | None = None
    ) -> StoredMessage:
        """Continues an incomplete reply from its tokens, or from its text if the tokenizer is another one."""
        if reply.reply is None or not is_same_tokenizer(model, reply):
            return await self._from_text(model, await self._conversation(reply), reply, key)
        steps, new = await to_thread(self._load, model, reply, owner)
        request = new.stream.request
        try:
            return await self._turns.resume(model, reply, new, key)
        except Conflict:
            latest = await to_thread(self._store.messages.get, reply.id)
            if latest.reply is not None and latest.reply.status is ReplyStatus.RUNNING:
                return latest  # another request has resumed it
        conversation = await self._conversation(reply)
        settings = reply.reply.settings
        if reply.reply.status is ReplyStatus.LENGTH:
            settings = settings.extended_at(len(steps))
        return await self._start_sibling(model, conversation, reply, request, settings, steps, key)

    def _load(self, model: Model, reply: StoredMessage, owner: str) -> tuple[tuple[Step, ...], NewStream]:
        """The tokens of a stored reply, and the stream that continues them."""
        request = self._requests.rebuild(model, reply, owner)
        steps = self._store.replies.tokens(reply.id)
        if reply.reply is not None and reply.reply.status is ReplyStatus.LENGTH:
            request = replace(request, sampling=extend_limit(reply.reply.settings.sampling, len(steps)))
        return steps, self._turns.stream_reply(model, request, steps)

    async def _conversation(self, reply: StoredMessage) -> Conversation:
        return await to_thread(self._store.conversations.get, reply.conversation_id)

    async def find_continued(self, reply: StoredMessage, key: str) -> StoredMessage | None:
        """The reply that an earlier request with this key continued or started."""
        if was_resumed_with(reply, key):
            return reply
        return await to_thread(self._store.replies.find_by_key, reply.conversation_id, reply.parent_id, key)

    async def fork(
        self,
        model: Model,
        conversation: Conversation,
        reply: StoredMessage,
        tokens: int,
        instead: int | None,
        key: str | None = None,
    ) -> StoredMessage:
        """Starts a sibling with the reply's first tokens, then `instead`. Without `instead` the rest is sampled again,
        with a new seed unless the conversation has one: the same seed would give the same tokens."""
        if tokens < 0:
            raise BadParameter("tokens", tokens, "must not be negative")
        if reply.reply is None or not is_same_tokenizer(model, reply):
            raise Conflict("The reply's tokens are not known to this model.")
        steps = (await to_thread(self._store.replies.tokens, reply.id))[:tokens]
        if instead is not None:
            if not 0 <= instead < model.engine.info.vocabulary_size:
                raise BadParameter("instead", instead, "there is no such token")
            steps = (*steps, *prefill_steps((instead,)))
        request = await to_thread(self._requests.rebuild, model, reply, conversation.owner_id)
        settings = reply.reply.settings
        if request.answer_at is not None and request.answer_at >= tokens:  # requested after the fork
            request, settings = replace(request, answer_at=None), replace(settings, answer_at=None)
        if instead is not None or tokens < request.healing_at:
            request, settings = replace(request, healing=b"", healing_at=0), without_healing(settings)
        if instead is None and "seed" not in conversation.parameters:
            seed = draw_seed()
            request = replace(request, sampling=replace(request.sampling, seed=seed))
            settings = replace(settings, sampling=replace(settings.sampling, seed=seed))
        return await self._start_sibling(model, conversation, reply, request, settings, steps, key)

    async def _from_text(
        self, model: Model, conversation: Conversation, reply: StoredMessage, key: str | None
    ) -> StoredMessage:
        """Starts a sibling with the text of a reply whose tokens are not known. After that text it gets the limit of
        the reply, or of the conversation if no model wrote the text."""
        path = await to_thread(self._store.messages.path, reply.parent_id) if reply.parent_id else ()
        prepared = await to_thread(self._requests.build, model, conversation, path, (), {})
        partial_reply = await to_thread(self._store.messages.load, reply)
        prompt = await to_thread(model.prompt, prepared.request, (), partial_reply)
        steps = prefill_steps(prompt.reply_ids)
        sampling = prepared.settings.sampling
        if reply.reply is not None:
            sampling = replace(sampling, max_tokens=reply.reply.settings.sampling.max_tokens)
        request = replace(prepared.request, sampling=extend_limit(sampling, len(steps)))
        settings = replace(prepared.settings, sampling=sampling).extended_at(len(steps))
        return await self._start_sibling(model, conversation, reply, request, settings, steps, key)

    async def _start_sibling(
        self,
        model: Model,
        conversation: Conversation,
        reply: StoredMessage,
        request: ReplyRequest,
        settings: ReplySettings,
        steps: tuple[Step, ...],
        key: str | None,
    ) -> StoredMessage:
        options = {name: value for name, value in settings.options.items() if name != "resumed"}
        new_turn = NewTurn(
            conversation.id,
            reply.parent_id,
            request,
            replace(settings, options=options).continued_by(model.engine.info.fingerprint, len(steps)),
            steps,
            key=key,
            expected_head=conversation.head_id,
        )
        return await self._turns.start(model, new_turn)


def is_same_tokenizer(model: Model, reply: StoredMessage) -> bool:
    """Whether the reply's token ids are of this model's tokenizer."""
    return reply.reply is not None and reply.reply.settings.tokenizer == model.tokenizer


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
    reply = await to_thread(store.messages.get, reply_id)
    if reply.reply is None:
        raise NotFound("reply", reply_id)
    if not is_same_tokenizer(model, reply):
        raise Conflict(f"The reply was made by {reply.reply.settings.model!r}, whose tokens this model does not know.")
    steps = await to_thread(store.replies.tokens, reply_id)
    conversation = await to_thread(store.conversations.get, reply.conversation_id)
    request = await to_thread(RequestBuilder(store).rebuild, model, reply, conversation.owner_id)
    recorded = tuple(step.token_id for step in steps)
    if not recorded:
        return ReplayResult((), ())
    request = replace(request, sampling=replace(request.sampling, max_tokens=len(recorded)))
    replayed = await model.reply(request, recorded[: first_generated(steps)])
    return ReplayResult(recorded, replayed.token_ids)
