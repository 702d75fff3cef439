"""What clients send: the bodies of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from palaver.wire.base import Asked, Count, Parameters
from palaver.wire.messages import Message, Part, Text, Thinking, ToolCall, ToolResult

MAX_TEXT = 4 << 20
"""Characters of a message, all its texts together, or of a system prompt."""
MAX_PARTS = 1000
MAX_TAGS = 100
Key = Annotated[
    str | None,
    Field(description="Makes the write happen once, however often it is sent. Also a header: Idempotency-Key."),
]
MAX_TURNS = 256
"""How many turns one stream carries."""


def _checked_parts(parts: list[Part]) -> list[Part]:
    if len(parts) > MAX_PARTS:
        raise ValueError(f"a message has at most {MAX_PARTS} parts")
    if sum(map(_characters, parts)) > MAX_TEXT:
        raise ValueError(f"the texts of a message have at most {MAX_TEXT} characters")
    return parts


def _checked_message(message: Message) -> Message:
    _checked_parts(message.parts)
    return message


def _characters(part: Part) -> int:
    match part:
        case Text() | Thinking():
            return len(part.text)
        case ToolCall():
            return len(part.name) + len(part.arguments)
        case ToolResult():
            return len(part.name) + len(part.content)
        case _:
            return 0


Title = Annotated[str, Field(max_length=10_000)]
System = Annotated[str, Field(max_length=MAX_TEXT)]
Tags = Annotated[list[str], Field(max_length=MAX_TAGS)]
NewParts = Annotated[list[Part], AfterValidator(_checked_parts)]
NewMessage = Annotated[Message, AfterValidator(_checked_message)]


class Create(Asked):
    title: Title = ""
    system: System = ""
    parameters: Parameters = Field(default_factory=dict)
    tags: Tags = Field(default_factory=list)
    key: Key = None


class ChangeConversation(Asked):
    """What is given is set. The parameters are set as a whole."""

    title: Title | None = None
    system: System | None = None
    parameters: Parameters | None = None
    tags: Tags | None = None


class SavePreset(Asked):
    name: str
    system: System = ""
    parameters: Parameters = Field(default_factory=dict)


class DeletePreset(Asked):
    name: str


class Append(Asked):
    parent: str | None
    message: NewMessage
    key: Key = None


class Edit(Asked):
    parts: NewParts
    key: Key = None


class Say(Asked):
    parent: str | None
    message: NewMessage
    parameters: Parameters = Field(default_factory=dict)
    key: Key = None


class Reply(Asked):
    parent: str
    parameters: Parameters = Field(default_factory=dict)
    key: Key = None


class Fork(Asked):
    """A sibling that begins with the reply's first `tokens`, then the token `instead`."""

    tokens: Count
    instead: Count | None = None
    key: Key = None


class Continue(Asked):
    key: Key = None


class MeasureContext(Asked):
    leaf: str | None
    parameters: Parameters = Field(default_factory=dict)


class Client(Asked):
    client: str


class Move(Client):
    to: str | None


class Load(Asked):
    name: str


class Followed(Asked):
    turn: str
    after: Count = 0


class Follow(Asked):
    """Many turns, each after a number, and whether to tell what changes."""

    turns: list[Followed] = Field(default_factory=list, max_length=MAX_TURNS)
    changes: bool = False
