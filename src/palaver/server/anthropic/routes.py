"""`/v1/messages`: streaming and not is one path; not streaming is folding."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from palaver.chat.interface import ModelCard, ModelState
from palaver.errors import BadParameter
from palaver.server.anthropic.request import NAMES, ignored_of, parse_request
from palaver.server.anthropic.schemas import AnthropicMessage, CountRequest, MessagesRequest
from palaver.server.anthropic.stored import answer_in_conversation
from palaver.server.anthropic.streaming import AnthropicReply, fold_message, stream_response
from palaver.server.auth import Whoever
from palaver.server.openai.choices import CompletionStream
from palaver.server.openai.disconnect import (
    close_on_failure,
    first_chunk,
    first_seconds,
    indexed_stream,
    limited_stream,
    run_while_connected,
)
from palaver.server.openai.sampling_params import api_field_names, ignored_header
from palaver.server.openai.stored import conversation_name
from palaver.server.state import ServerState, StateOf

FIRST_VERSION = "2023-06-01"
"""The first with the events that are sent here. What later versions took away is still taken here."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


_TOLD: dict[int | str, dict[str, Any]] = {
    200: {"model": AnthropicMessage, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


class TokenCount(BaseModel):
    input_tokens: int


def router() -> APIRouter:
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", response_model=None, responses=_TOLD)
    async def messages(request: Request, body: MessagesRequest, caller: Whoever, state: StateOf) -> Response:
        """A reply to a conversation, whole or as a stream of server-sent events. One that is named by
        `metadata.conversation` (or the header `x-conversation`; `new` makes one) keeps what is said."""
        _check_version(request)
        named = conversation_name(body.metadata, request.headers)
        if named is not None:
            return await answer_in_conversation(request, body, named, caller.owner_id, state)
        return await answer_messages(request, body, caller.owner_id, state)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest, caller: Whoever, state: StateOf) -> TokenCount:
        """How many tokens the model would read."""
        _check_version(request)
        return TokenCount(input_tokens=await asyncio.to_thread(_counted, body, caller.owner_id, state))

    return routes


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", FIRST_VERSION)
    if not _DAY.fullmatch(version) or version < FIRST_VERSION:
        raise BadParameter("anthropic-version", version[:80], f"must be {FIRST_VERSION} or later")


def _counted(body: CountRequest, owner: str, state: ServerState) -> int:
    model = state.service.models.current()
    with api_field_names(NAMES):
        what = parse_request(body, model, state.settings, owner, state.remembered)
        given = what.request
        return len(model.format.render(given.messages, given.tools, given.options, what.said, what.begun, given.past))


async def answer_messages(request: Request, body: MessagesRequest, owner: str, state: ServerState) -> Response:
    model = state.service.models.current()
    with api_field_names(NAMES):
        what = await asyncio.to_thread(parse_request, body, model, state.settings, owner, state.remembered)
        speaking = CompletionStream(what, await asyncio.to_thread(what.utterances), state.metrics)
    stream = indexed_stream(state, speaking, limited_stream(state, speaking))
    spoken = AnthropicReply(body, speaking.choices[0])
    ignored = ignored_header(ignored_of(body, model, state.settings))
    async with close_on_failure(stream):
        with api_field_names(NAMES):
            first = await first_chunk(request, stream, first_seconds(what.request))
            events = spoken.events(stream, first)
            if not body.stream:
                return JSONResponse(await run_while_connected(request, fold_message(events)), headers=ignored)
        return stream_response(events, request, ignored)


_PAGE = 20
_MOST = 1000
_UNKNOWN_DAY = "1970-01-01T00:00:00Z"


def models_page(names: Sequence[str], card: ModelCard, asked: Mapping[str, str]) -> dict[str, Any]:
    """A page of them. `asked` may have `limit`, and `after_id` or `before_id`."""
    limit, shown = _limit(asked.get("limit")), list(names)
    if (after := asked.get("after_id")) is not None:
        shown = shown[_place(shown, "after_id", after) + 1 :]
    if (before := asked.get("before_id")) is not None:
        shown = shown[: _place(shown, "before_id", before)]
    some = shown[:limit] if before is None else shown[-limit:]
    found = [model_value(name, card) for name in some]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": len(shown) > limit, "first_id": first, "last_id": last}


def model_value(name: str, card: ModelCard) -> dict[str, Any]:
    about = {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN_DAY, "lifecycle": "active"}
    if card.state is not ModelState.READY or name != card.name:
        return about
    return {**about, "max_input_tokens": card.context_length, "max_tokens": card.context_length}


def _limit(text: str | None) -> int:
    if text is None:
        return _PAGE
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MOST):
        raise BadParameter("limit", text[:80], f"must be from 1 to {_MOST}")
    return int(text)


def _place(names: Sequence[str], field: str, name: str) -> int:
    if name not in names:
        raise BadParameter(field, name[:80], "there is no such model here")
    return names.index(name)
