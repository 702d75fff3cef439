"""Conversations out to files, and in from them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from palaver.errors import BadParameter
from palaver.server.conversations.dependencies import Mine
from palaver.server.openai.disconnect import run_while_connected
from palaver.server.state import StateOf
from palaver.store import NotFound
from palaver.transcripts import TranscriptFormat
from palaver.wire.conversations import BlobPut, Conversation

routes = APIRouter(tags=["files"])
_OBJECTS_EACH = 20
"""Messages and their parts in a conversation, as an export of many conversations has on average at the most."""
_KINDS = {
    TranscriptFormat.TRAINING: ("application/jsonl", "jsonl"),
    TranscriptFormat.BRANCHES: ("application/jsonl", "jsonl"),
    TranscriptFormat.WHOLE: ("application/json", "json"),
    TranscriptFormat.MARKDOWN: ("text/markdown", "md"),
    TranscriptFormat.SHAREGPT: ("application/jsonl", "jsonl"),
}
_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file.",
        "content": {kind: {"schema": {"type": "string"}} for kind, _ in _KINDS.values()},
    }
}


@routes.get("/conversations/{id}/export", response_class=Response, responses=_FILE)
async def export(
    id: str, chat: Mine, form: TranscriptFormat = TranscriptFormat.TRAINING, leaf: str | None = None
) -> Response:
    """The conversation as a file; `leaf` names the branch that counts as the main one."""
    text = await chat.export(id, form, leaf)
    kind, ending = _KINDS[form]
    title = (await chat.conversation(id)).title
    return Response(text.encode(), media_type=f"{kind}; charset=utf-8", headers=attachment(f"{title or id}.{ending}"))


@routes.post(
    "/import",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def take_in(request: Request, chat: Mine, state: StateOf) -> list[Conversation]:
    """Takes the text of a file, whichever of the known forms it has; the same text twice only once.

    Ends with its client: conversations that are stored by then stay.
    """
    body = await request.body()
    _check_count(body, state.settings.limits.imported)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadParameter("body", f"byte {error.start}", "the file must be text in UTF-8") from None
    taken = await run_while_connected(request, chat.take_in(text), state.closing)
    return [Conversation.of(one) for one in taken]


def _check_count(body: bytes, most: int) -> None:
    """A conversation is a line that is an object, or an object in an array."""
    lines = body.count(b"\n{") + 1
    objects = body.count(b"{")
    if lines > most or objects > most * _OBJECTS_EACH:
        count = f"{lines} lines" if lines > most else f"{objects} objects"
        raise BadParameter("body", count, f"at most {most} conversations are imported at once: divide the file")


def attachment(name: str) -> dict[str, str]:
    """Headers with which a browser keeps a file and never runs it."""
    plain = re.sub(r"[^A-Za-z0-9._ -]+", "_", name).strip(". ") or "file"
    return {
        "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}",
        "x-content-type-options": "nosniff",
        "content-security-policy": "default-src 'none'; sandbox",
    }


blob_routes = APIRouter(tags=["blobs"])
ANYTHING = "application/octet-stream"
HARMLESS = (
    *("image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/bmp"),
    *("audio/wav", "audio/x-wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/mp4", "audio/webm", "audio/aac"),
    *("video/mp4", "video/webm", "video/ogg", ANYTHING),
)
"""Types that a browser can show but in which nothing runs; a drawing in XML is none of them."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BYTES = {"schema": {"type": "string", "format": "binary"}}


@blob_routes.post(
    "/blobs",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": {ANYTHING: _BYTES}}},
)
async def put(request: Request, chat: Mine) -> BlobPut:
    """Takes the bytes as they are; the same bytes are kept once."""
    data = await request.body()
    return BlobPut(digest=await chat.put_blob(data), size=len(data))


@blob_routes.get("/blobs/{digest}", response_class=Response, responses={200: {"content": {ANYTHING: _BYTES}}})
async def blob(digest: str, chat: Mine, type: str = ANYTHING) -> Response:
    """`type` is what the bytes are to be shown as."""
    if not _DIGEST.fullmatch(digest):
        raise NotFound("blob", digest)
    if type not in HARMLESS:
        raise BadParameter("type", type, f"must be one of {', '.join(HARMLESS)}")
    data = await chat.blob(digest)
    headers = {
        **attachment(digest),
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "private, max-age=31536000, immutable",
    }
    return Response(data, media_type=type, headers=headers)
