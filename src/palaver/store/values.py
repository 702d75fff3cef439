"""What the store hands out: frozen values with an identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from palaver.events import Usage
from palaver.messages import Role, Text, Thinking
from palaver.store.parts import StoredPart
from palaver.store.settings import Settings


@dataclass(frozen=True, slots=True)
class User:
    id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    owner_id: str
    title: str
    title_given: bool
    """Whether a person chose the title; else it was made from the first message."""
    system: str
    parameters: Mapping[str, Any]
    tags: tuple[str, ...]
    head_id: str | None
    """A hint: the message somebody was at last. Every client has a cursor of its own."""
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """What a user likes to set for conversations, under a name."""

    name: str
    system: str
    """Empty: says nothing of the system prompt."""
    parameters: Mapping[str, Any]


class Status(StrEnum):
    """Where a reply stands. Every one but RUNNING and DONE can be continued."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """Somebody stopped it."""
    LENGTH = "length"
    INTERRUPTED = "interrupted"
    """Its process died."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoredReply:
    """What made a reply, and how it went. The tokens are read on their own."""

    status: Status
    settings: Settings
    usage: Usage | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in its place in the tree. Only a reply that runs still changes."""

    id: str
    conversation_id: str
    parent_id: str | None
    role: Role
    parts: tuple[StoredPart, ...]
    created_at: datetime
    edit_of: str | None = None
    """The message this is another wording of."""
    reply: StoredReply | None = None
    """None for what no model said here: users' messages, edited and imported replies."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))


@dataclass(frozen=True, slots=True)
class Node:
    """A message's place alone: what a picture of the tree needs."""

    id: str
    parent_id: str | None
    role: Role
    created_at: datetime
