"""Routes for conversations, their cursors, and presets."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from palaver.chat.interface import ContextUsage
from palaver.server.state import ChatDep, IdempotencyKeyDep, idempotency_key
from palaver.store import Conversation, Cursor, Preset, SearchHit, TreeNode
from palaver.wire import (
    ContextUsageRequest,
    CreateConversationRequest,
    CursorRequest,
    DeletePresetRequest,
    LeafSchema,
    MoveCursorRequest,
    SavePresetRequest,
    UpdateConversationRequest,
)

routes = APIRouter(tags=["conversations"])
Limit = Annotated[int, Query(ge=1, le=1000)]


@routes.post("/conversations", status_code=201)
async def create(body: CreateConversationRequest, chat: ChatDep, key: IdempotencyKeyDep) -> Conversation:
    return await chat.create_conversation(
        title=body.title,
        system=body.system,
        parameters=body.parameters,
        tags=body.tags,
        key=idempotency_key(body.key, key),
    )


@routes.get("/conversations")
async def conversations(
    chat: ChatDep,
    limit: Limit = 50,
    before: str | None = None,
    tag: str | None = None,
    title: str = "",
    deleted: bool = False,
) -> list[Conversation]:
    """The newest first; `before` is the id of the last one of the page before."""
    page = await chat.conversations(limit=limit, before=before, tag=tag, title=title, deleted=deleted)
    return list(page)


@routes.get("/conversations/{id}")
async def conversation(id: str, chat: ChatDep) -> Conversation:
    return await chat.conversation(id)


@routes.patch("/conversations/{id}")
async def change(id: str, body: UpdateConversationRequest, chat: ChatDep) -> Conversation:
    """Sets what is given. The parameters are set as a whole."""
    return await chat.update_conversation(
        id, title=body.title, system=body.system, parameters=body.parameters, tags=body.tags
    )


@routes.delete("/conversations/{id}", status_code=204)
async def delete(id: str, chat: ChatDep) -> None:
    """Out of sight; `undelete` brings it back."""
    await chat.delete_conversation(id)


@routes.post("/conversations/{id}/undelete")
async def undelete(id: str, chat: ChatDep) -> Conversation:
    return await chat.restore_conversation(id)


@routes.post("/conversations/{id}/forget", status_code=204)
async def forget(id: str, chat: ChatDep) -> None:
    """Frees what the model keeps of it to go on quickly. The conversation stays; its next turn is computed anew."""
    await chat.clear_cache(id)


@routes.get("/conversations/{id}/nodes")
async def nodes(id: str, chat: ChatDep) -> list[TreeNode]:
    """The shape of the whole tree, every parent before its children."""
    return list(await chat.nodes(id))


@routes.get("/conversations/{id}/newest-leaf")
async def newest_leaf(id: str, chat: ChatDep, start: str | None = None) -> LeafSchema:
    """Where a switch to the branch of `start` leads: its end that was written to last."""
    return LeafSchema(id=await chat.newest_leaf(id, start))


@routes.post("/conversations/{id}/gauge")
async def gauge(id: str, body: ContextUsageRequest, chat: ChatDep) -> ContextUsage:
    """How full the context would be if the conversation went on behind `leaf`."""
    return await chat.context_usage(id, body.leaf, body.parameters)


@routes.get("/tags")
async def tags(chat: ChatDep) -> list[str]:
    return list(await chat.tags())


@routes.get("/search")
async def search(query: str, chat: ChatDep, limit: Limit = 20) -> list[SearchHit]:
    """Messages that hold every term, the newest first. Terms are beginnings of words, or phrases "in quotes"."""
    return list(await chat.search(query, limit))


cursor_routes = APIRouter(tags=["cursors"])


@cursor_routes.get("/conversations/{id}/cursor")
async def cursor(id: str, client: str, chat: ChatDep) -> Cursor:
    """Where the client stands; one that was never here stands where somebody was last."""
    return await chat.cursor(id, client)


@cursor_routes.put("/conversations/{id}/cursor")
async def move(id: str, body: MoveCursorRequest, chat: ChatDep) -> Cursor:
    return await chat.move_cursor(id, body.client, body.to)


@cursor_routes.post("/conversations/{id}/cursor/undo")
async def undo(id: str, body: CursorRequest, chat: ChatDep) -> Cursor:
    """Back to where the client was before its last move."""
    return await chat.undo(id, body.client)


@cursor_routes.post("/conversations/{id}/cursor/redo")
async def redo(id: str, body: CursorRequest, chat: ChatDep) -> Cursor:
    return await chat.redo(id, body.client)


preset_routes = APIRouter(tags=["presets"])


@preset_routes.get("/presets")
async def presets(chat: ChatDep) -> list[Preset]:
    """By name."""
    return list(await chat.presets())


@preset_routes.put("/presets")
async def save(body: SavePresetRequest, chat: ChatDep) -> Preset:
    """In place of one of that name."""
    return await chat.save_preset(body.name, body.system, body.parameters)


@preset_routes.post("/presets/delete", status_code=204, summary="Delete", operation_id="delete_api_presets_delete_post")
async def delete_preset(body: DeletePresetRequest, chat: ChatDep) -> None:
    """A name may hold anything, so it is no part of a path."""
    await chat.delete_preset(body.name)
