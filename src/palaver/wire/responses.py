"""Schemas of what the routes of `/api` return: conversations, stored messages, cursors, tokens, the model."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from palaver import messages, store
from palaver.chat import interface
from palaver.formats import switches
from palaver.wire.values import (
    Logprob,
    ReplySettingsSchema,
    SamplingSchema,
    StoredPartField,
    UsageSchema,
    ValueModel,
    decode_logprob,
    decode_stored_part,
    encode_stored_part,
)


class ConversationSchema(ValueModel):
    id: str
    owner_id: str
    title: str
    title_given: bool
    """Whether a person chose the title; else it was made from the first message."""
    system: str
    parameters: dict[str, Any]
    tags: tuple[str, ...]
    head_id: str | None
    """The message last used by any client, as a hint. Every client has its own cursor."""
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None

    @classmethod
    def from_value(cls, conversation: store.Conversation) -> ConversationSchema:
        return cls.model_validate(conversation)

    def to_value(self) -> store.Conversation:
        return store.Conversation(**dict(self))


class PresetSchema(ValueModel):
    """What a user likes to set for conversations, under a name."""

    name: str
    system: str
    """Empty: the preset leaves the system prompt as it is."""
    parameters: dict[str, Any]

    @classmethod
    def from_value(cls, preset: store.Preset) -> PresetSchema:
        return cls.model_validate(preset)

    def to_value(self) -> store.Preset:
        return store.Preset(**dict(self))


class StoredReplySchema(ValueModel):
    """What made a reply, and how it went. Every status but running and done can be continued."""

    status: store.ReplyStatus
    settings: ReplySettingsSchema
    usage: UsageSchema | None
    timings: dict[str, float]
    error: str | None
    started_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def from_value(cls, reply: store.StoredReply) -> StoredReplySchema:
        return cls(
            status=reply.status,
            settings=ReplySettingsSchema.from_value(reply.settings),
            usage=None if reply.usage is None else UsageSchema.from_value(reply.usage),
            timings=dict(reply.timings),
            error=reply.error,
            started_at=reply.started_at,
            ended_at=reply.ended_at,
        )

    def to_value(self) -> store.StoredReply:
        usage = None if self.usage is None else self.usage.to_value()
        return store.StoredReply(**{**dict(self), "settings": self.settings.to_value(), "usage": usage})


class StoredMessageSchema(ValueModel):
    """A message in its place in the tree. `reply` is null for what no model said here."""

    id: str
    conversation_id: str
    parent_id: str | None
    role: messages.Role
    parts: list[StoredPartField]
    created_at: datetime
    edit_of: str | None
    reply: StoredReplySchema | None

    @classmethod
    def from_value(cls, stored: store.StoredMessage) -> StoredMessageSchema:
        return cls(
            id=stored.id,
            conversation_id=stored.conversation_id,
            parent_id=stored.parent_id,
            role=stored.role,
            parts=[encode_stored_part(part) for part in stored.parts],
            created_at=stored.created_at,
            edit_of=stored.edit_of,
            reply=None if stored.reply is None else StoredReplySchema.from_value(stored.reply),
        )

    def to_value(self) -> store.StoredMessage:
        parts = tuple(decode_stored_part(part) for part in self.parts)
        reply = None if self.reply is None else self.reply.to_value()
        return store.StoredMessage(**{**dict(self), "parts": parts, "reply": reply})


class SentMessageSchema(ValueModel):
    """A message and the reply that was begun to it."""

    message: StoredMessageSchema
    reply: StoredMessageSchema

    @classmethod
    def from_value(cls, sent: interface.SentMessage) -> SentMessageSchema:
        return cls(
            message=StoredMessageSchema.from_value(sent.message), reply=StoredMessageSchema.from_value(sent.reply)
        )

    def to_value(self) -> interface.SentMessage:
        return interface.SentMessage(self.message.to_value(), self.reply.to_value())


class TreeNodeSchema(ValueModel):
    """A message's place alone: what a picture of the tree needs."""

    id: str
    parent_id: str | None
    role: messages.Role
    created_at: datetime

    @classmethod
    def from_value(cls, node: store.TreeNode) -> TreeNodeSchema:
        return cls.model_validate(node)

    def to_value(self) -> store.TreeNode:
        return store.TreeNode(**dict(self))


class SearchHitSchema(ValueModel):
    """A message that a search found."""

    conversation_id: str
    title: str
    message_id: str
    role: messages.Role
    created_at: datetime
    snippet: str

    @classmethod
    def from_value(cls, hit: store.SearchHit) -> SearchHitSchema:
        return cls.model_validate(hit)

    def to_value(self) -> store.SearchHit:
        return store.SearchHit(**dict(self))


class CursorSchema(ValueModel):
    """Where a client stands; null is before the first message."""

    message_id: str | None
    can_undo: bool
    can_redo: bool

    @classmethod
    def from_value(cls, cursor: store.Cursor) -> CursorSchema:
        return cls.model_validate(cursor)

    def to_value(self) -> store.Cursor:
        return store.Cursor(**dict(self))


class LeafSchema(ValueModel):
    """A message's id, or null where there is none."""

    id: str | None


class BlobUploadSchema(ValueModel):
    digest: str
    size: int


class TokenAlternativeSchema(ValueModel):
    token_id: int
    text: str
    logprob: Logprob


class ReplyTokenSchema(ValueModel):
    """One token of a reply as a person sees it. `logprob` is null for words that nobody drew."""

    token_id: int
    text: str
    logprob: Logprob | None
    alternatives: list[TokenAlternativeSchema]

    @classmethod
    def from_value(cls, token: interface.ReplyToken) -> ReplyTokenSchema:
        return cls.model_validate(token)

    def to_value(self) -> interface.ReplyToken:
        others = (
            interface.TokenAlternative(one.token_id, one.text, decode_logprob(one.logprob)) for one in self.alternatives
        )
        drawn = None if self.logprob is None else decode_logprob(self.logprob)
        return interface.ReplyToken(self.token_id, self.text, drawn, tuple(others))


class ContextUsageSchema(ValueModel):
    """How full the context is: what the next turn's prompt would hold, and what the model can take."""

    used: int
    limit: int
    cached: int
    """The tokens of the last turn's prompt that were in the cache."""

    @classmethod
    def from_value(cls, gauge: interface.ContextUsage) -> ContextUsageSchema:
        return cls.model_validate(gauge)

    def to_value(self) -> interface.ContextUsage:
        return interface.ContextUsage(**dict(self))


class ConversationChangeSchema(ValueModel):
    """Something happened in a conversation: whoever shows it may look again."""

    conversation_id: str
    what: str
    """created, changed, deleted, message, turn (started or continued), ended."""
    message_id: str | None

    @classmethod
    def from_value(cls, change: interface.ConversationChange) -> ConversationChangeSchema:
        return cls.model_validate(change)

    def to_value(self) -> interface.ConversationChange:
        return interface.ConversationChange(**dict(self))


class RawReplySchema(ValueModel):
    """A reply as the model wrote it, markers and all."""

    text: str


class SwitchSchema(ValueModel):
    """One variable of the model's chat template."""

    name: str
    kind: switches.SwitchKind
    type: str
    values: list[Any]
    """The values that it is known to accept; efforts in ascending order."""
    others: bool
    """Whether it accepts other values too."""
    default: Any
    on: Any
    off: Any
    form: str
    changes: str
    """Its effect, for users."""

    @classmethod
    def from_value(cls, switch: switches.Switch) -> SwitchSchema:
        return cls.model_validate(switch)

    def to_value(self) -> switches.Switch:
        return switches.Switch(**{**dict(self), "values": tuple(self.values)})


class ModelCardSchema(ValueModel):
    """The model in use, or on its way. What is known only of a loaded model is empty until then."""

    name: str
    state: interface.ModelState
    progress: float | None
    """From 0 to 1 while it loads; null if it is not known."""
    note: str
    """The current step while it loads, or the reason why loading failed."""
    context_length: int
    device: str
    dtype: str
    reuse: str
    exactness: str = ""
    steps: str = ""
    """The code that computes decoding steps, and why it is not compiled code."""
    fingerprint: str = ""
    """The fingerprint of the engine, which is stored with each reply."""
    defaults: SamplingSchema
    thinks: bool
    switches: list[SwitchSchema]
    takes_tools: bool
    media: tuple[str, ...]
    notices: tuple[str, ...]

    @classmethod
    def from_value(cls, card: interface.ModelCard) -> ModelCardSchema:
        return cls.model_validate(card)

    def to_value(self) -> interface.ModelCard:
        decoded = {"defaults": self.defaults.to_value(), "switches": tuple(one.to_value() for one in self.switches)}
        return interface.ModelCard(**{**dict(self), **decoded})
