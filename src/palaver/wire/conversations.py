"""Conversations, the messages in them, and where a client stands."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from palaver import messages, store
from palaver.chat import interface
from palaver.wire.base import Told
from palaver.wire.events import Usage
from palaver.wire.messages import StoredPart, stored_part_of, stored_part_value
from palaver.wire.sampling import Settings


class Conversation(Told):
    id: str
    owner_id: str
    title: str
    title_given: bool
    """Whether a person chose the title; else it was made from the first message."""
    system: str
    parameters: dict[str, Any]
    tags: tuple[str, ...]
    head_id: str | None
    """A hint: the message somebody was at last. Every client has a cursor of its own."""
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None

    @classmethod
    def of(cls, conversation: store.Conversation) -> Conversation:
        return cls.model_validate(conversation)

    def value(self) -> store.Conversation:
        return store.Conversation(**dict(self))


class Preset(Told):
    """What a user likes to set for conversations, under a name."""

    name: str
    system: str
    """Empty: says nothing of the system prompt."""
    parameters: dict[str, Any]

    @classmethod
    def of(cls, preset: store.Preset) -> Preset:
        return cls.model_validate(preset)

    def value(self) -> store.Preset:
        return store.Preset(**dict(self))


class StoredReply(Told):
    """What made a reply, and how it went. Every status but running and done can be continued."""

    status: store.ReplyStatus
    settings: Settings
    usage: Usage | None
    timings: dict[str, float]
    error: str | None
    started_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def of(cls, reply: store.StoredReply) -> StoredReply:
        return cls(
            status=reply.status,
            settings=Settings.of(reply.settings),
            usage=None if reply.usage is None else Usage.of(reply.usage),
            timings=dict(reply.timings),
            error=reply.error,
            started_at=reply.started_at,
            ended_at=reply.ended_at,
        )

    def value(self) -> store.StoredReply:
        usage = None if self.usage is None else self.usage.value()
        return store.StoredReply(**{**dict(self), "settings": self.settings.value(), "usage": usage})


class Stored(Told):
    """A message in its place in the tree. `reply` is null for what no model said here."""

    id: str
    conversation_id: str
    parent_id: str | None
    role: messages.Role
    parts: list[StoredPart]
    created_at: datetime
    edit_of: str | None
    reply: StoredReply | None

    @classmethod
    def of(cls, stored: store.StoredMessage) -> Stored:
        return cls(
            id=stored.id,
            conversation_id=stored.conversation_id,
            parent_id=stored.parent_id,
            role=stored.role,
            parts=[stored_part_of(part) for part in stored.parts],
            created_at=stored.created_at,
            edit_of=stored.edit_of,
            reply=None if stored.reply is None else StoredReply.of(stored.reply),
        )

    def value(self) -> store.StoredMessage:
        parts = tuple(stored_part_value(part) for part in self.parts)
        reply = None if self.reply is None else self.reply.value()
        return store.StoredMessage(**{**dict(self), "parts": parts, "reply": reply})


class Said(Told):
    """A message and the reply that was begun to it."""

    message: Stored
    reply: Stored

    @classmethod
    def of(cls, said: interface.SentMessage) -> Said:
        return cls(message=Stored.of(said.message), reply=Stored.of(said.reply))

    def value(self) -> interface.SentMessage:
        return interface.SentMessage(self.message.value(), self.reply.value())


class Node(Told):
    """A message's place alone: what a picture of the tree needs."""

    id: str
    parent_id: str | None
    role: messages.Role
    created_at: datetime

    @classmethod
    def of(cls, node: store.TreeNode) -> Node:
        return cls.model_validate(node)

    def value(self) -> store.TreeNode:
        return store.TreeNode(**dict(self))


class Hit(Told):
    """A message that a search found."""

    conversation_id: str
    title: str
    message_id: str
    role: messages.Role
    created_at: datetime
    snippet: str

    @classmethod
    def of(cls, hit: store.SearchHit) -> Hit:
        return cls.model_validate(hit)

    def value(self) -> store.SearchHit:
        return store.SearchHit(**dict(self))


class Cursor(Told):
    """Where a client stands; null is before the first message."""

    message_id: str | None
    can_undo: bool
    can_redo: bool

    @classmethod
    def of(cls, cursor: store.Cursor) -> Cursor:
        return cls.model_validate(cursor)

    def value(self) -> store.Cursor:
        return store.Cursor(**dict(self))


class Leaf(Told):
    """A message's id, or null where there is none."""

    id: str | None


class BlobPut(Told):
    digest: str
    size: int
