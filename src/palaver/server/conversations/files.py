"""Routes for exports, imports and blobs."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Query, Request, Response

from palaver.chat.interface import ImportReport
from palaver.errors import BadParameter
from palaver.server.errors import api_router
from palaver.server.sse import run_while_connected
from palaver.server.state import ChatDep, StateDep
from palaver.store import Conversation, NotFound
from palaver.transcripts import TranscriptFormat
from palaver.transcripts.archive import ZIP_START, open_export
from palaver.wire import BlobUploadSchema, DocumentSchema, TranscriptionSchema

routes = api_router("files")
_MAX_OBJECTS = 20
"""The limit of JSON objects (messages and parts) per conversation, on average over an import."""
MAX_UNPACKED = 8
"""How many times the largest body the conversations of an archive may be, unpacked."""
BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE_TYPES = {
    TranscriptFormat.JSONL: ("application/jsonl", "jsonl"),
    TranscriptFormat.BRANCHES: ("application/jsonl", "jsonl"),
    TranscriptFormat.TREE: ("application/json", "json"),
    TranscriptFormat.MARKDOWN: ("text/markdown", "md"),
    TranscriptFormat.SHAREGPT: ("application/jsonl", "jsonl"),
}
_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file.",
        "content": {media_type: {"schema": {"type": "string"}} for media_type, _ in _FILE_TYPES.values()},
    }
}


@routes.get("/conversations/{id}/export", response_class=Response, responses=_FILE)
async def export(
    id: str, chat: ChatDep, form: TranscriptFormat = TranscriptFormat.JSONL, leaf: str | None = None
) -> Response:
    """The conversation as a file; `leaf` names the branch that counts as the main one."""
    text = await chat.export_conversation(id, form, leaf)
    media_type, extension = _FILE_TYPES[form]
    title = (await chat.conversation(id)).title
    return Response(
        text.encode(), media_type=f"{media_type}; charset=utf-8", headers=attachment(f"{title or id}.{extension}")
    )


preference_routes = api_router("comparisons")
_PREFERENCES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"application/jsonl": {"schema": {"type": "string"}}}}
}


@preference_routes.get("/comparisons/preferences", response_class=Response, responses=_PREFERENCES)
async def export_preferences(chat: ChatDep, conversation: str | None = None) -> Response:
    """The choices as JSONL for preference training (`prompt`, `chosen`, `rejected`), of one conversation or of all.

    Pairs with an incomplete reply or with media are left out: the header `Palaver-Skipped` counts them.
    """
    file = await chat.export_preferences(conversation)
    headers = {
        **attachment("preferences.jsonl"),
        "palaver-pairs": str(file.pairs),
        "palaver-skipped": str(file.skipped),
    }
    return Response(file.text.encode(), media_type="application/jsonl; charset=utf-8", headers=headers)


@routes.post(
    "/import",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"text/plain": {"schema": {"type": "string"}}, "application/octet-stream": BINARY},
        }
    },
)
async def take_in(
    request: Request, response: Response, chat: ChatDep, state: StateDep, report: bool = False
) -> list[Conversation] | ImportReport:
    """Imports a file of any known format. A conversation that was imported before is not imported again.

    The header `Palaver-Skipped` counts what could not be imported; with `report` the answer lists it. Ends with its
    client: conversations that are stored by then stay.
    """
    body, limits = await request.body(), state.settings.limits
    for text in await asyncio.to_thread(_texts, body, MAX_UNPACKED * limits.body_bytes):
        _check_count(text, limits.imported)
    imported = await run_while_connected(request, chat.import_conversations(body), state.closing)
    response.headers["palaver-skipped"] = str(len(imported.skipped))
    return imported if report else list(imported.conversations)


def _texts(body: bytes, max_bytes: int) -> tuple[bytes, ...]:
    return open_export(body, max_bytes)[0] if body.startswith(ZIP_START) else (body,)


def _check_count(body: bytes, max_conversations: int) -> None:
    """Estimates the count: a conversation is a line with an object, or an object in an array."""
    lines = body.count(b"\n{") + 1
    objects = body.count(b"{")
    if lines > max_conversations or objects > max_conversations * _MAX_OBJECTS:
        count = f"{lines} lines" if lines > max_conversations else f"{objects} objects"
        raise BadParameter(
            "body",
            count,
            f"at most {max_conversations} conversations are imported at once: divide the file",
        )


def attachment(name: str) -> dict[str, str]:
    """Headers that make a browser download a file and never execute it."""
    ascii_name = re.sub(r"[^A-Za-z0-9._ -]+", "_", name).strip(". ") or "file"
    return {
        "content-disposition": f"attachment; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(name, safe='')}",
        "x-content-type-options": "nosniff",
        "content-security-policy": "default-src 'none'; sandbox",
    }


blob_routes = api_router("blobs")
OCTET_STREAM = "application/octet-stream"
SAFE_TYPES = (
    *("image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/bmp"),
    *("audio/wav", "audio/x-wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/mp4", "audio/webm", "audio/aac"),
    *("image/heic", "video/mp4", "video/webm", "video/quicktime", "video/ogg", OCTET_STREAM),
)
"""Media types without active content. SVG is not among them: it can contain scripts."""
FileName = Annotated[str, Query(max_length=200, description="The name of the file.")]
_DIGEST = re.compile(r"[0-9a-f]{64}")


@blob_routes.post(
    "/blobs",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": {OCTET_STREAM: BINARY}}},
)
async def put(request: Request, chat: ChatDep, name: FileName = "") -> BlobUploadSchema:
    """Stores a picture, sound or video. The same bytes are stored once."""
    blob = await chat.put_blob(await request.body(), name)
    return BlobUploadSchema.model_validate(asdict(blob))


@blob_routes.post("/documents", openapi_extra={"requestBody": {"required": True, "content": {OCTET_STREAM: BINARY}}})
async def read_document(request: Request, chat: ChatDep, name: FileName = "") -> DocumentSchema:
    """The text of a PDF, DOCX, HTML or text file, to be sent as a part of a message. Nothing is stored."""
    return DocumentSchema(text=await chat.read_document(await request.body(), name))


@blob_routes.post(
    "/transcriptions", openapi_extra={"requestBody": {"required": True, "content": {OCTET_STREAM: BINARY}}}
)
async def transcribe(
    request: Request, chat: ChatDep, name: FileName = "", language: Annotated[str, Query(max_length=20)] = ""
) -> TranscriptionSchema:
    """Transcribes speech, so that the text can be edited and sent. `language`: the spoken one. Nothing is stored."""
    work = chat.transcribe(await request.body(), name, language)
    return TranscriptionSchema(text=await run_while_connected(request, work))


@blob_routes.get("/blobs/{digest}", response_class=Response, responses={200: {"content": {OCTET_STREAM: BINARY}}})
async def blob(digest: str, chat: ChatDep, type: str = OCTET_STREAM) -> Response:
    """`type`: the media type of the response."""
    if not _DIGEST.fullmatch(digest):
        raise NotFound("blob", digest)
    if type not in SAFE_TYPES:
        raise BadParameter("type", type, f"must be one of {', '.join(SAFE_TYPES)}")
    data = await chat.blob(digest)
    headers = {
        **attachment(digest),
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "private, max-age=31536000, immutable",
    }
    return Response(data, media_type=type, headers=headers)
