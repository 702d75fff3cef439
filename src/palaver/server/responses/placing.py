"""Where a stored response belongs: behind the response before it, where a conversation was left, or in a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.parameters import check_parameters
from palaver.chat.service import Service
from palaver.chat.turns import NewTurn
from palaver.errors import NoMessages
from palaver.messages import Message, Role
from palaver.server.errors import NoPreviousResponse
from palaver.server.responses.branches import Branches
from palaver.server.responses.fields import ConversationName, ResponseRequest
from palaver.server.responses.items import parted
from palaver.server.responses.kept import Kept, found, kept, response_id
from palaver.store import Conflict, Conversation, NotFound, ReplyStatus, StoredMessage


@dataclass(frozen=True, slots=True)
class Place:
    conversation: Conversation | None
    """None: one that is to be made."""
    path: tuple[StoredMessage, ...]
    """The branch that the messages hang on."""
    messages: tuple[Message, ...]
    system: str
    """The system prompt of this response."""
    known: Kept


async def placed(
    chat: Chat, body: ResponseRequest, messages: Sequence[Message], known: Kept, branches: Branches, owner: str
) -> Place:
    if all(message.role is Role.SYSTEM for message in messages):
        raise NoMessages
    if body.previous_response_id is not None:
        return await _behind(chat, body.previous_response_id, messages, known)
    if body.conversation is not None:
        return await _left(chat, body.conversation, messages, known)
    developer, said = parted(messages)
    known = known.model_copy(update={"developer": developer, "inputs": len(said)})
    system = _joined(known.instructions or "", developer)
    path = await _said_before(chat, branches.find(owner, said))
    if not path:
        return Place(None, (), said, system, known)
    return Place(await chat.conversation(path[-1].conversation_id), path, said[len(path) :], system, known)


async def begin(
    service: Service, chat: Chat, model: Model, owner: str, place: Place, parameters: Mapping[str, Any], key: str | None
) -> StoredMessage:
    """The messages, durably, and the reply to them. What can't be answered is refused before anything is written."""
    wanted = {**parameters, "system": place.system, "note": place.known.note()}
    home = place.conversation or _not_made(owner, place.system)
    asked = await asyncio.to_thread(
        service.requests.new, model, home, place.path, place.messages, check_parameters(wanted)
    )
    conversation = place.conversation or await chat.create(system=place.system, key=key)
    at = place.path[-1].id if place.path else None
    for number, message in enumerate(place.messages):
        at = (await chat.append(conversation.id, at, message, key=_key(key, str(number)))).id
    request = replace(asked.request, conversation=conversation.id)
    beginning = NewTurn(conversation.id, at, request, asked.settings, key=_key(key, "reply"), prompt=asked.prompt)
    return await service.turns.begin(model, beginning)


async def _behind(chat: Chat, id: str, messages: Sequence[Message], known: Kept) -> Place:
    try:
        reply = await found(chat, id)
    except NotFound:
        raise NoPreviousResponse(id) from None
    _check_over(reply)
    conversation, path = await chat.conversation(reply.conversation_id), await chat.path(reply.id)
    known = known.model_copy(update={"previous": id, "inputs": len(messages)})
    system = known.instructions if known.instructions is not None else _carried(conversation, path)
    return Place(conversation, path, tuple(messages), system, known)


async def _left(chat: Chat, name: str | ConversationName, messages: Sequence[Message], known: Kept) -> Place:
    conversation = await chat.conversation(name if isinstance(name, str) else name.id)
    leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
    path = await chat.path(leaf) if leaf is not None else ()
    if path:
        _check_over(path[-1])
    system = known.instructions if known.instructions is not None else conversation.system
    known = known.model_copy(update={"inputs": len(messages)})
    return Place(conversation, path, tuple(messages), system, known)


async def _said_before(chat: Chat, known: Iterable[tuple[str, int]]) -> tuple[StoredMessage, ...]:
    """The branch that the input repeats, as much of it as is still there."""
    for reply, count in known:
        with suppress(NotFound):
            path = await chat.path((await found(chat, response_id(reply))).id)
            if len(path) == count:
                return path
    return ()


def _check_over(reply: StoredMessage) -> None:
    if reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING:
        raise Conflict("The response before this one is still running: wait for it, or cancel it first.")


def _carried(conversation: Conversation, path: Sequence[StoredMessage]) -> str:
    """A response's instructions are its own: of a system prompt that they were a part of only the rest goes on."""
    for known in map(kept, path):
        if known.instructions and conversation.system == _joined(known.instructions, known.developer):
            return known.developer
    return conversation.system


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _key(key: str | None, what: str) -> str | None:
    return None if key is None else f"{key} {what}"


def _not_made(owner: str, system: str) -> Conversation:
    """The conversation as it will be, to see whether its first message can be answered."""
    now = datetime.now(UTC)
    return Conversation("", owner, "", False, system, {}, (), None, now, now)
