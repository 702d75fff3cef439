"""Turns: begun, stopped, gone on with, looked at. A turn is named by the id of its reply."""

from __future__ import annotations

from fastapi import APIRouter

from palaver.server.conversations.messages import whole_message
from palaver.server.conversations.owned import HeaderKey, Mine, one_key
from palaver.wire.conversations import Said, Stored
from palaver.wire.requests import Continue, Fork, Reply, Say
from palaver.wire.turns import Raw, Token

routes = APIRouter(tags=["turns"])


@routes.post("/conversations/{id}/say", status_code=201)
async def say(id: str, asked: Say, chat: Mine, key: HeaderKey) -> Said:
    """Puts a message into the tree, durably, and begins the reply to it."""
    message = await whole_message(chat, asked.message)
    once = one_key(asked.key, key)
    return Said.of(await chat.say(id, asked.parent, message, parameters=asked.parameters, key=once))


@routes.post("/conversations/{id}/replies", status_code=201)
async def reply(id: str, asked: Reply, chat: Mine, key: HeaderKey) -> Stored:
    """Begins a reply under a message: a retry is a second one under the same."""
    once = one_key(asked.key, key)
    return Stored.of(await chat.reply(id, asked.parent, parameters=asked.parameters, key=once))


@routes.post("/turns/{id}/continue")
async def go_on(id: str, chat: Mine, key: HeaderKey, asked: Continue | None = None) -> Stored:
    """Continues a reply that is not whole: the same message, or else a sibling that begins with all it said."""
    return Stored.of(await chat.go_on(id, key=one_key(asked.key if asked is not None else None, key)))


@routes.post("/turns/{id}/fork", status_code=201)
async def fork(id: str, asked: Fork, chat: Mine, key: HeaderKey) -> Stored:
    """A sibling that begins with the reply's first tokens, then `instead`, and goes on from there."""
    return Stored.of(await chat.fork(id, asked.tokens, asked.instead, key=one_key(asked.key, key)))


@routes.post("/turns/{id}/stop", status_code=204)
async def stop(id: str, chat: Mine) -> None:
    """Keeps everything so far. A turn that is over stays so."""
    await chat.stop(id)


@routes.post("/turns/{id}/answer-now", status_code=204)
async def answer_now(id: str, chat: Mine) -> None:
    """Closes an open thought, so that the answer comes next."""
    await chat.answer_now(id)


@routes.get("/turns/{id}/tokens")
async def tokens(id: str, chat: Mine) -> list[Token]:
    """Every token with its log-probability and the likeliest alternatives."""
    return [Token.of(token) for token in await chat.tokens(id)]


@routes.get("/turns/{id}/raw")
async def raw(id: str, chat: Mine) -> Raw:
    return Raw(text=await chat.raw(id))
