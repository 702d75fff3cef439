"""Between the store and transcripts: a conversation taken out, a transcript put in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from palaver.store import Conversation, Status, Store, Stored
from palaver.store.messages import Arrival
from palaver.store.names import MAX_NAME
from palaver.transcripts import whole
from palaver.transcripts.transcript import Entry, Transcript


@dataclass(frozen=True, slots=True)
class Kept:
    conversation: Conversation
    new: bool
    """False where the same transcript had been put in before."""


def take(store: Store, conversation_id: str) -> Transcript:
    """The conversation as it is now, all branches."""
    conversation = store.conversations.get(conversation_id)
    return Transcript(
        tuple(_entry(store, stored) for stored in store.messages.everything(conversation_id)),
        title=conversation.title,
        system=conversation.system,
        tags=conversation.tags,
        parameters=conversation.parameters,
        head=conversation.head_id,
    )


def keep(store: Store, owner: str, transcript: Transcript) -> Kept:
    """Puts the transcript into the store as a conversation of its own; the same one twice is kept once."""
    key = "import " + hashlib.sha256(whole.write(transcript).encode()).hexdigest()
    conversation = store.conversations.create(
        owner,
        title=transcript.title,
        system=transcript.system,
        parameters=transcript.parameters,
        tags=(tag[:MAX_NAME] for tag in transcript.tags),
        key=key,
    )
    new = store.messages.append_all(conversation.id, [_arrival(entry) for entry in transcript.entries], transcript.head)
    return Kept(store.conversations.get(conversation.id, deleted=True), new)


def _entry(store: Store, stored: Stored) -> Entry:
    reply = stored.reply
    return Entry(
        stored.id,
        stored.parent_id,
        store.messages.full(stored),
        stored.created_at,
        reply.settings.model if reply else "",
        reply is None or reply.status is Status.DONE,
    )


def _arrival(entry: Entry) -> Arrival:
    return Arrival(entry.id, entry.parent, entry.message, entry.created_at)
