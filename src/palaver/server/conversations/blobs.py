"""Pictures, sound and video, by their digest. What is served can be shown but never runs."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response

from palaver.errors import BadParameter
from palaver.server.conversations.files import attachment
from palaver.server.conversations.owned import Mine
from palaver.store import NotFound
from palaver.wire.conversations import BlobPut

routes = APIRouter(tags=["blobs"])
ANYTHING = "application/octet-stream"
HARMLESS = (
    *("image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/bmp"),
    *("audio/wav", "audio/x-wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/mp4", "audio/webm", "audio/aac"),
    *("video/mp4", "video/webm", "video/ogg", ANYTHING),
)
"""Types that a browser can show but in which nothing runs; a drawing in XML is none of them."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BYTES = {"schema": {"type": "string", "format": "binary"}}


@routes.post(
    "/blobs",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": {ANYTHING: _BYTES}}},
)
async def put(request: Request, chat: Mine) -> BlobPut:
    """Takes the bytes as they are; the same bytes are kept once."""
    data = await request.body()
    return BlobPut(digest=await chat.put_blob(data), size=len(data))


@routes.get("/blobs/{digest}", response_class=Response, responses={200: {"content": {ANYTHING: _BYTES}}})
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
