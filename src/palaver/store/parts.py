"""Parts of a message as JSON and back. Media are named by their blob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, assert_never

from palaver.messages import Audio, Image, Part, Text, Thinking, ToolCall, ToolResult, Video
from palaver.store.blobs import Blob, Blobs
from palaver.store.errors import Damaged

StoredPart = Text | Thinking | ToolCall | ToolResult | Blob
"""A part as a message in the store holds it."""

_MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def deposited(parts: Iterable[Part | Blob], blobs: Blobs) -> tuple[StoredPart, ...]:
    """The parts with their media put away as blobs."""
    return tuple(_deposit(part, blobs) for part in parts)


def withdrawn(parts: Iterable[StoredPart], blobs: Blobs) -> tuple[Part, ...]:
    """The parts with their media read back."""
    return tuple(
        _MEDIA[part.kind](part.media_type, blobs.get(part.digest)) if isinstance(part, Blob) else part for part in parts
    )


def digests(parts: Iterable[StoredPart]) -> set[str]:
    return {part.digest for part in parts if isinstance(part, Blob)}


def to_json(parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    return [_to_json(part) for part in parts]


def from_json(values: Sequence[Mapping[str, Any]]) -> tuple[StoredPart, ...]:
    return tuple(_from_json(value) for value in values)


def _deposit(part: Part | Blob, blobs: Blobs) -> StoredPart:
    match part:
        case Image(media_type, data):
            return Blob("image", media_type, blobs.put(data), len(data))
        case Audio(media_type, data):
            return Blob("audio", media_type, blobs.put(data), len(data))
        case Video(media_type, data):
            return Blob("video", media_type, blobs.put(data), len(data))
        case _:
            return part


def _to_json(part: StoredPart) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Thinking(text):
            return {"type": "thinking", "text": text}
        case ToolCall(id, name, arguments, in_thought):
            call = {"type": "tool_call", "id": id, "name": name, "arguments": arguments}
            return {**call, "in_thought": True} if in_thought else call
        case ToolResult(call_id, content, name):
            return {"type": "tool_result", "call_id": call_id, "content": content, "name": name}
        case Blob(kind, media_type, digest, size):
            return {"type": kind, "media_type": media_type, "digest": digest, "size": size}
        case _:
            assert_never(part)


def _from_json(value: Mapping[str, Any]) -> StoredPart:
    match value:
        case {"type": "text", "text": text}:
            return Text(text)
        case {"type": "thinking", "text": text}:
            return Thinking(text)
        case {"type": "tool_call", "id": id, "name": name, "arguments": arguments}:
            return ToolCall(id, name, arguments, value.get("in_thought", False))
        case {"type": "tool_result", "call_id": call_id, "content": content, "name": name}:
            return ToolResult(call_id, content, name)
        case {"type": "image" | "audio" | "video" as kind, "media_type": media_type, "digest": digest, "size": size}:
            return Blob(kind, media_type, digest, size)
        case _:
            raise Damaged(f"A message holds a part that is not known: {value.get('type')!r}.")
