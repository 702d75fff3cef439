"""Conversations: made, listed, changed, deleted, found."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from palaver.server.conversations.dependencies import HeaderKey, Mine, idempotency_key
from palaver.wire.conversations import Conversation, Cursor, Hit, Leaf, Node, Preset
from palaver.wire.requests import ChangeConversation, Client, Create, DeletePreset, MeasureContext, Move, SavePreset
from palaver.wire.turns import Gauge

routes = APIRouter(tags=["conversations"])
Limit = Annotated[int, Query(ge=1, le=1000)]


@routes.post("/conversations", status_code=201)
async def create(asked: Create, chat: Mine, key: HeaderKey) -> Conversation:
    made = await chat.create(
        title=asked.title,
        system=asked.system,
        parameters=asked.parameters,
        tags=asked.tags,
        key=idempotency_key(asked.key, key),
    )
    return Conversation.of(made)


@routes.get("/conversations")
async def conversations(
    chat: Mine,
    limit: Limit = 50,
    before: str | None = None,
    tag: str | None = None,
    title: str = "",
    deleted: bool = False,
) -> list[Conversation]:
    """The newest first; `before` is the id of the last one of the page before."""
    found = await chat.conversations(limit=limit, before=before, tag=tag, title=title, deleted=deleted)
    return [Conversation.of(one) for one in found]


@routes.get("/conversations/{id}")
async def conversation(id: str, chat: Mine) -> Conversation:
    return Conversation.of(await chat.conversation(id))


@routes.patch("/conversations/{id}")
async def change(id: str, asked: ChangeConversation, chat: Mine) -> Conversation:
    """Sets what is given. The parameters are set as a whole."""
    changed = await chat.change(
        id, title=asked.title, system=asked.system, parameters=asked.parameters, tags=asked.tags
    )
    return Conversation.of(changed)


@routes.delete("/conversations/{id}", status_code=204)
async def delete(id: str, chat: Mine) -> None:
    """Out of sight; `undelete` brings it back."""
    await chat.delete(id)


@routes.post("/conversations/{id}/undelete")
async def undelete(id: str, chat: Mine) -> Conversation:
    return Conversation.of(await chat.undelete(id))


@routes.post("/conversations/{id}/forget", status_code=204)
async def forget(id: str, chat: Mine) -> None:
    """Frees what the model keeps of it to go on quickly. The conversation stays; its next turn is computed anew."""
    await chat.forget(id)


@routes.get("/conversations/{id}/nodes")
async def nodes(id: str, chat: Mine) -> list[Node]:
    """The shape of the whole tree, every parent before its children."""
    return [Node.of(node) for node in await chat.nodes(id)]


@routes.get("/conversations/{id}/newest-leaf")
async def newest_leaf(id: str, chat: Mine, start: str | None = None) -> Leaf:
    """Where a switch to the branch of `start` leads: its end that was written to last."""
    return Leaf(id=await chat.newest_leaf(id, start))


@routes.post("/conversations/{id}/gauge")
async def gauge(id: str, asked: MeasureContext, chat: Mine) -> Gauge:
    """How full the context would be if the conversation went on behind `leaf`."""
    return Gauge.of(await chat.gauge(id, asked.leaf, asked.parameters))


@routes.get("/tags")
async def tags(chat: Mine) -> list[str]:
    return list(await chat.tags())


@routes.get("/search")
async def search(query: str, chat: Mine, limit: Limit = 20) -> list[Hit]:
    """Messages that hold every term, the newest first. Terms are beginnings of words, or phrases "in quotes"."""
    return [Hit.of(hit) for hit in await chat.search(query, limit)]


cursor_routes = APIRouter(tags=["cursors"])


@cursor_routes.get("/conversations/{id}/cursor")
async def cursor(id: str, client: str, chat: Mine) -> Cursor:
    """Where the client stands; one that was never here stands where somebody was last."""
    return Cursor.of(await chat.cursor(id, client))


@cursor_routes.put("/conversations/{id}/cursor")
async def move(id: str, asked: Move, chat: Mine) -> Cursor:
    return Cursor.of(await chat.move(id, asked.client, asked.to))


@cursor_routes.post("/conversations/{id}/cursor/undo")
async def undo(id: str, asked: Client, chat: Mine) -> Cursor:
    """Back to where the client was before its last move."""
    return Cursor.of(await chat.undo(id, asked.client))


@cursor_routes.post("/conversations/{id}/cursor/redo")
async def redo(id: str, asked: Client, chat: Mine) -> Cursor:
    return Cursor.of(await chat.redo(id, asked.client))


preset_routes = APIRouter(tags=["presets"])


@preset_routes.get("/presets")
async def presets(chat: Mine) -> list[Preset]:
    """By name."""
    return [Preset.of(preset) for preset in await chat.presets()]


@preset_routes.put("/presets")
async def save(asked: SavePreset, chat: Mine) -> Preset:
    """In place of one of that name."""
    return Preset.of(await chat.save_preset(asked.name, asked.system, asked.parameters))


@preset_routes.post("/presets/delete", status_code=204)
async def delete_preset(asked: DeletePreset, chat: Mine) -> None:
    """A name may hold anything, so it is no part of a path."""
    await chat.delete_preset(asked.name)
