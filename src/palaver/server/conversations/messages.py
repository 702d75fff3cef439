"""Messages in the tree."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter

from palaver.chat.interface import Chat
from palaver.messages import Message, Part
from palaver.server.conversations.owned import HeaderKey, Mine, one_key
from palaver.store import Blob
from palaver.wire import messages as wire
from palaver.wire.conversations import Stored
from palaver.wire.requests import Append, Edit

routes = APIRouter(tags=["messages"])


@routes.get("/messages/{id}")
async def message(id: str, chat: Mine) -> Stored:
    return Stored.of(await chat.message(id))


@routes.get("/messages/{id}/path")
async def path(id: str, chat: Mine) -> list[Stored]:
    """A branch: from the root to this message."""
    return [Stored.of(one) for one in await chat.path(id)]


@routes.get("/messages/{id}/siblings")
async def siblings(id: str, chat: Mine) -> list[Stored]:
    """The message and the others under the same parent, the oldest first."""
    return [Stored.of(one) for one in await chat.siblings(id)]


@routes.post("/conversations/{id}/messages", status_code=201)
async def append(id: str, asked: Append, chat: Mine, key: HeaderKey) -> Stored:
    """Puts a message into the tree without asking for a reply."""
    said = await whole_message(chat, asked.message)
    return Stored.of(await chat.append(id, asked.parent, said, key=one_key(asked.key, key)))


@routes.post("/messages/{id}/edit", status_code=201)
async def edit(id: str, asked: Edit, chat: Mine, key: HeaderKey) -> Stored:
    """Another wording, as a sibling. An edited reply can be continued."""
    parts = await _whole(chat, asked.parts)
    return Stored.of(await chat.edit(id, parts, key=one_key(asked.key, key)))


async def whole_message(chat: Chat, told: wire.Message) -> Message:
    return Message(told.role, await _whole(chat, told.parts))


async def _whole(chat: Chat, parts: Iterable[wire.AnyPart]) -> tuple[Part, ...]:
    """Media that are named by their digest are read: the caller must be able to."""
    whole: list[Part] = []
    for part in map(wire.part_value, parts):
        if isinstance(part, Blob):
            whole.append(wire.media(part.kind, part.media_type, await chat.blob(part.digest)))
        else:
            whole.append(part)
    return tuple(whole)
