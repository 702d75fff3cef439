"""Schemas of request bodies, with their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_core import InitErrorDetails

from palaver.encoding import Tagged
from palaver.messages import Audio, Image, PartBase, Role, Text, Thinking, ToolCall, ToolResult, Video
from palaver.store import Blob
from palaver.wire.values import Count, Parameters, RequestModel, ValueModel

MAX_TEXT = 4 << 20
"""The characters of all texts of a message, or of a system prompt."""
MAX_PARTS = 1000
MAX_TAGS = 100
Key = Annotated[
    str | None,
    Field(description="Makes the write happen once, however often it is sent. Also a header: Idempotency-Key."),
]
MAX_TURNS = 256
"""The number of turns that one stream can follow."""


def _complete(kind: type[PartBase]) -> BeforeValidator:
    """Requires every field of the part, also those with a default."""
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]

    def check(value: Any) -> Any:
        missing = [name for name in names if name not in value] if isinstance(value, Mapping) else []
        if missing:
            lines = [InitErrorDetails(type="missing", loc=(name,), input=value) for name in missing]
            raise ValidationError.from_exception_data(kind.__name__, lines)
        return value

    return BeforeValidator(check)


NewPart = Annotated[
    Text
    | Thinking
    | Annotated[ToolCall, _complete(ToolCall)]
    | Annotated[ToolResult, _complete(ToolResult)]
    | Blob
    | Image
    | Audio
    | Video,
    Tagged,
]
"""A part of a message in a request: media are whole, or references to blobs of the caller."""


def _check_parts(parts: list[NewPart]) -> list[NewPart]:
    if len(parts) > MAX_PARTS:
        raise ValueError(f"a message has at most {MAX_PARTS} parts")
    if sum(map(_characters, parts)) > MAX_TEXT:
        raise ValueError(f"the texts of a message have at most {MAX_TEXT} characters")
    return parts


def _check_message(message: MessageSchema) -> MessageSchema:
    _check_parts(message.parts)
    return message


def _characters(part: NewPart) -> int:
    match part:
        case Text(text) | Thinking(text):
            return len(text)
        case ToolCall():
            return len(part.name) + len(part.arguments)
        case ToolResult():
            return len(part.name) + len(part.content)
        case _:
            return 0


class MessageSchema(ValueModel):
    role: Role
    parts: list[NewPart]


Title = Annotated[str, Field(max_length=10_000)]
System = Annotated[str, Field(max_length=MAX_TEXT)]
Tags = Annotated[list[str], Field(max_length=MAX_TAGS)]
NewParts = Annotated[list[NewPart], AfterValidator(_check_parts)]
NewMessage = Annotated[MessageSchema, AfterValidator(_check_message)]


class CreateConversationRequest(RequestModel):
    title: Title = ""
    system: System = ""
    parameters: Parameters = Field(default_factory=dict)
    tags: Tags = Field(default_factory=list)
    key: Key = None


class UpdateConversationRequest(RequestModel):
    """What is given is set. The parameters are set as a whole."""

    title: Title | None = None
    system: System | None = None
    parameters: Parameters | None = None
    tags: Tags | None = None


class SavePresetRequest(RequestModel):
    name: str
    system: System = ""
    parameters: Parameters = Field(default_factory=dict)


class DeletePresetRequest(RequestModel):
    name: str


class AppendMessageRequest(RequestModel):
    parent: str | None
    message: NewMessage
    key: Key = None


class EditMessageRequest(RequestModel):
    parts: NewParts
    key: Key = None


class SendMessageRequest(RequestModel):
    parent: str | None
    message: NewMessage
    parameters: Parameters = Field(default_factory=dict)
    key: Key = None


class StartReplyRequest(RequestModel):
    parent: str
    parameters: Parameters = Field(default_factory=dict)
    key: Key = None


class ForkReplyRequest(RequestModel):
    """A sibling that begins with the reply's first `tokens`, then the token `instead`."""

    tokens: Count
    instead: Count | None = None
    key: Key = None


class ContinueReplyRequest(RequestModel):
    key: Key = None


class ContextUsageRequest(RequestModel):
    leaf: str | None
    parameters: Parameters = Field(default_factory=dict)


class CursorRequest(RequestModel):
    client: str


class MoveCursorRequest(CursorRequest):
    to: str | None


class LoadModelRequest(RequestModel):
    name: str


class TurnPosition(RequestModel):
    turn: str
    after: Count = 0


class FollowRequest(RequestModel):
    """Many turns, each after a number, and whether to tell what changes."""

    turns: list[TurnPosition] = Field(default_factory=list, max_length=MAX_TURNS)
    changes: bool = False
