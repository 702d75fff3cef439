"""Where each client stands in a conversation."""

from __future__ import annotations

from fastapi import APIRouter

from palaver.server.conversations.owned import Mine
from palaver.wire.conversations import Cursor
from palaver.wire.requests import Client, Move

routes = APIRouter(tags=["cursors"])


@routes.get("/conversations/{id}/cursor")
async def cursor(id: str, client: str, chat: Mine) -> Cursor:
    """Where the client stands; one that was never here stands where somebody was last."""
    return Cursor.of(await chat.cursor(id, client))


@routes.put("/conversations/{id}/cursor")
async def move(id: str, asked: Move, chat: Mine) -> Cursor:
    return Cursor.of(await chat.move(id, asked.client, asked.to))


@routes.post("/conversations/{id}/cursor/undo")
async def undo(id: str, asked: Client, chat: Mine) -> Cursor:
    """Back to where the client was before its last move."""
    return Cursor.of(await chat.undo(id, asked.client))


@routes.post("/conversations/{id}/cursor/redo")
async def redo(id: str, asked: Client, chat: Mine) -> Cursor:
    return Cursor.of(await chat.redo(id, asked.client))
