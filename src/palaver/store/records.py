"""Records that the store returns: frozen values with ids, and the helpers that make ids, times and titles."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from palaver.encoding import Tagged
from palaver.errors import BadParameter
from palaver.events import Usage
from palaver.messages import Role, Text, Thinking
from palaver.store.encoding import ReplySettings, StoredPart


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
    """Whether the user chose the title; else it was derived from the first message."""
    system: str
    parameters: Mapping[str, Any]
    tags: tuple[str, ...]
    head_id: str | None
    """The message that was current last: a hint. Every client has a cursor of its own."""
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Preset:
    """A named system prompt and parameters."""

    name: str
    system: str
    """Empty: the preset does not change the system prompt."""
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConversationDefaults:
    """The system prompt and the parameters that a user's new conversations begin with."""

    system: str
    parameters: Mapping[str, Any]


class ReplyStatus(StrEnum):
    """Where a reply stands. Every one but RUNNING and DONE can be continued."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """Stopped by a client."""
    LENGTH = "length"
    INTERRUPTED = "interrupted"
    """Its process died."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoredReply:
    """The settings and the outcome of a reply. Its tokens are read separately."""

    status: ReplyStatus
    settings: ReplySettings
    usage: Usage | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in the tree. Only a running reply still changes."""

    id: str
    conversation_id: str
    parent_id: str | None
    role: Role
    parts: tuple[Annotated[StoredPart, Tagged], ...]
    created_at: datetime
    edit_of: str | None = None
    """The message that this is an edited version of."""
    reply: StoredReply | None = None
    """None for messages not generated here: user messages, edited and imported replies."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A message's position in the tree, without its content."""

    id: str
    parent_id: str | None
    role: Role
    created_at: datetime


_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_LENGTH = 16


def new_id() -> str:
    """80 random bits in Crockford's base 32."""
    number = secrets.randbits(5 * _ID_LENGTH)
    return "".join(_ID_ALPHABET[(number >> (5 * place)) & 31] for place in range(_ID_LENGTH))


def current_time() -> int:
    """Microseconds since 1970, UTC: how every time is stored."""
    return time.time_ns() // 1000


def parse_time(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1e6, UTC)


def format_time(time: datetime) -> int:
    """The microseconds that `parse_time` reads as this time."""
    return round(time.timestamp() * 1e6)


MAX_NAME = 200
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f\ud800-\udfff]+")


def check_name(field_name: str, name: str) -> str:
    """Returns the name. Raises BadParameter if it is empty, too long or has control characters."""
    if not name or len(name) > MAX_NAME:
        raise BadParameter(field_name, name[:MAX_NAME], f"must have 1 to {MAX_NAME} characters")
    if CONTROL_CHARACTERS.search(name):
        raise BadParameter(field_name, name, "must not hold control characters")
    return name
