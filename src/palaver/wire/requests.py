"""What clients send: the bodies of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from palaver.wire.base import Asked, Count, Parameters
from palaver.wire.messages import Message, Part

Key = Annotated[
    str | None,
    Field(description="Makes the write happen once, however often it is sent. Also a header: Idempotency-Key."),
]
MAX_TURNS = 256
"""How many turns one stream carries."""


class Create(Asked):
    title: str = ""
    system: str = ""
    parameters: Parameters = Field(default_factory=dict)
    tags: list[str] = Field(default_factory=list)
    key: Key = None


class ChangeConversation(Asked):
    """What is given is set. The parameters are set as a whole."""

    title: str | None = None
    system: str | None = None
    parameters: Parameters | None = None
    tags: list[str] | None = None


class SavePreset(Asked):
    name: str
    system: str = ""
    parameters: Parameters = Field(default_factory=dict)


class DeletePreset(Asked):
    name: str


class Append(Asked):
    parent: str | None
    message: Message
    key: Key = None


class Edit(Asked):
    parts: list[Part]
    key: Key = None


class Say(Asked):
    parent: str | None
    message: Message
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
