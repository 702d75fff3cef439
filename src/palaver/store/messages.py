"""Messages in the tree: append, edit, import, and read as paths, siblings or whole trees.

Writes name their parent, so that two concurrent writers create siblings and never overwrite each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from palaver.errors import EmptyMessage
from palaver.messages import Message, Part, Role, Text, ToolCall, ToolResult, system
from palaver.store import conversations, tree
from palaver.store.blobs import Blob, Blobs
from palaver.store.database import Database
from palaver.store.encoding import StoredPart, load_media, store_media
from palaver.store.errors import Conflict
from palaver.store.records import StoredMessage, TreeNode, format_time
from palaver.store.titles import clean_title

_PREVIEW_LENGTH = 120
"""Characters of the beginning of a message that a drawing of the tree shows."""


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to import, with the id it has in its source."""

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
        """Inserts the message under its parent (None: at the root), durably.

        With an idempotency `key` that was used before, returns the message of the first call. The head moves to the new
        message if it still is the parent, or `expected_head` if that is given.
        """
        return self._insert(
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
        """Inserts an edited message as a sibling; the old one stays. An edited reply has text but no tokens."""
        old = self.get(message_id)
        return self._insert(
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

    def append_all(self, conversation_id: str, new_messages: Sequence[NewMessage], head: str | None = None) -> bool:
        """Fills an empty conversation in one transaction. Returns False, without a change, if it isn't empty.

        Every parent comes before its children. `head` is the source id of the head; by default the last message. The
        conversation is then as old as its messages.
        """
        if not new_messages:
            return False
        parts = [store_media(new_message.message.parts, self._blobs) for new_message in new_messages]
        with self._database.write_transaction() as connection:
            if tree.nodes(connection, conversation_id):
                return False
            stored_ids: dict[str | None, str | None] = {None: None}
            for new_message, stored_parts in zip(new_messages, parts, strict=True):
                new = _tree_message(conversation_id, stored_ids[new_message.parent], new_message, stored_parts)
                if new_message.parent is None:
                    tree.touch_conversation(connection, new)
                stored_ids[new_message.id] = tree.insert_row(connection, new)
            tree.set_head(connection, conversation_id, stored_ids.get(head) or stored_ids[new_messages[-1].id])
            times = [format_time(one.created_at) for one in new_messages if one.created_at is not None]
            if times:
                tree.set_times(connection, conversation_id, min(times), max(times))
        return True

    def get(self, id: str, owner: str | None = None) -> StoredMessage:
        with self._database.read_transaction() as connection:
            return tree.get_message(connection, id, owner=owner)

    def path(self, leaf_id: str) -> tuple[StoredMessage, ...]:
        """A branch: from the root to this message."""
        with self._database.read_transaction() as connection:
            return tree.get_path(connection, leaf_id)

    def siblings(self, id: str) -> tuple[StoredMessage, ...]:
        """The message and the others under the same parent, oldest first."""
        with self._database.read_transaction() as connection:
            message = tree.get_message(connection, id)
            return tree.list_children(connection, message.conversation_id, message.parent_id)

    def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]:
        """The structure of the whole tree, every parent before its children."""
        with self._database.read_transaction() as connection:
            conversations.get_conversation(connection, conversation_id)
            return tree.nodes(connection, conversation_id)

    def previews(self, conversation_id: str) -> dict[str, str]:
        """The beginning of every message, on one line, by its id."""
        return {one.id: _preview(one) for one in self.all(conversation_id)}

    def all(self, conversation_id: str) -> tuple[StoredMessage, ...]:
        with self._database.read_transaction() as connection:
            conversations.get_conversation(connection, conversation_id)
            return tree.all_messages(connection, conversation_id)

    def newest_leaf(self, conversation_id: str, start_id: str | None = None) -> str | None:
        """The leaf below `start_id` that was written last: the target of a switch to that branch."""
        with self._database.read_transaction() as connection:
            return tree.newest_leaf(connection, conversation_id, start_id)

    def load(self, stored: StoredMessage) -> Message:
        """The message as a plain value, with media read from their blobs."""
        return Message(stored.role, load_media(stored.parts, self._blobs))

    def load_path(self, path: Sequence[StoredMessage]) -> tuple[Message, ...]:
        return tuple(map(self.load, path))

    def _insert(self, new: tree.TreeMessage) -> StoredMessage:
        if new.role is Role.USER and not new.parts:
            raise EmptyMessage
        try:
            with self._database.write_transaction() as connection:
                if found := tree.find_by_key(connection, new):
                    return found
                return tree.get_message(connection, tree.insert_message(connection, new))
        except Conflict:
            return self._existing(new)

    def _existing(self, new: tree.TreeMessage) -> StoredMessage:
        """Two writers used one key at once: returns the message of the first."""
        with self._database.read_transaction() as connection:
            if found := tree.find_by_key(connection, new):
                return found
        raise Conflict(
            "The message was not stored: another program changed the conversation at the same time. Try again."
        )


def _tree_message(
    conversation_id: str, parent_id: str | None, new_message: NewMessage, parts: tuple[StoredPart, ...]
) -> tree.TreeMessage:
    return tree.TreeMessage(
        conversation_id,
        parent_id,
        new_message.message.role,
        parts,
        created_at=None if new_message.created_at is None else format_time(new_message.created_at),
    )


def _preview(message: StoredMessage) -> str:
    """Of its text; else of its tool calls, their results or its thinking. A slice first: a message may be huge."""
    calls = ", ".join(part.name for part in message.parts if isinstance(part, ToolCall))
    results = " ".join(part.content for part in message.parts if isinstance(part, ToolResult))
    for text in (message.text, calls, results, message.thinking):
        if preview := clean_title(text.lstrip()[: 2 * _PREVIEW_LENGTH]):
            return preview[:_PREVIEW_LENGTH]
    return ""


def prompt_messages(system_prompt: str, messages: Iterable[Message]) -> tuple[Message, ...]:
    merged = merge_user_messages(messages)
    return (system(system_prompt), *merged) if system_prompt else merged


def merge_user_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Joins consecutive user messages with a blank line between their texts. The stored messages do not change."""
    done: list[Message] = []
    for message in messages:
        if done and message.role is Role.USER and done[-1].role is Role.USER:
            done[-1] = Message(Role.USER, _join_parts(done[-1].parts, message.parts))
        else:
            done.append(message)
    return tuple(done)


def _join_parts(first: tuple[Part, ...], second: tuple[Part, ...]) -> tuple[Part, ...]:
    if first and second and isinstance(first[-1], Text) and isinstance(second[0], Text):
        return (*first[:-1], Text(f"{first[-1].text}\n\n{second[0].text}"), *second[1:])
    return (*first, *second)
