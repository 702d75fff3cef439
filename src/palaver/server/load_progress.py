"""Streamed answers of models that have to be loaded first: the stream begins, and its comments tell the progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from palaver.chat.interface import ModelCard, ModelState
from palaver.errors import ModelNotOffered
from palaver.server.errors import ClientDisconnected, error_response, error_status, log_unexpected, speaks_anthropic
from palaver.server.sse import EventStream, encode_json, encode_sse
from palaver.server.state import ServerState

STATUS_SECONDS = 2.0
"""How long a load has before the stream begins: one that fails until then is answered with a status of its own."""


async def answer_while_loading(
    request: Request,
    state: ServerState,
    name: str | None,
    is_streamed: bool | None,
    answer: Coroutine[Any, Any, Response],
) -> Response:
    """The answer to a request. If it is a stream and the model of that name is not loaded, comments such as
    `: loading sprout 40%` come before its chunks."""
    card = _card(state, name)
    if not is_streamed or card is None or card.state is ModelState.READY:
        return await answer
    answering = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({answering}, timeout=STATUS_SECONDS)
    except asyncio.CancelledError:
        answering.cancel()
        raise
    response = answering.result() if answering.done() else EventStream(_chunks(request, answering))
    if isinstance(response, EventStream):
        response.add_comments(_describe(state, card.name))
    return response


def _card(state: ServerState, name: str | None) -> ModelCard | None:
    with suppress(ModelNotOffered):
        return state.service.models.card(state.model_name(name))
    return None


def _describe(state: ServerState, name: str) -> Callable[[], str]:
    def describe() -> str:
        card = _card(state, name)
        if card is None or card.state is not ModelState.LOADING:
            return ""
        progress = "" if card.progress is None else f" {card.progress:.0%}"
        return f"loading {card.name}{progress}{f' ({card.note})' if card.note else ''}"

    return describe


async def _chunks(request: Request, answering: asyncio.Future[Response]) -> AsyncGenerator[bytes]:
    """The chunks of an answer that comes later. The status is sent by then: an error is an event."""
    try:
        response = await answering
    except ClientDisconnected:
        return
    except Exception as error:
        log_unexpected(error)
        yield _encode_error(error, request.scope)
        return
    assert isinstance(response, EventStream)
    async with aclosing(response.chunks()) as chunks:
        async for chunk in chunks:
            yield chunk


def _encode_error(error: Exception, scope: Scope) -> bytes:
    value = error_response(error, scope).value
    if speaks_anthropic(scope):
        return encode_json(value, "error")
    if scope["path"].endswith("/v1/responses"):
        inner = {"code": error_status(error).code, "message": value["error"]["message"], "param": None}
        return encode_json({"type": "error", **inner, "sequence_number": 0}, "error")
    return encode_json(value) + encode_sse(b"[DONE]")
