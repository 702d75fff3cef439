"""Schemas of request bodies, with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from palaver.wire.values import (
    Count,
    MessageSchema,
    Parameters,
    PartField,
    RequestModel,
    TextSchema,
    ThinkingSchema,
    ToolCallSchema,
    ToolResultSchema,
)

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


def _check_parts(parts: list[PartField]) -> list[PartField]:
    if len(parts) > MAX_PARTS:
        raise ValueError(f"a message has at most {MAX_PARTS} parts")
    if sum(map(_characters, parts)) > MAX_TEXT:
        raise ValueError(f"the texts of a message have at most {MAX_TEXT} characters")
    return parts


def _check_message(message: MessageSchema) -> MessageSchema:
    _check_parts(message.parts)
    return message


def _characters(part: PartField) -> int:
    match part:
        case TextSchema() | ThinkingSchema():
            return len(part.text)
        case ToolCallSchema():
            return len(part.name) + len(part.arguments)
        case ToolResultSchema():
            return len(part.name) + len(part.content)
        case _:
            return 0


Title = Annotated[str, Field(max_length=10_000)]
System = Annotated[str, Field(max_length=MAX_TEXT)]
Tags = Annotated[list[str], Field(max_length=MAX_TAGS)]
NewParts = Annotated[list[PartField], AfterValidator(_check_parts)]
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
