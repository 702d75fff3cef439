"""The tree of messages inside one transaction: a message is put under its parent, a path is read from a leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, insert, literal, select, update

from palaver.events import Usage
from palaver.messages import Role
from palaver.store.errors import Conflict, NotFound
from palaver.store.json_values import StoredPart, media_digests, parts_from_json, parts_to_json, settings_from_json
from palaver.store.records import (
    ReplyStatus,
    StoredMessage,
    StoredReply,
    TreeNode,
    check_name,
    current_time,
    derive_title,
    new_id,
    parse_time,
)
from palaver.store.schema import conversations, message_blobs, messages, replies
from palaver.store.search_index import index, indexed_text


@dataclass(frozen=True, slots=True)
class TreeMessage:
    """A message to be put into a tree."""

    conversation_id: str
    parent_id: str | None
    role: Role
    parts: tuple[StoredPart, ...]
    key: str | None = None
    edit_of: str | None = None
    expected_head: str | None = None
    """The head moves to the new message where it still is this one."""
    created_at: int | None = None
    """Now, where it isn't given."""


def put_message(connection: Connection, new: TreeMessage) -> str:
    """Adds the message, whose key is known to be new, and gives its id.

    NotFound where its conversation or its parent is not there.
    """
    _check_parent(connection, new)
    head = touch(connection, new)
    id = insert_new(connection, new)
    if head == new.expected_head:
        set_head(connection, new.conversation_id, id)
    return id


def insert_new(connection: Connection, new: TreeMessage) -> str:
    """The message alone, with its index and its blobs; its parent is known to be there."""
    values: dict[str, Any] = {
        "id": new_id(),
        "conversation_id": new.conversation_id,
        "parent_id": new.parent_id,
        "role": new.role.value,
        "parts": parts_to_json(new.parts),
        "edit_of": new.edit_of,
        "key": new.key,
        "created_at": current_time() if new.created_at is None else new.created_at,
    }
    seq = connection.execute(insert(messages).values(values)).inserted_primary_key
    assert seq is not None
    name_blobs(connection, values["id"], new.parts)
    index(connection, seq[0], values["parts"])
    return str(values["id"])


def set_head(connection: Connection, conversation: str, head: str | None) -> None:
    connection.execute(update(conversations).where(conversations.c.id == conversation).values(head_id=head))


def message_by_key(connection: Connection, new: TreeMessage) -> StoredMessage | None:
    """What was put with the same key before; Conflict where that was something else."""
    if new.key is None:
        return None
    check_name("key", new.key)
    query = stored_query().where(messages.c.conversation_id == new.conversation_id, messages.c.key == new.key)
    row = connection.execute(query).first()
    if row is None:
        return None
    found = stored_message(row)
    same = (found.parent_id, found.role) == (new.parent_id, new.role)
    if not same or (found.reply is None and found.parts != new.parts):
        raise Conflict(f"The key {new.key!r} was used for another message.")
    return found


def name_blobs(connection: Connection, id: str, parts: tuple[StoredPart, ...]) -> None:
    rows = [{"message_id": id, "digest": digest} for digest in sorted(media_digests(parts))]
    if rows:
        connection.execute(insert(message_blobs), rows)


def message_row(connection: Connection, id: str, deleted: bool = False) -> StoredMessage:
    """The message, or NotFound; those of a deleted conversation are found only where they are asked for."""
    query = stored_query() if deleted else visible(stored_query())
    row = connection.execute(query.where(messages.c.id == id)).first()
    if row is None:
        raise NotFound("message", id)
    return stored_message(row)


def message_path(connection: Connection, leaf: str) -> tuple[StoredMessage, ...]:
    """From the root to the leaf."""
    above = (
        select(messages.c.id, messages.c.parent_id, literal(0).label("depth"))
        .where(messages.c.id == leaf)
        .cte("above", recursive=True)
    )
    parent = messages.alias("parent")
    above = above.union_all(
        select(parent.c.id, parent.c.parent_id, above.c.depth + 1).join(above, parent.c.id == above.c.parent_id)
    )
    query = visible(stored_query()).join(above, above.c.id == messages.c.id).order_by(above.c.depth.desc())
    found = tuple(map(stored_message, connection.execute(query)))
    if not found:
        raise NotFound("message", leaf)
    return found


def child_messages(connection: Connection, conversation: str, parent: str | None) -> tuple[StoredMessage, ...]:
    """The oldest first."""
    query = visible(stored_query()).where(messages.c.conversation_id == conversation)
    query = query.where(messages.c.parent_id.is_not_distinct_from(parent)).order_by(messages.c.seq)
    return tuple(map(stored_message, connection.execute(query)))


def nodes(connection: Connection, conversation: str) -> tuple[TreeNode, ...]:
    """The whole tree, every parent before its children."""
    query = select(messages.c.id, messages.c.parent_id, messages.c.role, messages.c.created_at)
    rows = connection.execute(query.where(messages.c.conversation_id == conversation).order_by(messages.c.seq))
    return tuple(TreeNode(row.id, row.parent_id, Role(row.role), parse_time(row.created_at)) for row in rows)


def all_messages(connection: Connection, conversation: str) -> tuple[StoredMessage, ...]:
    """The whole tree with its contents, every parent before its children."""
    query = stored_query().where(messages.c.conversation_id == conversation).order_by(messages.c.seq)
    return tuple(map(stored_message, connection.execute(query)))


def newest_leaf(connection: Connection, conversation: str, start: str | None) -> str | None:
    """The end of the branch below `start` that was written to last."""
    below: set[str | None] = {start}
    newest = start
    for node in nodes(connection, conversation):
        if node.parent_id in below or node.id == start:
            below.add(node.id)
            newest = node.id  # written later than all before, so nothing before is below it
    return newest


def stored_query() -> Select[Any]:
    return select(messages, *_REPLY).outerjoin(replies, replies.c.message_id == messages.c.id)


_REPLY = [
    replies.c[name].label(f"reply_{name}")
    for name in ("status", "model", "tokenizer", "settings", "usage", "timings", "error", "started_at", "ended_at")
]


def stored_message(row: Any) -> StoredMessage:
    return StoredMessage(
        id=row.id,
        conversation_id=row.conversation_id,
        parent_id=row.parent_id,
        role=Role(row.role),
        parts=parts_from_json(row.parts),
        created_at=parse_time(row.created_at),
        edit_of=row.edit_of,
        reply=None if row.reply_status is None else _reply(row),
    )


def _reply(row: Any) -> StoredReply:
    return StoredReply(
        status=ReplyStatus(row.reply_status),
        settings=settings_from_json(row.reply_model, row.reply_tokenizer, row.reply_settings),
        usage=None if row.reply_usage is None else Usage(**row.reply_usage),
        timings=row.reply_timings,
        error=row.reply_error,
        started_at=parse_time(row.reply_started_at),
        ended_at=None if row.reply_ended_at is None else parse_time(row.reply_ended_at),
    )


def visible(query: Select[Any]) -> Select[Any]:
    return query.join(conversations, conversations.c.id == messages.c.conversation_id).where(
        conversations.c.deleted_at.is_(None)
    )


def _check_parent(connection: Connection, new: TreeMessage) -> None:
    wanted: Sequence[str] = [id for id in (new.parent_id, new.edit_of) if id is not None]
    query = select(messages.c.id).where(messages.c.conversation_id == new.conversation_id, messages.c.id.in_(wanted))
    found = set(connection.execute(query).scalars()) if wanted else set()
    for id in wanted:
        if id not in found:
            raise NotFound("message", id)


def touch(connection: Connection, new: TreeMessage) -> str | None:
    """The conversation's time, and its title where it has none; gives its head. Other writers wait meanwhile."""
    query = select(conversations).where(conversations.c.id == new.conversation_id, conversations.c.deleted_at.is_(None))
    row = connection.execute(query.with_for_update()).first()
    if row is None:
        raise NotFound("conversation", new.conversation_id)
    values: dict[str, Any] = {"updated_at": max(current_time(), row.updated_at)}
    if not row.title and not row.title_given and new.role is Role.USER:
        values["title"] = derive_title(indexed_text(parts_to_json(new.parts)))
    connection.execute(update(conversations).where(conversations.c.id == new.conversation_id).values(values))
    head: str | None = row.head_id
    return head
