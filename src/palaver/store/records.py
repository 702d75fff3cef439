"""What the store hands out: frozen values with an identity."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from palaver.errors import BadParameter
from palaver.events import Usage
from palaver.messages import Role, Text, Thinking
from palaver.store.json_values import ReplySettings, StoredPart


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


class ReplyStatus(StrEnum):
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

    status: ReplyStatus
    settings: ReplySettings
    usage: Usage | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StoredMessage:
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
class TreeNode:
    """A message's place alone: what a picture of the tree needs."""

    id: str
    parent_id: str | None
    role: Role
    created_at: datetime


_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 16


def new_id() -> str:
    """80 random bits in letters that are hard to mistake for each other."""
    number = secrets.randbits(5 * _LENGTH)
    return "".join(_LETTERS[(number >> (5 * place)) & 31] for place in range(_LENGTH))


def current_time() -> int:
    """Microseconds since 1970, UTC: how every time is stored."""
    return time.time_ns() // 1000


def parse_time(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1e6, UTC)


MAX_NAME = 200
MAX_TITLE = 200
_MADE_TITLE = 60
_UNWRITABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]+")


def check_name(what: str, name: str) -> str:
    """The same name, or BadParameter where a database or a person could not read it."""
    if not name or len(name) > MAX_NAME:
        raise BadParameter(what, name[:MAX_NAME], f"must have 1 to {MAX_NAME} characters")
    if _UNWRITABLE.search(name):
        raise BadParameter(what, name, "must not hold control characters")
    return name


def clean_title(title: str) -> str:
    return " ".join(_UNWRITABLE.sub(" ", title).split())[:MAX_TITLE]


def derive_title(text: str) -> str:
    """A title from a message: its first line with something in it, cut between words."""
    line = next((line for line in text.splitlines() if re.search(r"\w", line)), text)
    line = clean_title(line.lstrip("#>*- \t"))
    if len(line) <= _MADE_TITLE:
        return line
    cut = line[:_MADE_TITLE]
    whole, space, _ = cut.rpartition(" ")
    return (whole if space and len(whole) > _MADE_TITLE // 2 else cut) + "…"
