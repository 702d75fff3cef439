"""Messages in the tree: append, edit, and every way to look at what is there.

Writes name their parent, so that two writers make siblings and never an overwrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from palaver.errors import EmptyMessage
from palaver.messages import Message, Part, Role
from palaver.store import conversations, tree
from palaver.store.blobs import Blob, Blobs
from palaver.store.database import Database
from palaver.store.errors import Conflict
from palaver.store.parts import StoredPart, deposited, withdrawn
from palaver.store.values import Node, Stored


@dataclass(frozen=True, slots=True)
class Arrival:
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
    ) -> Stored:
        """Puts the message under its parent (None: at the root), durably.

        With a `key` that was used before, gives what was put then. The head follows where it still is the parent,
        or `expected_head` where that is given.
        """
        return self._put(
            tree.New(
                conversation_id,
                parent_id,
                message.role,
                deposited(message.parts, self._blobs),
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
    ) -> Stored:
        """Another wording of a message, as its sibling; the old one stays. An edited reply is text without tokens."""
        old = self.get(message_id)
        return self._put(
            tree.New(
                old.conversation_id,
                old.parent_id,
                old.role,
                deposited(parts, self._blobs),
                key=key,
                edit_of=message_id,
                expected_head=message_id if expected_head is None else expected_head,
            )
        )

    def append_all(self, conversation_id: str, arrivals: Sequence[Arrival], head: str | None = None) -> bool:
        """Fills an empty conversation, all at once or not at all; False, and nothing done, where it isn't empty.

        Every parent comes before its children. `head` is the id that the head had elsewhere; by default the last.
        """
        if not arrivals:
            return False
        parts = [deposited(arrival.message.parts, self._blobs) for arrival in arrivals]
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

    def get(self, id: str) -> Stored:
        with self._database.reading() as connection:
            return tree.one(connection, id)

    def path(self, leaf_id: str) -> tuple[Stored, ...]:
        """A branch: from the root to this message."""
        with self._database.reading() as connection:
            return tree.path(connection, leaf_id)

    def siblings(self, id: str) -> tuple[Stored, ...]:
        """The message and the others under the same parent, the oldest first."""
        with self._database.reading() as connection:
            message = tree.one(connection, id)
            return tree.children(connection, message.conversation_id, message.parent_id)

    def children(self, conversation_id: str, parent_id: str | None) -> tuple[Stored, ...]:
        with self._database.reading() as connection:
            return tree.children(connection, conversation_id, parent_id)

    def nodes(self, conversation_id: str) -> tuple[Node, ...]:
        """The shape of the whole tree, every parent before its children."""
        with self._database.reading() as connection:
            conversations.one(connection, conversation_id)
            return tree.nodes(connection, conversation_id)

    def everything(self, conversation_id: str) -> tuple[Stored, ...]:
        with self._database.reading() as connection:
            conversations.one(connection, conversation_id)
            return tree.everything(connection, conversation_id)

    def newest_leaf(self, conversation_id: str, start_id: str | None = None) -> str | None:
        """Where a switch to the branch of `start_id` leads: its end that was written to last."""
        with self._database.reading() as connection:
            return tree.newest_leaf(connection, conversation_id, start_id)

    def full(self, stored: Stored) -> Message:
        """The message as a pure value, media read from their blobs."""
        return Message(stored.role, withdrawn(stored.parts, self._blobs))

    def full_path(self, path: Sequence[Stored]) -> tuple[Message, ...]:
        return tuple(map(self.full, path))

    def _put(self, new: tree.New) -> Stored:
        if new.role is Role.USER and not new.parts:
            raise EmptyMessage
        try:
            with self._database.writing() as connection:
                if found := tree.keyed(connection, new):
                    return found
                return tree.one(connection, tree.put(connection, new))
        except Conflict:
            return self._with_key(new)

    def _with_key(self, new: tree.New) -> Stored:
        """Two writers with one key at once: the second takes what the first has put."""
        with self._database.reading() as connection:
            if found := tree.keyed(connection, new):
                return found
        raise Conflict("The message could not be put into the tree: another writer was quicker.")


def _arrived(conversation_id: str, parent_id: str | None, arrival: Arrival, parts: tuple[StoredPart, ...]) -> tree.New:
    return tree.New(
        conversation_id,
        parent_id,
        arrival.message.role,
        parts,
        created_at=None if arrival.created_at is None else int(arrival.created_at.timestamp() * 1e6),
    )
