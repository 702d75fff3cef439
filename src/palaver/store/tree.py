"""Queries on the message tree inside one transaction: insert a message, read a path, list children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, insert, literal, select, update

from palaver.messages import Role
from palaver.store.encoding import StoredPart, blob_digests, decode_parts, decode_settings, decode_usage, encode_parts
from palaver.store.errors import Conflict, NotFound
from palaver.store.records import (
    ReplyStatus,
    StoredMessage,
    StoredReply,
    TreeNode,
    check_name,
    current_time,
    new_id,
    parse_time,
)
from palaver.store.schema import conversations, message_blobs, messages, replies
from palaver.store.search import index
from palaver.store.titles import derive_message_title


@dataclass(frozen=True, slots=True)
class TreeMessage:
    """A message to insert into a tree."""

    conversation_id: str
    parent_id: str | None
    role: Role
    parts: tuple[StoredPart, ...]
    key: str | None = None
    edit_of: str | None = None
    expected_head: str | None = None
    """The head moves to the new message if it still is this one."""
    created_at: int | None = None
    """Microseconds; by default the current time."""


def insert_message(connection: Connection, new: TreeMessage) -> str:
    """Inserts the message and returns its id. The caller has checked that its key is new.

    Raises NotFound if its conversation or its parent does not exist.
    """
    _check_parent(connection, new)
    head = touch_conversation(connection, new)
    id = insert_row(connection, new)
    if head == new.expected_head:
        set_head(connection, new.conversation_id, id)
    return id


def insert_row(connection: Connection, new: TreeMessage) -> str:
    """Inserts the row, its index entries and its blob references. The caller has checked the parent."""
    values: dict[str, Any] = {
        "id": new_id(),
        "conversation_id": new.conversation_id,
        "parent_id": new.parent_id,
        "role": new.role.value,
        "parts": encode_parts(new.parts),
        "edit_of": new.edit_of,
        "key": new.key,
        "created_at": current_time() if new.created_at is None else new.created_at,
    }
    seq = connection.execute(insert(messages).values(values)).inserted_primary_key
    assert seq is not None
    link_blobs(connection, values["id"], new.parts)
    index(connection, seq[0], values["parts"])
    return str(values["id"])


def set_times(connection: Connection, conversation: str, created_at: int, updated_at: int) -> None:
    """Sets when the conversation began and was last written to; not in the future."""
    now = current_time()
    values = {"created_at": min(created_at, now), "updated_at": min(updated_at, now)}
    connection.execute(update(conversations).where(conversations.c.id == conversation).values(values))


def set_head(connection: Connection, conversation: str, head: str | None) -> None:
    connection.execute(update(conversations).where(conversations.c.id == conversation).values(head_id=head))


def find_by_key(connection: Connection, new: TreeMessage) -> StoredMessage | None:
    """The message that was inserted with the same key. Raises Conflict if its content differs."""
    if new.key is None:
        return None
    check_name("key", new.key)
    query = select_messages().where(messages.c.conversation_id == new.conversation_id, messages.c.key == new.key)
    row = connection.execute(query).first()
    if row is None:
        return None
    found = stored_message(row)
    same = (found.parent_id, found.role) == (new.parent_id, new.role)
    if not same or (found.reply is None and found.parts != new.parts):
        raise Conflict(f"The key {new.key!r} was used for another message.")
    return found


def link_blobs(connection: Connection, id: str, parts: tuple[StoredPart, ...]) -> None:
    rows = [{"message_id": id, "digest": digest} for digest in sorted(blob_digests(parts))]
    if rows:
        connection.execute(insert(message_blobs), rows)


def get_message(connection: Connection, id: str, deleted: bool = False, owner: str | None = None) -> StoredMessage:
    """Raises NotFound if there is none, or the conversation is not of this owner. Messages of deleted conversations
    are included only with `deleted`, whoever owns them."""
    values = {"id": id} if deleted or owner is None else {"id": id, "owner": owner}
    row = connection.execute(_select_message(deleted, len(values) > 1), values).first()
    if row is None:
        raise NotFound("message", id)
    return stored_message(row)


@cache
def _select_message(deleted: bool, of_owner: bool) -> Select[Any]:
    """Built once: that takes longer than it runs."""
    query = select_messages() if deleted else exclude_deleted(select_messages())
    if of_owner:
        query = query.where(conversations.c.owner_id == bindparam("owner"))
    return query.where(messages.c.id == bindparam("id"))


def get_path(connection: Connection, leaf: str) -> tuple[StoredMessage, ...]:
    """From the root to the leaf."""
    found = tuple(map(stored_message, connection.execute(_select_path(), {"leaf": leaf})))
    if not found:
        raise NotFound("message", leaf)
    return found


@cache
def _select_path() -> Select[Any]:
    """Built once: that takes longer than it runs."""
    ancestors = (
        select(messages.c.id, messages.c.parent_id, literal(0).label("depth"))
        .where(messages.c.id == bindparam("leaf"))
        .cte("above", recursive=True)
    )
    parent = messages.alias("parent")
    ancestors = ancestors.union_all(
        select(parent.c.id, parent.c.parent_id, ancestors.c.depth + 1).join(
            ancestors, parent.c.id == ancestors.c.parent_id
        )
    )
    return (
        exclude_deleted(select_messages())
        .join(ancestors, ancestors.c.id == messages.c.id)
        .order_by(ancestors.c.depth.desc())
    )


def list_children(connection: Connection, conversation: str, parent: str | None) -> tuple[StoredMessage, ...]:
    """Oldest first."""
    query = exclude_deleted(select_messages()).where(messages.c.conversation_id == conversation)
    query = query.where(messages.c.parent_id.is_not_distinct_from(parent)).order_by(messages.c.seq)
    return tuple(map(stored_message, connection.execute(query)))


def nodes(connection: Connection, conversation: str) -> tuple[TreeNode, ...]:
    """The whole tree, every parent before its children."""
    query = select(messages.c.id, messages.c.parent_id, messages.c.role, messages.c.created_at)
    rows = connection.execute(query.where(messages.c.conversation_id == conversation).order_by(messages.c.seq))
    return tuple(TreeNode(row.id, row.parent_id, Role(row.role), parse_time(row.created_at)) for row in rows)


def all_messages(connection: Connection, conversation: str) -> tuple[StoredMessage, ...]:
    """The whole tree with its content, every parent before its children."""
    query = select_messages().where(messages.c.conversation_id == conversation).order_by(messages.c.seq)
    return tuple(map(stored_message, connection.execute(query)))


def newest_leaf(connection: Connection, conversation: str, start: str | None) -> str | None:
    """The leaf below `start` that was written last."""
    below: set[str | None] = {start}
    newest = start
    for node in nodes(connection, conversation):
        if node.parent_id in below or node.id == start:
            below.add(node.id)
            newest = node.id  # rows come in writing order, so the last match is a leaf
    return newest


def select_messages() -> Select[Any]:
    return select(messages, *_REPLY_COLUMNS).outerjoin(replies, replies.c.message_id == messages.c.id)


_REPLY_COLUMNS = [
    replies.c[name].label(f"reply_{name}")
    for name in ("status", "model", "tokenizer", "settings", "usage", "timings", "error", "started_at", "ended_at")
]


def stored_message(row: Any) -> StoredMessage:
    return StoredMessage(
        id=row.id,
        conversation_id=row.conversation_id,
        parent_id=row.parent_id,
        role=Role(row.role),
        parts=decode_parts(row.parts),
        created_at=parse_time(row.created_at),
        edit_of=row.edit_of,
        reply=None if row.reply_status is None else _reply(row),
    )


def _reply(row: Any) -> StoredReply:
    return StoredReply(
        status=ReplyStatus(row.reply_status),
        settings=decode_settings(row.reply_model, row.reply_tokenizer, row.reply_settings),
        usage=None if row.reply_usage is None else decode_usage(row.reply_usage),
        timings=row.reply_timings,
        error=row.reply_error,
        started_at=parse_time(row.reply_started_at),
        ended_at=None if row.reply_ended_at is None else parse_time(row.reply_ended_at),
    )


def exclude_deleted(query: Select[Any]) -> Select[Any]:
    """Without messages of deleted conversations."""
    return query.join(conversations, conversations.c.id == messages.c.conversation_id).where(
        conversations.c.deleted_at.is_(None)
    )


def _check_parent(connection: Connection, new: TreeMessage) -> None:
    required: Sequence[str] = [id for id in (new.parent_id, new.edit_of) if id is not None]
    query = select(messages.c.id).where(messages.c.conversation_id == new.conversation_id, messages.c.id.in_(required))
    found = set(connection.execute(query).scalars()) if required else set()
    for id in required:
        if id not in found:
            raise NotFound("message", id)


def touch_conversation(connection: Connection, new: TreeMessage) -> str | None:
    """Locks the conversation, updates its time and derives a missing title. Returns its head."""
    query = select(conversations).where(conversations.c.id == new.conversation_id, conversations.c.deleted_at.is_(None))
    row = connection.execute(query.with_for_update()).first()
    if row is None:
        raise NotFound("conversation", new.conversation_id)
    values: dict[str, Any] = {"updated_at": max(current_time(), row.updated_at)}
    if not row.title and not row.title_given and new.role is Role.USER:
        values["title"] = derive_message_title(new.parts)
    connection.execute(update(conversations).where(conversations.c.id == new.conversation_id).values(values))
    head: str | None = row.head_id
    return head
