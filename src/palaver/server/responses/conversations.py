"""OpenAI's Conversations API: a view of our conversations, beside Responses.

A conversation's items are those of the branch where it continues. Its tree keeps everything: items are appended, and
without a deleted one the conversation continues in another branch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from palaver.chat.interface import ServerChat
from palaver.errors import BadParameter
from palaver.messages import Message, Role, Text, Thinking, ToolCall, ToolResult
from palaver.server.openai.request import parse_history
from palaver.server.openai.schemas import ChatRequest, RequestFields
from palaver.server.responses.encoder import message_items
from palaver.server.responses.history import split_system
from palaver.server.responses.request import check_metadata, convert_input, load_items, media_bytes, resolve_references
from palaver.server.responses.schemas import Includable, InputItem, InputItemList
from palaver.server.state import ChatDep, ServerState, StateDep
from palaver.store import Conflict, Conversation, NotFound, StoredMessage
from palaver.store.encoding import blob_digests

MAX_ITEMS = 100
_NOTE = "conversation"
"""The entry of a conversation's note that has its metadata."""


class CreateItemsRequest(RequestFields):
    items: list[InputItem] = Field(description="Messages, thoughts, calls and their results, to append.")


class CreateConversationBody(RequestFields):
    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None


class UpdateConversationBody(RequestFields):
    metadata: dict[str, str] | None = Field(description="Replaces the metadata.")


class ConversationResource(BaseModel):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


Include = Annotated[list[Includable] | None, Query()]
BracketedInclude = Annotated[list[Includable] | None, Query(alias="include[]")]


def router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/conversations")
    async def create_conversation(chat: ChatDep, state: StateDep, body: CreateConversationBody) -> ConversationResource:
        """A conversation with its first items. System messages at the beginning are its system prompt."""
        metadata = check_metadata(body.metadata)
        system, messages = split_system(await _messages(chat, state, body.items) if body.items else ())
        parameters = {"note": {_NOTE: {"metadata": metadata}}} if metadata else {}
        conversation = await chat.create_conversation(system=system, parameters=parameters)
        await _append(chat, conversation, messages)
        return _resource(conversation)

    @routes.get("/v1/conversations/{id}")
    async def retrieve_conversation(id: str, chat: ChatDep) -> ConversationResource:
        return _resource(await chat.conversation(id))

    @routes.post("/v1/conversations/{id}")
    async def update_conversation(id: str, body: UpdateConversationBody, chat: ChatDep) -> ConversationResource:
        conversation = await chat.conversation(id)
        note = {**_note(conversation), _NOTE: {"metadata": check_metadata(body.metadata)}}
        parameters = {**conversation.parameters, "note": note}
        return _resource(await chat.update_conversation(id, parameters=parameters))

    @routes.delete("/v1/conversations/{id}")
    async def delete_conversation(id: str, chat: ChatDep) -> ConversationDeleted:
        """Deletes the conversation, for all APIs."""
        await chat.delete_conversation(id)
        return ConversationDeleted(id=id)

    @routes.get("/v1/conversations/{id}/items")
    async def list_items(
        id: str,
        chat: ChatDep,
        state: StateDep,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        include: Include = None,
        bracketed: BracketedInclude = None,
    ) -> InputItemList:
        """The items of the branch where the conversation continues. A page ends early before it has too many media."""
        branch = await _branch(chat, await chat.conversation(id))
        items = _items(branch)
        page = page_items(items if order == "asc" else items[::-1], after, limit)
        return await _with_media(chat, page, branch, state.settings.limits.body_bytes)

    @routes.post("/v1/conversations/{id}/items")
    async def create_items(
        id: str,
        body: CreateItemsRequest,
        chat: ChatDep,
        state: StateDep,
        include: Include = None,
        bracketed: BracketedInclude = None,
    ) -> InputItemList:
        """Appends items, without a reply."""
        conversation = await chat.conversation(id)
        stored = await _append(chat, conversation, await _messages(chat, state, body.items))
        page = page_items(_items(stored), None, MAX_ITEMS)
        # all of them: the media came in one body, and those of references are limited, too
        return await _with_media(chat, page, stored, 2 * state.settings.limits.body_bytes)

    @routes.get("/v1/conversations/{id}/items/{item_id}")
    async def retrieve_item(
        id: str, item_id: str, chat: ChatDep, include: Include = None, bracketed: BracketedInclude = None
    ) -> dict[str, Any]:
        messages = await chat.all_messages(id)
        found = [item for item in _items(messages) if item["id"] == item_id]
        if not found:
            raise NotFound("item", item_id[:200])
        return (await _with_media(chat, page_items(found, None, 1), messages, 0)).data[0]

    @routes.delete("/v1/conversations/{id}/items/{item_id}")
    async def delete_item(id: str, item_id: str, chat: ChatDep) -> ConversationResource:
        """The conversation continues in a branch without the item. Items after it are in that branch under new ids."""
        conversation = await chat.conversation(id)
        branch = await _branch(chat, conversation)
        place, part = _find_item(branch, item_id)
        rest = list(await chat.load_messages(branch[place:]))
        kept = tuple(one for index, one in enumerate(rest[0].parts) if part is not None and index != part)
        rest[:1] = [Message(rest[0].role, kept)] if kept else []
        parent = branch[place - 1].id if place else None
        if parent is None and not rest:
            raise Conflict("This is the only item: delete the conversation instead.")
        for message in rest:
            parent = (await chat.append_message(id, parent, message)).id
        await chat.move_cursor(id, _NOTE, parent)
        return _resource(await chat.conversation(id))

    return routes


def _find_item(branch: Sequence[StoredMessage], item_id: str) -> tuple[int, int | None]:
    """The index of the item's message, and of its part there; None if the item is the whole message."""
    for place, message in enumerate(branch):
        items = _item_ids(message)
        if item_id not in items:
            continue
        kinds = {Role.ASSISTANT: (Thinking, Text, ToolCall), Role.TOOL: (ToolResult,)}.get(message.role)
        if kinds is None:
            return place, None
        parts = [index for index, part in enumerate(message.parts) if isinstance(part, kinds)]
        return place, parts[items.index(item_id)]
    raise NotFound("item", item_id[:200])


def page_items(items: list[dict[str, Any]], after: str | None, limit: int) -> InputItemList:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise BadParameter("after", after[:80], "there is no such item")
    rest = items[ids.index(after) + 1 :] if after is not None else items
    page = rest[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList(data=page, first_id=first, last_id=last, has_more=len(rest) > limit)


async def _messages(chat: ServerChat, state: ServerState, items: Sequence[InputItem]) -> tuple[Message, ...]:
    try:
        limits = state.settings.limits
        converted = convert_input(await resolve_references(chat, items, limits.body_bytes))
        request = ChatRequest.model_validate({"messages": converted.messages, "continue_final_message": False})
        attachments = state.attachments()
        places = [place.replace("input", "items", 1) for place in converted.places]
        return (await asyncio.to_thread(parse_history, request, limits.messages, attachments, places)).messages
    except BadParameter as error:
        raise BadParameter(error.name.replace("input[", "items[", 1), error.value, error.why) from None


async def _append(
    chat: ServerChat, conversation: Conversation, messages: Sequence[Message]
) -> tuple[StoredMessage, ...]:
    branch = await _branch(chat, conversation)
    parent = branch[-1].id if branch else None
    stored: list[StoredMessage] = []
    for message in messages:
        stored.append(await chat.append_message(conversation.id, parent, message))
        parent = stored[-1].id
    return tuple(stored)


async def _branch(chat: ServerChat, conversation: Conversation) -> tuple[StoredMessage, ...]:
    leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
    return await chat.path(leaf) if leaf is not None else ()


def _items(path: Sequence[StoredMessage]) -> list[dict[str, Any]]:
    return [item for message in path for item in message_items(message.id, message.role, message.parts)]


async def _with_media(
    chat: ServerChat, page: InputItemList, messages: Sequence[StoredMessage], max_bytes: int
) -> InputItemList:
    """The page with the media of its items. Only these are read. It ends before the item whose media would exceed
    `max_bytes`, but has one item at least."""
    inputs = (message for message in messages if message.role not in (Role.ASSISTANT, Role.TOOL))
    sources = {_item_ids(message)[0]: message for message in inputs if blob_digests(message.parts)}
    data: list[Any] = []
    for item in page.data:
        message = sources.get(item["id"])
        if message is not None:
            max_bytes -= media_bytes(message)
            if data and max_bytes < 0:
                return page.model_copy(update={"data": data, "last_id": data[-1]["id"], "has_more": True})
            (item,) = await load_items(chat, [message])
        data.append(item)
    return page.model_copy(update={"data": data})


def _item_ids(message: StoredMessage) -> list[str]:
    return [item["id"] for item in message_items(message.id, message.role, message.parts)]


def _resource(conversation: Conversation) -> ConversationResource:
    found = _note(conversation).get(_NOTE)
    metadata = found.get("metadata") if isinstance(found, dict) else None
    return ConversationResource(
        id=conversation.id,
        created_at=int(conversation.created_at.timestamp()),
        metadata=metadata if isinstance(metadata, dict) else {},
    )


def _note(conversation: Conversation) -> dict[str, Any]:
    note = conversation.parameters.get("note")
    return dict(note) if isinstance(note, dict) else {}
