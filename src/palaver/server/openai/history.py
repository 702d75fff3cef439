"""Where the messages of a request belong in a conversation, and the replies that are begun there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palaver.chat.interface import Chat
from palaver.chat.model import Model, draw_seed, offset_limits
from palaver.chat.parameters import check_parameters
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.turns import NewTurn
from palaver.errors import BadParameter, NoMessages
from palaver.messages import Message, Role, Text, Thinking, ToolCall
from palaver.server.openai.reply_index import canonical_arguments
from palaver.server.openai.request import check_token_ids, choice_count, whole_parameters
from palaver.server.openai.schemas import ChatRequest
from palaver.server.state import ServerState
from palaver.store import Conflict, Conversation, ReplyStatus, StoredMessage
from palaver.store.token_codec import given_tokens

NEW = "new"


@dataclass(frozen=True, slots=True)
class PartialReply:
    """A reply that its client has the beginning of."""

    message: Message
    said: tuple[int, ...] | None = None
    """Its token ids, where they were sent."""
    as_it_was: bool = True
    """Whether it goes on where it was left, so that the tokens of the same words in the conversation may be taken."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    conversation: str
    message: str
    replies: tuple[str, ...]
    """One for each choice."""

    @property
    def reply(self) -> str:
        return self.replies[0]

    def value(self) -> dict[str, Any]:
        about: dict[str, Any] = {"conversation": self.conversation, "message": self.message, "reply": self.reply}
        return {"metadata": {**about, "replies": list(self.replies)} if len(self.replies) > 1 else about}


async def begin_replies(
    chat: Chat,
    model: Model,
    wanted: Sequence[dict[str, Any]],
    messages: Sequence[Message],
    name: str,
    state: ServerState,
    key: str | None,
    begun: PartialReply | None = None,
) -> StoredRequest:
    """Puts the messages where they belong, and begins the replies: `wanted` has the parameters of each."""
    system = "\n\n".join(message.text for message in messages if message.role is Role.SYSTEM)
    said = [message for message in messages if message.role is not Role.SYSTEM]
    if not said:
        raise NoMessages
    if said[-1].role is Role.ASSISTANT:
        raise BadParameter("messages", "assistant", "the last message is a reply already: there is nothing to answer")
    conversation = await _conversation(chat, name, system)
    if begun is not None:
        return await _ContinuedReplies(state, chat, model, conversation, begun, key).begin(said, wanted)
    parent, fresh = await _placed(chat, conversation, said)
    *before, first = wanted[::-1]
    message, replies = await _said(chat, conversation, parent, fresh, before[0] if before else first, key)
    for place, parameters in enumerate([*before[1:], first] if before else []):
        again = None if key is None else f"{key} {place}"
        replies.append(await chat.reply(conversation.id, message, parameters=parameters, key=again))
    return StoredRequest(conversation.id, message, tuple(reply.id for reply in reversed(replies)))


def choice_parameters(body: ChatRequest, model: Model, state: ServerState) -> list[dict[str, Any]]:
    """The parameters of each choice. The first is begun last, so that the conversation is left there."""
    parameters = whole_parameters(body, state.settings, model.format)
    count = choice_count(body.n, state.settings)
    if count == 1:
        return [parameters]
    seed = parameters.get("seed", draw_seed())
    return [{**parameters, "seed": seed, "choice": choice} for choice in range(count)]


async def _said(
    chat: Chat,
    conversation: Conversation,
    parent: StoredMessage | None,
    fresh: Sequence[Message],
    parameters: Mapping[str, Any],
    key: str | None,
) -> tuple[str, list[StoredMessage]]:
    if not fresh:
        assert parent is not None
        return parent.id, [await chat.reply(conversation.id, parent.id, parameters=parameters, key=key)]
    at = parent.id if parent is not None else None
    for message in fresh[:-1]:
        at = (await chat.append(conversation.id, at, message)).id
    turn = await chat.say(conversation.id, at, fresh[-1], parameters=parameters, key=key)
    return turn.message.id, [turn.reply]


async def _conversation(chat: Chat, name: str, system: str) -> Conversation:
    if name == NEW:
        return await chat.create(system=system)
    found = await chat.conversation(name)
    if system and system != found.system:
        if found.head_id is not None:
            raise Conflict("The conversation has another system prompt: change it there, or leave it out here.")
        found = await chat.change(found.id, system=system)
    return found


async def _placed(
    chat: Chat, conversation: Conversation, said: Sequence[Message], goes_on: bool = False
) -> tuple[StoredMessage | None, Sequence[Message]]:
    """The message under which the first new one hangs, and those that are new."""
    nodes = await chat.nodes(conversation.id)
    if not nodes:
        return None, said
    if len(said) == 1:
        leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
        last = await chat.message(leaf) if leaf else None
        if not goes_on:
            return last, said
        if (asked := await _asked_last(chat, last, said[0])) is not None:
            return asked, ()
    children: dict[str | None, list[str]] = {}
    for node in nodes:
        children.setdefault(node.parent_id, []).append(node.id)
    at: StoredMessage | None = None
    for place, message in enumerate(said):
        found = await _child(chat, children.get(at.id if at else None, ()), message)
        if found is None:
            return at, said[place:]
        at = found
    return at, ()


async def _asked_last(chat: Chat, last: StoredMessage | None, message: Message) -> StoredMessage | None:
    """What the conversation was left with, or what that answers, where it is this message."""
    if last is not None and last.role is Role.ASSISTANT and last.parent_id is not None:
        last = await chat.message(last.parent_id)
    same = last is not None and last.role is message.role and _words(last.parts) == _words(message.parts)
    return last if same else None


async def _child(chat: Chat, ids: Sequence[str], message: Message) -> StoredMessage | None:
    """The newest of them that says the same."""
    for id in reversed(ids):
        stored = await chat.message(id)
        if stored.role is message.role and _words(stored.parts) == _words(message.parts):
            return stored
    return None


def _words(parts: Sequence[Any]) -> list[Any]:
    """What is compared: thinking is not, because clients leave it out."""
    texts = "".join(part.text for part in parts if isinstance(part, Text))
    return [texts, *(part for part in parts if not isinstance(part, Text | Thinking | ToolCall)), *_calls(parts)]


def _calls(parts: Sequence[Any]) -> list[tuple[str, str]]:
    return [(part.name, canonical_arguments(part.arguments)) for part in parts if isinstance(part, ToolCall)]


def _thoughts(parts: Sequence[Any]) -> str:
    """Without the white space at the end, which is not told where a reply was cut."""
    return "".join(part.text for part in parts if isinstance(part, Thinking)).rstrip()


@dataclass(frozen=True, slots=True)
class _ContinuedReplies:
    """Replies that begin with what was said of one, each a new one beside it: nothing is overwritten."""

    state: ServerState
    chat: Chat
    model: Model
    conversation: Conversation
    begun: PartialReply
    key: str | None

    async def begin(self, said: Sequence[Message], wanted: Sequence[Mapping[str, Any]]) -> StoredRequest:
        parent, fresh = await _placed(self.chat, self.conversation, said, goes_on=True)
        known = await self._known(parent) if parent is not None and not fresh and self.begun.as_it_was else None
        beginnings = [await self._beginning(parent, fresh, parameters, known) for parameters in wanted]
        at = parent.id if parent is not None else None
        for message in fresh:
            at = (await self.chat.append(self.conversation.id, at, message)).id
        assert at is not None
        replies = []
        for place, beginning in reversed(list(enumerate(beginnings))):
            replies.append(await self._start(beginning, at, place))
        return StoredRequest(self.conversation.id, at, tuple(reply.id for reply in reversed(replies)))

    async def _known(self, parent: StoredMessage) -> StoredMessage | None:
        """The reply in the conversation that was left with these words."""
        nodes = await self.chat.nodes(self.conversation.id)
        said = self.begun.message.parts
        for node in reversed([node for node in nodes if node.parent_id == parent.id]):
            stored = await self.chat.message(node.id)
            left = stored.reply is not None and stored.reply.status not in (ReplyStatus.DONE, ReplyStatus.RUNNING)
            same = _words(stored.parts) == _words(said) and _thoughts(stored.parts) == _thoughts(said)
            if left and same and is_same_tokenizer(self.model, stored):
                return stored
        return None

    async def _beginning(
        self,
        parent: StoredMessage | None,
        fresh: Sequence[Message],
        parameters: Mapping[str, Any],
        known: StoredMessage | None,
    ) -> NewTurn:
        """Raises whatever makes the reply impossible, before anything is written."""
        if known is not None and known.reply is not None:
            parameters = {"seed": known.reply.settings.sampling.seed, **parameters}
        path = await self.chat.path(parent.id) if parent is not None else ()
        service = self.state.service
        asked = await asyncio.to_thread(
            service.requests.new, self.model, self.conversation, path, fresh, check_parameters(parameters)
        )
        ids = self.begun.said or ()
        if ids:
            ids = await asyncio.to_thread(check_token_ids, ids, self.model, asked.request)
        elif known is not None:
            ids = await asyncio.to_thread(service.store.replies.token_ids, known.id)
        begun = None if ids else self.begun.message
        prompt = await asyncio.to_thread(self.model.prompt, asked.request, ids, begun)
        sampling = offset_limits(asked.request.sampling, len(prompt.reply_ids))
        request, settings = replace(asked.request, sampling=sampling), replace(asked.settings, sampling=sampling)
        return NewTurn(self.conversation.id, None, request, settings, given_tokens(ids), begun=begun, prompt=prompt)

    async def _start(self, beginning: NewTurn, parent: str, place: int) -> StoredMessage:
        conversation = await self.chat.conversation(self.conversation.id)
        key = self.key if self.key is None or place == 0 else f"{self.key} {place}"
        placed = replace(beginning, parent_id=parent, key=key, expected_head=conversation.head_id)
        return await self.state.service.turns.begin(self.model, placed)
