"""Routes for messages and turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Body

from palaver.chat.interface import Chat, ReplyToken, SentMessage
from palaver.messages import Message, Part
from palaver.server.state import ChatDep, IdempotencyKeyDep, idempotency_key
from palaver.store import Blob, StoredMessage
from palaver.store.encoding import media_part
from palaver.wire import (
    AppendMessageRequest,
    ContinueReplyRequest,
    EditMessageRequest,
    ForkReplyRequest,
    MessageSchema,
    NewPart,
    RawReplySchema,
    SendMessageRequest,
    StartReplyRequest,
)

routes = APIRouter(tags=["messages"])


@routes.get("/messages/{id}")
async def message(id: str, chat: ChatDep) -> StoredMessage:
    return await chat.message(id)


@routes.get("/messages/{id}/path")
async def path(id: str, chat: ChatDep) -> list[StoredMessage]:
    """A branch: from the root to this message."""
    return list(await chat.path(id))


@routes.get("/messages/{id}/siblings")
async def siblings(id: str, chat: ChatDep) -> list[StoredMessage]:
    """The message and the others under the same parent, the oldest first."""
    return list(await chat.siblings(id))


@routes.post("/conversations/{id}/messages", status_code=201)
async def append(id: str, body: AppendMessageRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """Puts a message into the tree without asking for a reply."""
    message = await resolve_message(chat, body.message)
    return await chat.append_message(id, body.parent, message, key=idempotency_key(body.key, key))


@routes.post("/messages/{id}/edit", status_code=201)
async def edit(id: str, body: EditMessageRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """Another wording, as a sibling. An edited reply can be continued."""
    parts = await _resolve_parts(chat, body.parts)
    return await chat.edit_message(id, parts, key=idempotency_key(body.key, key))


async def resolve_message(chat: Chat, message: MessageSchema) -> Message:
    return Message(message.role, await _resolve_parts(chat, message.parts))


async def _resolve_parts(chat: Chat, parts: Iterable[NewPart]) -> tuple[Part, ...]:
    """Replaces blob references by their data, which must belong to the caller."""
    resolved: list[Part] = []
    for part in parts:
        if isinstance(part, Blob):
            resolved.append(media_part(part.kind, part.media_type, await chat.blob(part.digest)))
        else:
            resolved.append(part)
    return tuple(resolved)


turn_routes = APIRouter(tags=["turns"])


@turn_routes.post("/conversations/{id}/say", status_code=201)
async def say(id: str, body: SendMessageRequest, chat: ChatDep, key: IdempotencyKeyDep) -> SentMessage:
    """Puts a message into the tree, durably, and begins the reply to it."""
    message = await resolve_message(chat, body.message)
    once = idempotency_key(body.key, key)
    return await chat.send_message(id, body.parent, message, parameters=body.parameters, key=once)


@turn_routes.post("/conversations/{id}/replies", status_code=201)
async def reply(id: str, body: StartReplyRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """Begins a reply under a message: a retry is a second one under the same."""
    once = idempotency_key(body.key, key)
    return await chat.start_reply(id, body.parent, parameters=body.parameters, key=once)


ContinueBody = Annotated[ContinueReplyRequest | None, Body(title="Asked")]  # the published title


@turn_routes.post("/turns/{id}/continue")
async def go_on(id: str, chat: ChatDep, key: IdempotencyKeyDep, body: ContinueBody = None) -> StoredMessage:
    """Continues a reply that is not whole: the same message, or else a sibling that begins with all it said."""
    return await chat.continue_reply(id, key=idempotency_key(body.key if body is not None else None, key))


@turn_routes.post("/turns/{id}/fork", status_code=201)
async def fork(id: str, body: ForkReplyRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """A sibling that begins with the reply's first tokens, then `instead`, and goes on from there."""
    return await chat.fork_reply(id, body.tokens, body.instead, key=idempotency_key(body.key, key))


@turn_routes.post("/turns/{id}/stop", status_code=204)
async def stop(id: str, chat: ChatDep) -> None:
    """Keeps everything so far. A turn that is over stays so."""
    await chat.stop_reply(id)


@turn_routes.post("/turns/{id}/answer-now", status_code=204)
async def answer_now(id: str, chat: ChatDep) -> None:
    """Closes an open thought, so that the answer comes next."""
    await chat.answer_now(id)


@turn_routes.get("/turns/{id}/tokens")
async def tokens(id: str, chat: ChatDep) -> list[ReplyToken]:
    """Every token with its log-probability and the likeliest alternatives."""
    return list(await chat.tokens(id))


@turn_routes.get("/turns/{id}/raw")
async def raw(id: str, chat: ChatDep) -> RawReplySchema:
    return RawReplySchema(text=await chat.raw_text(id))
