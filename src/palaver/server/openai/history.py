"""Matches the messages of a request with a stored conversation, and starts the replies there."""

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
from palaver.server.openai.request import check_token_ids, choice_count, request_parameters
from palaver.server.openai.schemas import ChatRequest
from palaver.server.state import ServerState
from palaver.store import Conflict, Conversation, ReplyStatus, StoredMessage
from palaver.store.token_codec import prefill_steps

NEW = "new"
_NOT_RESUMABLE = (ReplyStatus.DONE, ReplyStatus.RUNNING)


@dataclass(frozen=True, slots=True)
class PartialReply:
    """A reply to continue, as the client sent it."""

    message: Message
    token_ids: tuple[int, ...] | None = None
    """Its token ids, if they were sent."""
    reuse_stored: bool = True
    """Whether the token ids of a stored reply with the same text may be used."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The ids of the conversation, the last message and the replies of one request."""

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


async def start_replies(
    chat: Chat,
    model: Model,
    parameters: Sequence[dict[str, Any]],
    messages: Sequence[Message],
    name: str,
    state: ServerState,
    key: str | None,
    partial: PartialReply | None = None,
) -> StoredRequest:
    """Stores the new messages and starts the replies: one for each of the `parameters`."""
    system = "\n\n".join(message.text for message in messages if message.role is Role.SYSTEM)
    turns = [message for message in messages if message.role is not Role.SYSTEM]
    if not turns:
        raise NoMessages
    if turns[-1].role is Role.ASSISTANT:
        raise BadParameter("messages", "assistant", "the last message is a reply already: there is nothing to answer")
    conversation = await _conversation(chat, name, system)
    if partial is not None:
        return await _ContinuedReplies(state, chat, model, conversation, partial, key).start(turns, parameters)
    parent, new = await _match_history(chat, conversation, turns)
    *others, first = parameters[::-1]
    message, replies = await _append_and_reply(chat, conversation, parent, new, others[0] if others else first, key)
    for index, one in enumerate([*others[1:], first] if others else []):
        reply_key = None if key is None else f"{key} {index}"
        replies.append(await chat.start_reply(conversation.id, message, parameters=one, key=reply_key))
    return StoredRequest(conversation.id, message, tuple(reply.id for reply in reversed(replies)))


def choice_parameters(body: ChatRequest, model: Model, state: ServerState) -> list[dict[str, Any]]:
    """The parameters of each choice. The first choice is started last, so that it becomes the head."""
    parameters = request_parameters(body, state.settings, model.format)
    count = choice_count(body.n, state.settings)
    if count == 1:
        return [parameters]
    seed = parameters.get("seed", draw_seed())
    return [{**parameters, "seed": seed, "choice": choice} for choice in range(count)]


async def _append_and_reply(
    chat: Chat,
    conversation: Conversation,
    parent: StoredMessage | None,
    new: Sequence[Message],
    parameters: Mapping[str, Any],
    key: str | None,
) -> tuple[str, list[StoredMessage]]:
    if not new:
        assert parent is not None
        return parent.id, [await chat.start_reply(conversation.id, parent.id, parameters=parameters, key=key)]
    at = parent.id if parent is not None else None
    for message in new[:-1]:
        at = (await chat.append_message(conversation.id, at, message)).id
    turn = await chat.send_message(conversation.id, at, new[-1], parameters=parameters, key=key)
    return turn.message.id, [turn.reply]


async def _conversation(chat: Chat, name: str, system: str) -> Conversation:
    if name == NEW:
        return await chat.create_conversation(system=system)
    found = await chat.conversation(name)
    if system and system != found.system:
        if found.head_id is not None:
            raise Conflict("The conversation has another system prompt: change it there, or leave it out here.")
        found = await chat.update_conversation(found.id, system=system)
    return found


async def _match_history(
    chat: Chat, conversation: Conversation, turns: Sequence[Message], continued: bool = False
) -> tuple[StoredMessage | None, Sequence[Message]]:
    """The stored message that the first new one follows, and the new ones."""
    nodes = await chat.nodes(conversation.id)
    if not nodes:
        return None, turns
    if len(turns) == 1:
        leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
        last = await chat.message(leaf) if leaf else None
        if not continued:
            return last, turns
        if (question := await _last_question(chat, last, turns[0])) is not None:
            return question, ()
    children: dict[str | None, list[str]] = {}
    for node in nodes:
        children.setdefault(node.parent_id, []).append(node.id)
    at: StoredMessage | None = None
    for index, message in enumerate(turns):
        child = await _matching_child(chat, children.get(at.id if at else None, ()), message)
        if child is None:
            return at, turns[index:]
        at = child
    return at, ()


async def _last_question(chat: Chat, last: StoredMessage | None, message: Message) -> StoredMessage | None:
    """The last message, or the one that it answers, if it equals `message`."""
    if last is not None and last.role is Role.ASSISTANT and last.parent_id is not None:
        last = await chat.message(last.parent_id)
    same = last is not None and last.role is message.role and _content(last.parts) == _content(message.parts)
    return last if same else None


async def _matching_child(chat: Chat, ids: Sequence[str], message: Message) -> StoredMessage | None:
    """The newest of these messages with the same content."""
    for id in reversed(ids):
        stored = await chat.message(id)
        if stored.role is message.role and _content(stored.parts) == _content(message.parts):
            return stored
    return None


def _content(parts: Sequence[Any]) -> list[Any]:
    """What messages are compared by. Thinking does not count, because clients leave it out."""
    texts = "".join(part.text for part in parts if isinstance(part, Text))
    return [texts, *(part for part in parts if not isinstance(part, Text | Thinking | ToolCall)), *_calls(parts)]


def _calls(parts: Sequence[Any]) -> list[tuple[str, str]]:
    return [(part.name, canonical_arguments(part.arguments)) for part in parts if isinstance(part, ToolCall)]


def _thinking(parts: Sequence[Any]) -> str:
    """Without trailing white space, which is not sent where a reply was cut."""
    return "".join(part.text for part in parts if isinstance(part, Thinking)).rstrip()


@dataclass(frozen=True, slots=True)
class _ContinuedReplies:
    """Replies that continue a partial one. Each is a new message beside it: nothing is overwritten."""

    state: ServerState
    chat: Chat
    model: Model
    conversation: Conversation
    partial: PartialReply
    key: str | None

    async def start(self, turns: Sequence[Message], parameters: Sequence[Mapping[str, Any]]) -> StoredRequest:
        parent, new = await _match_history(self.chat, self.conversation, turns, continued=True)
        reuse = parent is not None and not new and self.partial.reuse_stored
        stored = await self._stored_reply(parent) if parent is not None and reuse else None
        new_turns = [await self._new_turn(parent, new, one, stored) for one in parameters]
        at = parent.id if parent is not None else None
        for message in new:
            at = (await self.chat.append_message(self.conversation.id, at, message)).id
        assert at is not None
        replies = []
        for index, turn in reversed(list(enumerate(new_turns))):
            replies.append(await self._start(turn, at, index))
        return StoredRequest(self.conversation.id, at, tuple(reply.id for reply in reversed(replies)))

    async def _stored_reply(self, parent: StoredMessage) -> StoredMessage | None:
        """The unfinished reply in the conversation with the same content."""
        nodes = await self.chat.nodes(self.conversation.id)
        parts = self.partial.message.parts
        for node in reversed([node for node in nodes if node.parent_id == parent.id]):
            stored = await self.chat.message(node.id)
            unfinished = stored.reply is not None and stored.reply.status not in _NOT_RESUMABLE
            same = _content(stored.parts) == _content(parts) and _thinking(stored.parts) == _thinking(parts)
            if unfinished and same and is_same_tokenizer(self.model, stored):
                return stored
        return None

    async def _new_turn(
        self,
        parent: StoredMessage | None,
        new: Sequence[Message],
        parameters: Mapping[str, Any],
        stored: StoredMessage | None,
    ) -> NewTurn:
        """Raises every error that makes the reply impossible, before anything is written."""
        if stored is not None and stored.reply is not None:
            parameters = {"seed": stored.reply.settings.sampling.seed, **parameters}
        path = await self.chat.path(parent.id) if parent is not None else ()
        service = self.state.service
        new_reply = await asyncio.to_thread(
            service.requests.build, self.model, self.conversation, path, new, check_parameters(parameters)
        )
        ids = self.partial.token_ids or ()
        if ids:
            ids = await asyncio.to_thread(check_token_ids, ids, self.model, new_reply.request)
        elif stored is not None:
            ids = await asyncio.to_thread(service.store.replies.token_ids, stored.id)
        partial = None if ids else self.partial.message
        prompt = await asyncio.to_thread(self.model.prompt, new_reply.request, ids, partial)
        sampling = offset_limits(new_reply.request.sampling, len(prompt.reply_ids))
        request, settings = (
            replace(new_reply.request, sampling=sampling),
            replace(new_reply.settings, sampling=sampling),
        )
        return NewTurn(
            self.conversation.id, None, request, settings, prefill_steps(ids), partial_reply=partial, prompt=prompt
        )

    async def _start(self, turn: NewTurn, parent: str, index: int) -> StoredMessage:
        conversation = await self.chat.conversation(self.conversation.id)
        key = self.key if self.key is None or index == 0 else f"{self.key} {index}"
        placed = replace(turn, parent_id=parent, key=key, expected_head=conversation.head_id)
        return await self.state.service.turns.start(self.model, placed)
