"""Factories for the tests of the store: conversations, messages, replies, tokens."""

from __future__ import annotations

from palaver.generation import Alternative, Step
from palaver.messages import Text, user
from palaver.sampling import Sampling
from palaver.store import Conversation, Lease, ReplyEnding, ReplySettings, ReplyStatus, Store, StoredMessage, TokenFrame

SETTINGS = ReplySettings(model="sprout", sampling=Sampling(seed=7, temperature=0.5), tokenizer="abc")


def steps(*ids: int) -> tuple[Step, ...]:
    """Log-probabilities that a 32-bit float holds exactly."""
    return tuple(Step(id, -0.5, (Alternative(id, -0.5), Alternative(id + 1, -1.25))) for id in ids)


def new_conversation(store: Store, **settings: object) -> Conversation:
    return store.conversations.create(store.users.ensure().id, **settings)  # type: ignore[arg-type]


def add_message(store: Store, conversation_id: str, parent_id: str | None, text: str) -> StoredMessage:
    return store.messages.append(conversation_id, parent_id, user(text))


def add_reply(store: Store, lease: Lease, conversation_id: str, parent_id: str | None, text: str) -> StoredMessage:
    """Inserts a finished reply, one token per byte."""
    reply = store.replies.start(lease, conversation_id, parent_id, SETTINGS)
    store.replies.append(lease, [TokenFrame(reply.id, 0, steps(*text.encode()))])
    return store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text(text),)))
