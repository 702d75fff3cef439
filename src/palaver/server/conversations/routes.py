"""The routes of `/api`: the model, conversations, cursors, presets, messages and turns are here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from html import escape
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import HTMLResponse

from palaver.chat.interface import Chat, ContextUsage, ModelCard, ReplyToken, SentMessage
from palaver.errors import BadParameter
from palaver.messages import Message, Part
from palaver.server.admin import check_model_name
from palaver.server.auth import AdminDep, CallerDep, get_caller
from palaver.server.conversations import files, streaming
from palaver.server.conversations.files import BINARY, OCTET_STREAM
from palaver.server.errors import NotAllowed, api_router
from palaver.server.speech import message_speech_routes
from palaver.server.sse import run_while_connected
from palaver.server.state import ChatDep, IdempotencyKeyDep, StateDep, idempotency_key
from palaver.store import Blob, Conversation, Cursor, NotFound, Preset, SearchHit, StoredMessage, TreeNode
from palaver.store.comparisons import Comparison, TallyRow
from palaver.store.encoding import media_part
from palaver.store.records import ConversationDefaults
from palaver.store.share_links import Share
from palaver.store.tool_rounds import ToolRound
from palaver.store.tool_rules import ToolRule
from palaver.tools.config import parse_server
from palaver.tools.oauth import DONE
from palaver.tools.servers import ServerCard, ServerResource
from palaver.wire import (
    AddToolServerRequest,
    AppendMessageRequest,
    ChooseReplyRequest,
    CompareRequest,
    ContextUsageRequest,
    ContinueReplyRequest,
    CountTokensRequest,
    CreateConversationRequest,
    CursorRequest,
    DecideCallsRequest,
    DeletePresetRequest,
    EditMessageRequest,
    FinishSignInRequest,
    ForgottenSchema,
    ForkReplyRequest,
    LeafSchema,
    LoadModelRequest,
    MessageSchema,
    MoveCursorRequest,
    NewPart,
    NewShareSchema,
    RawReplySchema,
    ReadToolResourceRequest,
    RemoveToolServerRequest,
    SaveDefaultsRequest,
    SavePresetRequest,
    SendMessageRequest,
    ShareBranchRequest,
    SignInSchema,
    StartReplyRequest,
    StartSignInRequest,
    TokenCountSchema,
    UpdateConversationRequest,
)

conversation_routes = api_router("conversations")
Limit = Annotated[int, Query(ge=1, le=1000)]


@conversation_routes.post("/conversations", status_code=201)
async def create(body: CreateConversationRequest, chat: ChatDep, key: IdempotencyKeyDep) -> Conversation:
    return await chat.create_conversation(
        title=body.title,
        system=body.system,
        parameters=body.parameters,
        tags=body.tags,
        key=idempotency_key(body.key, key),
    )


@conversation_routes.get("/conversations")
async def conversations(
    chat: ChatDep,
    limit: Limit = 50,
    before: str | None = None,
    tag: str | None = None,
    title: str = "",
    deleted: bool = False,
    pinned: bool | None = None,
) -> list[Conversation]:
    """The newest first; `before` is the id of the last one of the page before. `pinned`: the pinned ones, or the
    others."""
    return list(
        await chat.conversations(limit=limit, before=before, tag=tag, title=title, deleted=deleted, pinned=pinned)
    )


@conversation_routes.get("/conversations/{id}")
async def conversation(id: str, chat: ChatDep) -> Conversation:
    return await chat.conversation(id)


@conversation_routes.patch("/conversations/{id}")
async def change(id: str, body: UpdateConversationRequest, chat: ChatDep) -> Conversation:
    """Sets the given fields. The parameters are replaced as a whole."""
    return await chat.update_conversation(
        id, title=body.title, system=body.system, parameters=body.parameters, tags=body.tags, pinned=body.pinned
    )


@conversation_routes.delete("/conversations/{id}", status_code=204)
async def delete(id: str, chat: ChatDep) -> None:
    """Deletes the conversation; `undelete` restores it."""
    await chat.delete_conversation(id)


@conversation_routes.post("/conversations/{id}/undelete")
async def undelete(id: str, chat: ChatDep) -> Conversation:
    return await chat.restore_conversation(id)


@conversation_routes.post("/conversations/{id}/forget", status_code=204)
async def forget(id: str, chat: ChatDep) -> None:
    """Frees the conversation's part of the model's cache. Its next turn computes the whole prompt."""
    await chat.clear_cache(id)


@conversation_routes.get("/conversations/{id}/nodes")
async def nodes(id: str, chat: ChatDep) -> list[TreeNode]:
    """The shape of the whole tree, every parent before its children."""
    return list(await chat.nodes(id))


@conversation_routes.get("/conversations/{id}/previews")
async def previews(id: str, chat: ChatDep) -> dict[str, str]:
    """The first words of every message, by its id."""
    return dict(await chat.previews(id))


@conversation_routes.get("/conversations/{id}/newest-leaf")
async def newest_leaf(id: str, chat: ChatDep, start: str | None = None) -> LeafSchema:
    """The leaf of the branch of `start` that was written to last: a switch to the branch leads there."""
    return LeafSchema(id=await chat.newest_leaf(id, start))


@conversation_routes.post("/conversations/{id}/gauge")
async def gauge(id: str, body: ContextUsageRequest, chat: ChatDep) -> ContextUsage:
    """How full the context would be if the conversation continued after `leaf`."""
    return await chat.context_usage(id, body.leaf, body.parameters)


@conversation_routes.get("/tags")
async def tags(chat: ChatDep) -> list[str]:
    return list(await chat.tags())


@conversation_routes.get("/search")
async def search(query: str, chat: ChatDep, limit: Limit = 20) -> list[SearchHit]:
    """Messages that contain every term, the newest first. Terms are beginnings of words, or phrases "in quotes"."""
    return list(await chat.search(query, limit))


cursor_routes = api_router("cursors")


@cursor_routes.get("/conversations/{id}/cursor")
async def cursor(id: str, client: str, chat: ChatDep) -> Cursor:
    """The client's place in the conversation. A new client starts where the conversation was used last."""
    return await chat.cursor(id, client)


@cursor_routes.put("/conversations/{id}/cursor")
async def move(id: str, body: MoveCursorRequest, chat: ChatDep) -> Cursor:
    return await chat.move_cursor(id, body.client, body.to)


@cursor_routes.post("/conversations/{id}/cursor/undo")
async def undo(id: str, body: CursorRequest, chat: ChatDep) -> Cursor:
    """Moves the client back to where it was before its last move."""
    return await chat.undo(id, body.client)


@cursor_routes.post("/conversations/{id}/cursor/redo")
async def redo(id: str, body: CursorRequest, chat: ChatDep) -> Cursor:
    return await chat.redo(id, body.client)


preset_routes = api_router("presets")


@preset_routes.get("/presets")
async def presets(chat: ChatDep) -> list[Preset]:
    """By name."""
    return list(await chat.presets())


@preset_routes.put("/presets")
async def save(body: SavePresetRequest, chat: ChatDep) -> Preset:
    """Saves a preset. Replaces one of the same name."""
    return await chat.save_preset(body.name, body.system, body.parameters)


@preset_routes.post("/presets/delete", status_code=204, summary="Delete", operation_id="delete_api_presets_delete_post")
async def delete_preset(body: DeletePresetRequest, chat: ChatDep) -> None:
    """The name is in the body, because it may contain any character."""
    await chat.delete_preset(body.name)


@preset_routes.get("/defaults")
async def defaults(chat: ChatDep) -> ConversationDefaults:
    """The defaults of new conversations on the page."""
    return await chat.defaults()


@preset_routes.put("/defaults")
async def save_defaults(body: SaveDefaultsRequest, chat: ChatDep) -> ConversationDefaults:
    return await chat.save_defaults(body.system, body.parameters)


message_routes = api_router("messages")


@message_routes.get("/messages/{id}")
async def message(id: str, chat: ChatDep) -> StoredMessage:
    return await chat.message(id)


@message_routes.get("/messages/{id}/path")
async def path(id: str, chat: ChatDep) -> list[StoredMessage]:
    """A branch: from the root to this message."""
    return list(await chat.path(id))


@message_routes.get("/messages/{id}/siblings")
async def siblings(id: str, chat: ChatDep) -> list[StoredMessage]:
    """The message and the others under the same parent, the oldest first."""
    return list(await chat.siblings(id))


@message_routes.post("/conversations/{id}/messages", status_code=201)
async def append(id: str, body: AppendMessageRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """Stores a message without starting a reply."""
    message = await resolve_message(chat, body.message)
    return await chat.append_message(id, body.parent, message, key=idempotency_key(body.key, key))


@message_routes.post("/messages/{id}/edit", status_code=201)
async def edit(id: str, body: EditMessageRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """Stores an edited message as a sibling. An edited reply can be continued."""
    parts = await _resolve_parts(chat, body.parts)
    return await chat.edit_message(id, parts, key=idempotency_key(body.key, key))


async def resolve_message(chat: Chat, message: MessageSchema) -> Message:
    return Message(message.role, await _resolve_parts(chat, message.parts))


async def _resolve_parts(chat: Chat, parts: Iterable[NewPart]) -> tuple[Part, ...]:
    """Replaces blob references by their data. The blobs must belong to the user."""
    resolved: list[Part] = []
    for part in parts:
        if isinstance(part, Blob):
            resolved.append(media_part(part, await chat.blob(part.digest)))
        else:
            resolved.append(part)
    return tuple(resolved)


turn_routes = api_router("turns")


@turn_routes.post("/conversations/{id}/say", status_code=201)
async def say(id: str, body: SendMessageRequest, chat: ChatDep, key: IdempotencyKeyDep) -> SentMessage:
    """Stores a message and starts the reply to it."""
    message = await resolve_message(chat, body.message)
    once = idempotency_key(body.key, key)
    return await chat.send_message(id, body.parent, message, parameters=body.parameters, key=once)


@turn_routes.post("/conversations/{id}/replies", status_code=201)
async def reply(id: str, body: StartReplyRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """Starts a reply to a message. A retry is a second reply to the same message."""
    once = idempotency_key(body.key, key)
    return await chat.start_reply(id, body.parent, parameters=body.parameters, key=once)


ContinueBody = Annotated[ContinueReplyRequest | None, Body(title="Asked")]  # the published title


@turn_routes.post("/turns/{id}/continue")
async def go_on(id: str, chat: ChatDep, key: IdempotencyKeyDep, body: ContinueBody = None) -> StoredMessage:
    """Continues a stopped reply: the same message, or else a sibling that begins with its text."""
    return await chat.continue_reply(id, key=idempotency_key(body.key if body is not None else None, key))


@turn_routes.post("/turns/{id}/fork", status_code=201)
async def fork(id: str, body: ForkReplyRequest, chat: ChatDep, key: IdempotencyKeyDep) -> StoredMessage:
    """A sibling that begins with the reply's first tokens, then `instead`, and goes on from there."""
    return await chat.fork_reply(id, body.tokens, body.instead, key=idempotency_key(body.key, key))


@turn_routes.post("/turns/{id}/stop", status_code=204)
async def stop(id: str, chat: ChatDep) -> None:
    """Stops the turn and keeps its text. Has no effect on a turn that has ended."""
    await chat.stop_reply(id)


@turn_routes.post("/turns/{id}/answer-now", status_code=204)
async def answer_now(id: str, chat: ChatDep) -> None:
    """Closes an open thought, so that the answer begins."""
    await chat.answer_now(id)


@turn_routes.get("/turns/{id}/tokens")
async def tokens(id: str, chat: ChatDep) -> list[ReplyToken]:
    """Every token with its log-probability and the likeliest alternatives."""
    return list(await chat.tokens(id))


@turn_routes.get("/turns/{id}/raw")
async def raw(id: str, chat: ChatDep) -> RawReplySchema:
    return RawReplySchema(text=await chat.raw_text(id))


share_routes = api_router("shares")
_DAY_SECONDS = 24 * 3600


@share_routes.post("/conversations/{id}/shares", status_code=201)
async def share_branch(id: str, body: ShareBranchRequest, chat: ChatDep, state: StateDep) -> NewShareSchema:
    """Creates a link to a read-only page of a branch, if the operator allows it. Anyone with the link can read it."""
    if not state.settings.share:
        raise NotAllowed("This server doesn't share conversations; --share allows it.")
    if (await chat.message(body.leaf)).conversation_id != id:
        raise NotFound("message", body.leaf)
    seconds = body.days * _DAY_SECONDS
    share, token = await chat.share_branch(body.leaf, seconds, thoughts=body.thoughts, tools=body.tools)
    return NewShareSchema(share=share, path=f"share/{token}")


@share_routes.get("/conversations/{id}/shares")
async def shares(id: str, chat: ChatDep) -> list[Share]:
    """The links that are valid, the oldest first, without their secrets."""
    return list(await chat.shares(id))


@share_routes.delete("/shares/{id}", status_code=204)
async def revoke_share(id: str, chat: ChatDep) -> None:
    """Ends a link for good."""
    await chat.revoke_share(id)


comparison_routes = api_router("comparisons")


@comparison_routes.post("/conversations/{id}/compare", status_code=201)
async def compare(id: str, body: CompareRequest, chat: ChatDep, key: IdempotencyKeyDep) -> Comparison:
    """Stores a message and starts a reply to it for each column: siblings, each with its own model and parameters.

    Nothing is written if one of them is refused.
    """
    message = None if body.message is None else await resolve_message(chat, body.message)
    columns = [column.to_value() for column in body.columns]
    once = idempotency_key(body.key, key)
    return await chat.compare(id, body.parent, message, columns, blind=body.blind, key=once)


@comparison_routes.get("/conversations/{id}/comparisons")
async def comparisons(id: str, chat: ChatDep) -> list[Comparison]:
    """The oldest first."""
    return list(await chat.comparisons(id))


@comparison_routes.get("/comparisons/tally")
async def tally(chat: ChatDep) -> list[TallyRow]:
    """How often the replies of each name were compared and chosen, in all conversations of the user."""
    return list(await chat.tally())


@comparison_routes.get("/comparisons/{id}")
async def comparison(id: str, chat: ChatDep) -> Comparison:
    """The names, models and parameters of a blind one are empty until the choice."""
    return await chat.comparison(id)


@comparison_routes.post("/comparisons/{id}/choose")
async def choose_reply(id: str, body: ChooseReplyRequest, chat: ChatDep) -> Comparison:
    """Records the preferred reply and makes its branch the head. A later choice replaces it."""
    return await chat.choose_reply(id, body.reply)


tool_routes = api_router("tools")


@tool_routes.get("/tools")
async def tool_servers(chat: ChatDep, connect: bool = True) -> list[ServerCard]:
    """The tool servers of this user with their tools. `connect`: waits until they are connected, or have failed."""
    return list(await chat.tool_servers(connect))


@tool_routes.post("/tools", status_code=201)
async def add_tool_server(body: AddToolServerRequest, chat: ChatDep) -> ServerCard:
    """Adds a server with a URL at a public address, for this user alone."""
    return await chat.add_tool_server(parse_server(body.name, {"url": body.url, "headers": body.headers}, {}))


@tool_routes.post("/tools/remove", status_code=204)
async def remove_tool_server(body: RemoveToolServerRequest, chat: ChatDep) -> None:
    await chat.remove_tool_server(body.name)


@tool_routes.post("/tools/sign-in")
async def start_sign_in(body: StartSignInRequest, request: Request, chat: ChatDep) -> SignInSchema:
    """Starts to sign this user in to a tool server with OAuth."""
    redirect_uri = body.redirect_uri or f"{request.base_url}api/tools/callback"
    return SignInSchema(url=await chat.start_sign_in(body.server, redirect_uri))


@tool_routes.post("/tools/sign-in/finish")
async def finish_sign_in(body: FinishSignInRequest, chat: ChatDep) -> ServerCard:
    """Completes a sign-in of this user, for clients whose own address the browser returned to."""
    return await chat.finish_sign_in(body.state, body.code, body.issuer)


@tool_routes.get("/tools/callback", response_class=HTMLResponse, include_in_schema=False)
async def sign_in_callback(request: Request, state: StateDep, again: bool = False) -> HTMLResponse:
    """The browser returns from an authorization server. It sends the page's cookie only with a navigation from this
    site, so that the first request leads to a second one."""
    if not again:
        target = escape(f"{request.url.path}?{request.url.query}&again=true", quote=True)
        return HTMLResponse(f'<!doctype html><meta http-equiv="refresh" content="0;url={target}">')
    query = request.query_params
    if "code" not in query or "state" not in query:
        raise BadParameter("code", query.get("error", "")[:80], "the sign-in was refused")
    chat = state.service.chat((await get_caller(request)).owner_id)
    card = await chat.finish_sign_in(query["state"][:500], query["code"][:8192], query.get("iss"))
    text = f"The tool server {card.name} {card.error}." if card.error else DONE
    return HTMLResponse(f"<!doctype html><meta charset=utf-8><title>Palaver</title><p>{escape(text)}")


@tool_routes.get("/tools/rules")
async def tool_rules(chat: ChatDep) -> list[ToolRule]:
    """The rules of this user about tools and servers."""
    return list(await chat.tool_rules())


@tool_routes.delete("/tools/rules")
async def forget_tool_rules(chat: ChatDep, name: str | None = None, conversation: str | None = None) -> ForgottenSchema:
    """Removes rules: those about a tool or a server by its `name`, those in a `conversation`, or all."""
    return ForgottenSchema(forgotten=await chat.forget_tool_rules(name, conversation))


@tool_routes.get("/tools/resources")
async def tool_resources(server: str, chat: ChatDep) -> list[ServerResource]:
    """What can be attached to a message: a server's resources, and its prompts with the names of their arguments."""
    return list(await chat.tool_resources(server))


@tool_routes.post(
    "/tools/resources/read", response_class=Response, responses={200: {"content": {OCTET_STREAM: BINARY}}}
)
async def read_tool_resource(body: ReadToolResourceRequest, chat: ChatDep) -> Response:
    """The bytes of a resource, or the text of a prompt. Send them as a file: `/api/documents` or `/api/blobs`."""
    return Response(await chat.read_tool_resource(body.server, body.name, body.arguments), media_type=OCTET_STREAM)


@tool_routes.get("/turns/{id}/tools")
async def tool_round(id: str, chat: ChatDep) -> ToolRound | None:
    """The tool calls of a reply that run here, and their results; null if it has none."""
    return await chat.tool_round(id)


@tool_routes.post("/turns/{id}/tools")
async def decide_calls(id: str, body: DecideCallsRequest, chat: ChatDep) -> ToolRound:
    """Approves or denies calls that wait. Once all calls have a result, the next reply starts by itself."""
    return await chat.decide_calls(id, [one.to_value() for one in body.decisions])


model_routes = api_router("model")


@model_routes.get("/model")
async def model(chat: ChatDep, name: Annotated[str, Query(max_length=500)] = "") -> ModelCard:
    """The model of that name, and how much of it is loaded; without a name, the model in use or being loaded."""
    return await chat.model(name)


@model_routes.get("/models")
async def models(chat: ChatDep) -> list[str]:
    """The names of models that can be asked for, by the parameter `model` of a conversation or a turn."""
    return list(await chat.models())


@model_routes.get("/models/cards")
async def model_cards(chat: ChatDep) -> list[ModelCard]:
    """A card of each model. Cards of models that were never loaded have only what is in their files."""
    return list(await chat.model_cards())


@model_routes.post("/model/load")
async def load(body: LoadModelRequest, chat: ChatDep, state: StateDep, _: AdminDep) -> ModelCard:
    """Makes another model the one in use. Returns at once; the turns of other models go on."""
    check_model_name(body.name, state)
    return await chat.load_model(body.name)


@model_routes.post("/model/unload")
async def unload(chat: ChatDep, _: AdminDep) -> ModelCard:
    return await chat.unload_model()


@model_routes.get("/model/ready")
async def ready(chat: ChatDep, wait: Annotated[float, Query(ge=0, le=60)] = 25.0) -> ModelCard:
    """Waits until the model is ready, `wait` seconds at most; then returns its state."""
    try:
        async with asyncio.timeout(wait):
            return await chat.wait_until_ready()
    except TimeoutError:
        return await chat.model()


@model_routes.post("/tokens")
async def count_tokens(body: CountTokensRequest, request: Request, state: StateDep, _: CallerDep) -> TokenCountSchema:
    """How many tokens a text has, without those that the chat template puts around a message."""
    model = await state.model(body.model)
    counting = state.workers.run(lambda: len(model.format.tokenizer.encode([body.text])))
    return TokenCountSchema(tokens=await run_while_connected(request, counting))


def routers() -> tuple[APIRouter, ...]:
    return (
        model_routes,
        conversation_routes,
        preset_routes,
        message_routes,
        message_speech_routes,
        cursor_routes,
        turn_routes,
        files.preference_routes,
        comparison_routes,
        share_routes,
        tool_routes,
        streaming.routes,
        files.routes,
        files.blob_routes,
    )
