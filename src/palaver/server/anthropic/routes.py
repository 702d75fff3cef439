"""The routes under `/v1/messages`, also for stored conversations, and the model list in Anthropic's form."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from palaver.chat.interface import ModelCard
from palaver.chat.model import Model
from palaver.errors import BadParameter
from palaver.server.anthropic.request import (
    FIELD_NAMES,
    ignored_request_fields,
    parse_conversation,
    parse_request,
    to_chat_request,
)
from palaver.server.anthropic.schemas import AnthropicMessage, CountRequest, MessagesRequest
from palaver.server.anthropic.streaming import AnthropicReply, fold_message, stream_response
from palaver.server.auth import CallerDep
from palaver.server.openai.request import (
    CONVERSATION_HEADER,
    api_field_names,
    conversation_name,
    ignored_header,
    output_options,
)
from palaver.server.openai.stored import (
    choice_parameters,
    conversation_model,
    conversation_model_name,
    start_replies,
    stored_choices,
)
from palaver.server.openai.streaming import CompletionStream
from palaver.server.sse import answer_while_loading, close_on_failure, first_chunk, first_seconds, run_while_connected
from palaver.server.state import ServerState, StateDep

FIRST_VERSION = "2023-06-01"
"""The first version with the current stream events. Later versions are accepted, and so are the fields they removed."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DEFAULT_PAGE = 20
_MAX_PAGE = 1000
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": AnthropicMessage, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


class TokenCount(BaseModel):
    input_tokens: int


def router() -> APIRouter:
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", response_model=None, responses=_RESPONSES)
    async def messages(request: Request, body: MessagesRequest, caller: CallerDep, state: StateDep) -> Response:
        """A reply to the messages, whole or as a stream of server-sent events. If `metadata.conversation` (or the
        header `x-conversation`) names a conversation, both are stored there; `new` creates one."""
        _check_version(request)
        name = conversation_name(body.metadata, request.headers)
        if name is None:
            answer = answer_messages(request, body, caller.owner_id, state)
            return await answer_while_loading(request, state, body.model, body.stream, answer)
        model = await conversation_model_name(state.service.chat(caller.owner_id), name, body.model)
        answer = answer_in_conversation(request, body, name, caller.owner_id, state)
        return await answer_while_loading(request, state, model, body.stream, answer)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest, caller: CallerDep, state: StateDep) -> TokenCount:
        """Counts the prompt tokens."""
        _check_version(request)
        model = await state.model(body.model)
        return TokenCount(input_tokens=await asyncio.to_thread(_count_tokens, body, model, caller.owner_id, state))

    return routes


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", FIRST_VERSION)
    if not _DATE.fullmatch(version) or version < FIRST_VERSION:
        raise BadParameter("anthropic-version", version[:80], f"must be {FIRST_VERSION} or later")


def _count_tokens(body: CountRequest, model: Model, owner: str, state: ServerState) -> int:
    with api_field_names(FIELD_NAMES):
        call = parse_request(body, model, state.settings, owner, state.reply_index, state.attachments(model))
        request = call.request
        return len(
            model.render(
                request.messages, request.tools, request.options, call.partial_ids, call.partial, request.past_replies
            )
        )


async def answer_messages(request: Request, body: MessagesRequest, owner: str, state: ServerState) -> Response:
    model = await state.model(body.model)
    with api_field_names(FIELD_NAMES):
        attachments = state.attachments(model)
        call = await asyncio.to_thread(
            parse_request, body, model, state.settings, owner, state.reply_index, attachments
        )
        reply_streams = await asyncio.to_thread(call.reply_streams)
        completion = CompletionStream(call, reply_streams, state.metrics, state.limiter, state.reply_index)
    stream = completion.deltas()
    reply = AnthropicReply(body, completion.choices[0])
    ignored = ignored_header(ignored_request_fields(body, model, state.settings))
    async with close_on_failure(stream):
        with api_field_names(FIELD_NAMES):
            first = await first_chunk(request, stream, first_seconds(call.request))
            events = reply.events(stream, first)
            if not body.stream:
                return JSONResponse(await run_while_connected(request, fold_message(events)), headers=ignored)
        return stream_response(events, request, ignored)


def models_page(cards: Mapping[str, ModelCard], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the models. `query` may have `limit`, and `after_id` or `before_id`."""
    limit, rest = _limit(query.get("limit")), list(cards)
    if (after := query.get("after_id")) is not None:
        rest = rest[_index(rest, "after_id", after) + 1 :]
    if (before := query.get("before_id")) is not None:
        rest = rest[: _index(rest, "before_id", before)]
    page = rest[:limit] if before is None else rest[-limit:]
    models = [model_value(name, cards[name]) for name in page]
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"data": models, "has_more": len(rest) > limit, "first_id": first, "last_id": last}


def model_value(name: str, card: ModelCard) -> dict[str, Any]:
    value = {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN_DATE, "lifecycle": "active"}
    if not card.context_length:
        return value
    return {**value, "max_input_tokens": card.context_length, "max_tokens": card.context_length}


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MAX_PAGE):
        raise BadParameter("limit", text[:80], f"must be from 1 to {_MAX_PAGE}")
    return int(text)


def _index(names: Sequence[str], field: str, name: str) -> int:
    if name not in names:
        raise BadParameter(field, name[:80], "there is no such model on this server")
    return names.index(name)


async def answer_in_conversation(
    request: Request, body: MessagesRequest, name: str, owner: str, state: ServerState
) -> Response:
    chat = state.service.chat(owner)
    model = await conversation_model(chat, name, body.model, state)
    with api_field_names(FIELD_NAMES):
        turns, partial = await asyncio.to_thread(
            parse_conversation, body, model, state.settings, state.attachments(model)
        )
        if partial is not None:
            raise BadParameter("messages", "assistant", "can't be continued in a conversation: see /api/turns")
        chat_request = to_chat_request(body, model)
        parameters, messages = choice_parameters(chat_request, model, state), [turn.message for turn in turns]
        stored = await start_replies(chat, model, parameters, messages, name, request.headers.get("idempotency-key"))
        completion = await stored_choices(chat, model, stored, output_options(chat_request))
    ignored = ignored_header(ignored_request_fields(body, model, state.settings))
    headers = {CONVERSATION_HEADER: stored.conversation, **ignored}
    events = AnthropicReply(body, completion.choices[0], stored.value()).events(completion.deltas())
    if body.stream:
        return stream_response(events, request, headers)
    return JSONResponse(await run_while_connected(request, fold_message(events)), headers=headers)
