"""Messages in the tree."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter

from palaver.chat.interface import Chat
from palaver.messages import Message, Part
from palaver.server.conversations.dependencies import HeaderKey, Mine, idempotency_key
from palaver.store import Blob
from palaver.wire import messages as wire
from palaver.wire.conversations import Said, Stored
from palaver.wire.requests import Append, Continue, Edit, Fork, Reply, Say
from palaver.wire.turns import Raw, Token

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
    said = await resolve_message(chat, asked.message)
    return Stored.of(await chat.append(id, asked.parent, said, key=idempotency_key(asked.key, key)))


@routes.post("/messages/{id}/edit", status_code=201)
async def edit(id: str, asked: Edit, chat: Mine, key: HeaderKey) -> Stored:
    """Another wording, as a sibling. An edited reply can be continued."""
    parts = await _whole(chat, asked.parts)
    return Stored.of(await chat.edit(id, parts, key=idempotency_key(asked.key, key)))


async def resolve_message(chat: Chat, told: wire.Message) -> Message:
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


turn_routes = APIRouter(tags=["turns"])


@turn_routes.post("/conversations/{id}/say", status_code=201)
async def say(id: str, asked: Say, chat: Mine, key: HeaderKey) -> Said:
    """Puts a message into the tree, durably, and begins the reply to it."""
    message = await resolve_message(chat, asked.message)
    once = idempotency_key(asked.key, key)
    return Said.of(await chat.say(id, asked.parent, message, parameters=asked.parameters, key=once))


@turn_routes.post("/conversations/{id}/replies", status_code=201)
async def reply(id: str, asked: Reply, chat: Mine, key: HeaderKey) -> Stored:
    """Begins a reply under a message: a retry is a second one under the same."""
    once = idempotency_key(asked.key, key)
    return Stored.of(await chat.reply(id, asked.parent, parameters=asked.parameters, key=once))


@turn_routes.post("/turns/{id}/continue")
async def go_on(id: str, chat: Mine, key: HeaderKey, asked: Continue | None = None) -> Stored:
    """Continues a reply that is not whole: the same message, or else a sibling that begins with all it said."""
    return Stored.of(await chat.go_on(id, key=idempotency_key(asked.key if asked is not None else None, key)))


@turn_routes.post("/turns/{id}/fork", status_code=201)
async def fork(id: str, asked: Fork, chat: Mine, key: HeaderKey) -> Stored:
    """A sibling that begins with the reply's first tokens, then `instead`, and goes on from there."""
    return Stored.of(await chat.fork(id, asked.tokens, asked.instead, key=idempotency_key(asked.key, key)))


@turn_routes.post("/turns/{id}/stop", status_code=204)
async def stop(id: str, chat: Mine) -> None:
    """Keeps everything so far. A turn that is over stays so."""
    await chat.stop(id)


@turn_routes.post("/turns/{id}/answer-now", status_code=204)
async def answer_now(id: str, chat: Mine) -> None:
    """Closes an open thought, so that the answer comes next."""
    await chat.answer_now(id)


@turn_routes.get("/turns/{id}/tokens")
async def tokens(id: str, chat: Mine) -> list[Token]:
    """Every token with its log-probability and the likeliest alternatives."""
    return [Token.of(token) for token in await chat.tokens(id)]


@turn_routes.get("/turns/{id}/raw")
async def raw(id: str, chat: Mine) -> Raw:
    return Raw(text=await chat.raw(id))
