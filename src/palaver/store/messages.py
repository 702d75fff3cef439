"""Messages in the tree: append, edit, and every way to look at what is there.

Writes name their parent, so that two writers make siblings and never an overwrite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from palaver.errors import EmptyMessage
from palaver.messages import Message, Part, Role, Text, system
from palaver.store import conversations, tree
from palaver.store.blobs import Blob, Blobs
from palaver.store.database import Database
from palaver.store.errors import Conflict
from palaver.store.json_values import StoredPart, load_media, store_media
from palaver.store.records import StoredMessage, TreeNode


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message from elsewhere, with the id it had there."""

    id: str
    parent: str | None
    message: Message
    created_at: datetime | None = None


class Messages:
    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs

    def append(
        self,
        conversation_id: str,
        parent_id: str | None,
        message: Message,
        *,
        key: str | None = None,
        expected_head: str | None = None,
    ) -> StoredMessage:
        """Puts the message under its parent (None: at the root), durably.

        With a `key` that was used before, gives what was put then. The head follows where it still is the parent,
        or `expected_head` where that is given.
        """
        return self._put(
            tree.TreeMessage(
                conversation_id,
                parent_id,
                message.role,
                store_media(message.parts, self._blobs),
                key=key,
                expected_head=parent_id if expected_head is None else expected_head,
            )
        )

    def edit(
        self,
        message_id: str,
        parts: Iterable[Part | Blob],
        *,
        key: str | None = None,
        expected_head: str | None = None,
    ) -> StoredMessage:
        """Another wording of a message, as its sibling; the old one stays. An edited reply is text without tokens."""
        old = self.get(message_id)
        return self._put(
            tree.TreeMessage(
                old.conversation_id,
                old.parent_id,
                old.role,
                store_media(parts, self._blobs),
                key=key,
                edit_of=message_id,
                expected_head=message_id if expected_head is None else expected_head,
            )
        )

    def append_all(self, conversation_id: str, arrivals: Sequence[NewMessage], head: str | None = None) -> bool:
        """Fills an empty conversation, all at once or not at all; False, and nothing done, where it isn't empty.

        Every parent comes before its children. `head` is the id that the head had elsewhere; by default the last.
        """
        if not arrivals:
            return False
        parts = [store_media(arrival.message.parts, self._blobs) for arrival in arrivals]
        with self._database.writing() as connection:
            if tree.nodes(connection, conversation_id):
                return False
            places: dict[str | None, str | None] = {None: None}
            for arrival, stored_parts in zip(arrivals, parts, strict=True):
                new = _arrived(conversation_id, places[arrival.parent], arrival, stored_parts)
                if arrival.parent is None:
                    tree.touch(connection, new)
                places[arrival.id] = tree.insert_new(connection, new)
            tree.set_head(connection, conversation_id, places.get(head) or places[arrivals[-1].id])
        return True

    def get(self, id: str) -> StoredMessage:
        with self._database.reading() as connection:
            return tree.message_row(connection, id)

    def path(self, leaf_id: str) -> tuple[StoredMessage, ...]:
        """A branch: from the root to this message."""
        with self._database.reading() as connection:
            return tree.message_path(connection, leaf_id)

    def siblings(self, id: str) -> tuple[StoredMessage, ...]:
        """The message and the others under the same parent, the oldest first."""
        with self._database.reading() as connection:
            message = tree.message_row(connection, id)
            return tree.child_messages(connection, message.conversation_id, message.parent_id)

    def children(self, conversation_id: str, parent_id: str | None) -> tuple[StoredMessage, ...]:
        with self._database.reading() as connection:
            return tree.child_messages(connection, conversation_id, parent_id)

    def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]:
        """The shape of the whole tree, every parent before its children."""
        with self._database.reading() as connection:
            conversations.conversation_row(connection, conversation_id)
            return tree.nodes(connection, conversation_id)

    def everything(self, conversation_id: str) -> tuple[StoredMessage, ...]:
        with self._database.reading() as connection:
            conversations.conversation_row(connection, conversation_id)
            return tree.all_messages(connection, conversation_id)

    def newest_leaf(self, conversation_id: str, start_id: str | None = None) -> str | None:
        """Where a switch to the branch of `start_id` leads: its end that was written to last."""
        with self._database.reading() as connection:
            return tree.newest_leaf(connection, conversation_id, start_id)

    def full(self, stored: StoredMessage) -> Message:
        """The message as a pure value, media read from their blobs."""
        return Message(stored.role, load_media(stored.parts, self._blobs))

    def full_path(self, path: Sequence[StoredMessage]) -> tuple[Message, ...]:
        return tuple(map(self.full, path))

    def _put(self, new: tree.TreeMessage) -> StoredMessage:
        if new.role is Role.USER and not new.parts:
            raise EmptyMessage
        try:
            with self._database.writing() as connection:
                if found := tree.message_by_key(connection, new):
                    return found
                return tree.message_row(connection, tree.put_message(connection, new))
        except Conflict:
            return self._with_key(new)

    def _with_key(self, new: tree.TreeMessage) -> StoredMessage:
        """Two writers with one key at once: the second takes what the first has put."""
        with self._database.reading() as connection:
            if found := tree.message_by_key(connection, new):
                return found
        raise Conflict("The message could not be put into the tree: another writer was quicker.")


def _arrived(
    conversation_id: str, parent_id: str | None, arrival: NewMessage, parts: tuple[StoredPart, ...]
) -> tree.TreeMessage:
    return tree.TreeMessage(
        conversation_id,
        parent_id,
        arrival.message.role,
        parts,
        created_at=None if arrival.created_at is None else int(arrival.created_at.timestamp() * 1e6),
    )


def prompt_messages(system_prompt: str, messages: Iterable[Message]) -> tuple[Message, ...]:
    said = merge_user_messages(messages)
    return (system(system_prompt), *said) if system_prompt else said


def merge_user_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Neighbouring messages of the user become one, a blank line between their texts. The record stays as it is."""
    done: list[Message] = []
    for message in messages:
        if done and message.role is Role.USER and done[-1].role is Role.USER:
            done[-1] = Message(Role.USER, _joined(done[-1].parts, message.parts))
        else:
            done.append(message)
    return tuple(done)


def _joined(first: tuple[Part, ...], second: tuple[Part, ...]) -> tuple[Part, ...]:
    if first and second and isinstance(first[-1], Text) and isinstance(second[0], Text):
        return (*first[:-1], Text(f"{first[-1].text}\n\n{second[0].text}"), *second[1:])
    return (*first, *second)
