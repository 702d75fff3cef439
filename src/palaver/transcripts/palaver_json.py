"""Palaver's lossless export: a whole conversation, with all branches and parts, as one line of JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime
from typing import Any, assert_never

from palaver.messages import Audio, Image, Message, Part, Role, Text, Thinking, ToolCall, ToolResult, Video
from palaver.transcripts.jsonl import json_line
from palaver.transcripts.transcript import ReadResult, Transcript, TranscriptEntry

_FORMAT = "palaver conversation"
_MEDIA_TYPES: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def write(transcript: Transcript) -> str:
    return json_line(
        {
            "format": _FORMAT,
            "title": transcript.title,
            "system": transcript.system,
            "tags": list(transcript.tags),
            "parameters": dict(transcript.parameters),
            "head": transcript.head,
            "tree": [_encode_entry(entry) for entry in transcript.entries],
        }
    )


def matches(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == _FORMAT


def parse(value: Mapping[str, Any]) -> ReadResult:
    return ReadResult(
        (
            Transcript(
                tuple(_decode_entry(one) for one in value["tree"]),
                title=value["title"],
                system=value["system"],
                tags=tuple(value["tags"]),
                parameters=value["parameters"],
                head=value["head"],
            ),
        )
    )


def _encode_entry(entry: TranscriptEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "parent": entry.parent,
        "role": entry.message.role.value,
        "parts": [_encode_part(part) for part in entry.message.parts],
        "created_at": None if entry.created_at is None else entry.created_at.isoformat(),
        "model": entry.model,
        "whole": entry.complete,
    }


def _decode_entry(value: Mapping[str, Any]) -> TranscriptEntry:
    time = value["created_at"]
    return TranscriptEntry(
        value["id"],
        value["parent"],
        Message(Role(value["role"]), tuple(_decode_part(part) for part in value["parts"])),
        None if time is None else datetime.fromisoformat(time),
        value["model"],
        value["whole"],
    )


def _encode_part(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Thinking(text):
            return {"type": "thinking", "text": text}
        case ToolCall(id, name, arguments, in_thought):
            return {"type": "tool_call", "id": id, "name": name, "arguments": arguments, "in_thought": in_thought}
        case ToolResult(call_id, content, name):
            return {"type": "tool_result", "call_id": call_id, "content": content, "name": name}
        case Image() | Audio() | Video():
            return _encode_media(part)
        case _:
            assert_never(part)


def _encode_media(part: Image | Audio | Video) -> dict[str, Any]:
    facts = {"name": part.name, "width": part.width, "height": part.height, "seconds": part.seconds}
    known = {name: value for name, value in facts.items() if value}
    data = base64.b64encode(part.data).decode()
    return {"type": part.type, "media_type": part.media_type, **known, "data": data}


def _decode_part(value: Mapping[str, Any]) -> Part:
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "thinking", "text": str(text)}:
            return Thinking(text)
        case {"type": "tool_call", "id": str(id), "name": str(name), "arguments": str(arguments)}:
            return ToolCall(id, name, arguments, bool(value.get("in_thought")))
        case {"type": "tool_result", "call_id": str(call_id), "content": str(content), "name": str(name)}:
            return ToolResult(call_id, content, name)
        case {"type": "image" | "audio" | "video" as kind, "media_type": str(media_type), "data": str(data)}:
            name, seconds = str(value.get("name", "")), float(value.get("seconds", 0))
            width, height = int(value.get("width", 0)), int(value.get("height", 0))
            return _MEDIA_TYPES[kind](media_type, base64.b64decode(data), name, width, height, seconds)
        case _:
            raise ValueError(f"unknown part: {str(value)[:80]}")
