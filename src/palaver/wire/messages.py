"""Messages and their parts. Media travel inside a message as base64, or named by their blob."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal, assert_never

from pydantic import Field

from palaver import messages
from palaver.errors import BadParameter
from palaver.store import blobs, json_values
from palaver.wire.base import Told


class Text(Told):
    type: Literal["text"]
    text: str


class Thinking(Told):
    """What the model thought; never part of its answer."""

    type: Literal["thinking"]
    text: str


class ToolCall(Told):
    """`arguments` is the JSON text as the model wrote it; it may be cut off or wrong."""

    type: Literal["tool_call"]
    id: str
    name: str
    arguments: str
    in_thought: bool


class ToolResult(Told):
    type: Literal["tool_result"]
    call_id: str
    content: str
    name: str


class Media(Told):
    """A picture, sound or video, whole."""

    type: blobs.Kind
    media_type: str
    data: Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class Blob(Told):
    """A picture, sound or video by its digest: to be had at `/api/blobs/{digest}`."""

    type: Literal["blob"]
    kind: blobs.Kind
    media_type: str
    digest: str
    size: int


AnyStored = Text | Thinking | ToolCall | ToolResult | Blob
AnyPart = AnyStored | Media
StoredPart = Annotated[AnyStored, Field(discriminator="type")]
Part = Annotated[AnyPart, Field(discriminator="type")]


class Message(Told):
    role: messages.Role
    parts: list[Part]

    @classmethod
    def of(cls, message: messages.Message) -> Message:
        return cls(role=message.role, parts=[part_of(part) for part in message.parts])

    def value(self) -> messages.Message:
        """A message whose media are all whole; BadParameter where one is named by its blob."""
        values = tuple(part_value(part) for part in self.parts)
        whole = tuple(part for part in values if not isinstance(part, blobs.Blob))
        if len(whole) < len(values):
            raise BadParameter("parts", "blob", "the media must be in the message itself")
        return messages.Message(self.role, whole)


def stored_part_of(part: json_values.StoredPart) -> AnyStored:
    match part:
        case messages.Text(text):
            return Text(type="text", text=text)
        case messages.Thinking(text):
            return Thinking(type="thinking", text=text)
        case messages.ToolCall(id, name, arguments, in_thought):
            return ToolCall(type="tool_call", id=id, name=name, arguments=arguments, in_thought=in_thought)
        case messages.ToolResult(call_id, content, name):
            return ToolResult(type="tool_result", call_id=call_id, content=content, name=name)
        case blobs.Blob(kind, media_type, digest, size):
            return Blob(type="blob", kind=kind, media_type=media_type, digest=digest, size=size)
        case _:
            assert_never(part)


def stored_part_value(part: AnyStored) -> json_values.StoredPart:
    match part:
        case Text(text=text):
            return messages.Text(text)
        case Thinking(text=text):
            return messages.Thinking(text)
        case ToolCall():
            return messages.ToolCall(part.id, part.name, part.arguments, part.in_thought)
        case ToolResult():
            return messages.ToolResult(part.call_id, part.content, part.name)
        case Blob():
            return blobs.Blob(part.kind, part.media_type, part.digest, part.size)
        case _:
            assert_never(part)


def part_of(part: messages.Part | blobs.Blob) -> AnyPart:
    match part:
        case messages.Image(media_type, data):
            return _media_of("image", media_type, data)
        case messages.Audio(media_type, data):
            return _media_of("audio", media_type, data)
        case messages.Video(media_type, data):
            return _media_of("video", media_type, data)
        case _:
            return stored_part_of(part)


def part_value(part: AnyPart) -> messages.Part | blobs.Blob:
    if not isinstance(part, Media):
        return stored_part_value(part)
    try:
        data = base64.b64decode(part.data, validate=True)
    except (binascii.Error, ValueError):
        raise BadParameter("data", part.data[:40], "must be base64") from None
    return media(part.type, part.media_type, data)


def media(kind: blobs.Kind, media_type: str, data: bytes) -> messages.Image | messages.Audio | messages.Video:
    match kind:
        case "image":
            return messages.Image(media_type, data)
        case "audio":
            return messages.Audio(media_type, data)
        case "video":
            return messages.Video(media_type, data)


def _media_of(kind: blobs.Kind, media_type: str, data: bytes) -> Media:
    return Media(type=kind, media_type=media_type, data=base64.b64encode(data).decode())
