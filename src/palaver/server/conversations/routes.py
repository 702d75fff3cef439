"""The router of `/api`: conversations, messages, turns, events, files, speech and the model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from palaver.server.conversations import conversations, files, messages, model, speech, streaming
from palaver.wire import ErrorBody

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": why}
    for status, why in (
        (400, "what was asked can't be done as it was asked"),
        (401, "a key is needed"),
        (403, "not allowed"),
        (404, "not there, or not yours"),
        (409, "something else happened first"),
        (413, "too large"),
        (429, "too much at once"),
        (500, "the server failed"),
        (503, "not now"),
        (507, "no room left"),
    )
}


def router() -> APIRouter:
    api = APIRouter(prefix="/api", responses=_ERRORS)
    for routes in (
        model.routes,
        conversations.routes,
        conversations.preset_routes,
        messages.routes,
        speech.routes,
        conversations.cursor_routes,
        messages.turn_routes,
        streaming.routes,
        files.routes,
        files.blob_routes,
    ):
        api.include_router(routes)
    return api
