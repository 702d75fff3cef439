"""All routes of the conversations, one module each for what they are about."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from palaver.server.conversations import (
    blobs,
    conversations,
    cursors,
    files,
    messages,
    model,
    presets,
    speech,
    streams,
    turns,
)
from palaver.wire.errors import ErrorBody

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
    whole = APIRouter(prefix="/api", responses=_ERRORS)
    for part in (model, conversations, presets, messages, speech, cursors, turns, streams, files, blobs):
        whole.include_router(part.routes)
    return whole
