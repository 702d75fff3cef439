"""Conversations with their title, tags, pin, system prompt, parameters and head: create, list, update, delete, restore.
And the cursor of each client in a conversation, with the journal of its moves for undo and redo.

A client is a view with a position of its own: a terminal, a browser tab. A move after an undo discards the undone
moves, as in an editor; the messages stay in the tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, delete, exists, func, insert, select, tuple_, update

from palaver.store import tree
from palaver.store.blobs import GRACE_SECONDS, Blobs
from palaver.store.database import Database, Durability
from palaver.store.errors import Ambiguous, Conflict, NotFound
from palaver.store.records import Conversation, check_name, current_time, new_id, parse_time
from palaver.store.schema import conversations, cursors, message_blobs, messages, moves, tags, uploads
from palaver.store.titles import clean_title

_MAX_CANDIDATES = 5
"""Ids that the error for an ambiguous prefix lists."""


class Conversations:
    """Methods that take `owner` return only that user's conversations."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs

    def create(
        self,
        owner: str,
        *,
        title: str = "",
        system: str = "",
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        key: str | None = None,
    ) -> Conversation:
        """Creates a conversation. With an idempotency `key` that was used before, returns the one of the first call."""
        values = _new_values(owner, title, system, parameters or {}, key)
        checked = _check_tags(tags)
        try:
            with self._database.write_transaction() as connection:
                if key is not None and (row := _find_by_key(connection, owner, key)):
                    return _load(connection, [row])[0]
                connection.execute(insert(conversations).values(values))
                _insert_tags(connection, values["id"], checked)
        except Conflict:
            if key is not None and (found := self._get_by_key(owner, key)):
                return found
            raise NotFound("user", owner) from None
        return self.get(values["id"])

    def get(self, id: str, owner: str | None = None, deleted: bool = False) -> Conversation:
        with self._database.read_transaction() as connection:
            return get_conversation(connection, id, owner, deleted)

    def list(
        self,
        owner: str,
        *,
        limit: int = 50,
        before: Conversation | None = None,
        tag: str | None = None,
        title: str = "",
        deleted: bool = False,
        pinned: bool | None = None,
    ) -> tuple[Conversation, ...]:
        """Newest first. `before` is the last one of the previous page; `title` filters by a part of the title;
        `pinned` selects the pinned ones, or the others.

        Deleted conversations without messages and title are left out: a first message that was refused leaves them.
        """
        query = _select_owned(owner, deleted).limit(limit)
        sort_key = (conversations.c.updated_at, conversations.c.id)
        query = query.order_by(*(column.desc() for column in sort_key))
        if before is not None:
            query = query.where(tuple_(*sort_key) < tuple_(_microseconds(before), before.id))
        if tag is not None:
            query = query.where(conversations.c.id.in_(select(tags.c.conversation_id).where(tags.c.tag == tag)))
        if title:
            query = query.where(self._database.contains(conversations.c.title, title))
        if pinned is not None:
            query = query.where(conversations.c.pinned.is_(pinned))
        with self._database.read_transaction() as connection:
            return _load(connection, connection.execute(query).all())

    def ids(self, owner: str) -> tuple[str, ...]:
        """Every conversation that is not deleted, oldest first."""
        query = _select_owned(owner, deleted=False).with_only_columns(conversations.c.id)
        with self._database.read_transaction() as connection:
            return tuple(connection.execute(query.order_by(conversations.c.created_at)).scalars())

    def resolve(self, prefix: str, deleted: bool = False) -> Conversation:
        """The conversation whose id is or uniquely starts with `prefix`; with `deleted`, deleted ones too."""
        query = select(conversations.c.id).where(conversations.c.id.startswith(prefix, autoescape=True))
        if not deleted:
            query = query.where(conversations.c.deleted_at.is_(None))
        with self._database.read_transaction() as connection:
            found = connection.execute(query.limit(_MAX_CANDIDATES)).scalars().all() if prefix else ()
            if not found:
                raise NotFound("conversation", prefix)
            if len(found) > 1:
                raise Ambiguous("conversations", prefix, found)
            return get_conversation(connection, found[0], deleted=deleted)

    def tags(self, owner: str) -> tuple[str, ...]:
        """Every tag in use."""
        query = select(tags.c.tag).join(conversations).where(conversations.c.owner_id == owner)
        query = query.where(conversations.c.deleted_at.is_(None)).distinct().order_by(tags.c.tag)
        with self._database.read_transaction() as connection:
            return tuple(connection.execute(query).scalars())

    def add_upload(self, owner: str, digest: str) -> None:
        """Records that the user has uploaded this blob, before a message references it."""
        values = {"owner_id": owner, "digest": digest, "created_at": current_time()}
        with self._database.write_transaction(Durability.NORMAL) as connection:
            self._database.insert_new(connection, uploads, values)

    def may_read_blob(self, owner: str, digest: str) -> bool:
        """Whether the user has uploaded this blob, or a message in the user's conversations references it."""
        with self._database.read_transaction() as connection:
            mine = select(uploads.c.digest).where(uploads.c.owner_id == owner, uploads.c.digest == digest)
            if connection.execute(mine).first() is not None:
                return True
        query = select(messages.c.seq).join(message_blobs, message_blobs.c.message_id == messages.c.id)
        query = query.join(conversations, conversations.c.id == messages.c.conversation_id)
        query = query.where(conversations.c.owner_id == owner, message_blobs.c.digest == digest).limit(1)
        with self._database.read_transaction() as connection:
            return connection.execute(query).first() is not None

    def rename(self, id: str, title: str, given: bool = True) -> Conversation:
        """`given`: chosen by the user. A derived title never replaces a chosen one."""
        values = {"title": clean_title(title), "title_given": given}
        with self._database.write_transaction() as connection:
            change = update(conversations).where(conversations.c.id == id, conversations.c.deleted_at.is_(None))
            if not given:
                change = change.where(conversations.c.title_given.is_(False))
            connection.execute(change.values(values))
            return get_conversation(connection, id)

    def set_system(self, id: str, system: str) -> Conversation:
        return self._update(id, {"system": system})

    def set_parameters(self, id: str, parameters: Mapping[str, Any]) -> Conversation:
        return self._update(id, {"parameters": dict(parameters)})

    def set_pinned(self, id: str, pinned: bool) -> Conversation:
        return self._update(id, {"pinned": pinned})

    def set_tags(self, id: str, names: Iterable[str]) -> Conversation:
        checked = _check_tags(names)
        with self._database.write_transaction() as connection:
            get_conversation(connection, id)
            connection.execute(delete(tags).where(tags.c.conversation_id == id))
            _insert_tags(connection, id, checked)
            return get_conversation(connection, id)

    def move_head(self, id: str, expected: str | None, to: str | None) -> Conversation:
        """Compare-and-set: sets the head if it still is `expected`, else raises Conflict."""
        with self._database.write_transaction() as connection:
            if to is not None:
                _check_member(connection, id, to)
            change = update(conversations).where(conversations.c.id == id, conversations.c.deleted_at.is_(None))
            change = change.where(conversations.c.head_id.is_not_distinct_from(expected)).values(head_id=to)
            updated = connection.execute(change).rowcount
            found = get_conversation(connection, id)
        if not updated and found.head_id != to:
            raise Conflict(f"The head of {id!r} is {found.head_id!r}, not {expected!r}.")
        return found

    def delete(self, id: str) -> None:
        """Marks the conversation as deleted. `undelete` restores it, `purge` removes it for good."""
        self._update(id, {"deleted_at": current_time()}, deleted=True)

    def undelete(self, id: str) -> Conversation:
        with self._database.write_transaction() as connection:
            get_conversation(connection, id, deleted=True)
            connection.execute(update(conversations).where(conversations.c.id == id).values(deleted_at=None))
            return get_conversation(connection, id)

    def purge(self, deleted_before: int | None = None) -> int:
        """Removes conversations deleted before that time (microseconds; default: all) and their blobs for good. Returns
        how many."""
        limit = current_time() + 1 if deleted_before is None else deleted_before
        with self._database.write_transaction() as connection:
            removed = connection.execute(delete(conversations).where(conversations.c.deleted_at < limit)).rowcount
        with self._database.read_transaction() as connection:
            named = set(connection.execute(select(message_blobs.c.digest).distinct()).scalars())
        self._blobs.sweep(named)
        with self._database.write_transaction() as connection:
            old = uploads.c.created_at < current_time() - int(GRACE_SECONDS * 1e6)
            connection.execute(delete(uploads).where(old))
        return removed

    def _update(self, id: str, values: Mapping[str, Any], deleted: bool = False) -> Conversation:
        with self._database.write_transaction() as connection:
            get_conversation(connection, id)
            connection.execute(update(conversations).where(conversations.c.id == id).values(**values))
            return get_conversation(connection, id, deleted=deleted)

    def _get_by_key(self, owner: str, key: str) -> Conversation | None:
        with self._database.read_transaction() as connection:
            row = _find_by_key(connection, owner, key)
            return _load(connection, [row])[0] if row else None


def get_conversation(connection: Connection, id: str, owner: str | None = None, deleted: bool = False) -> Conversation:
    """Raises NotFound if there is none. A deleted one is included only with `deleted`."""
    query = select(conversations).where(conversations.c.id == id)
    if owner is not None:
        query = query.where(conversations.c.owner_id == owner)
    if not deleted:
        query = query.where(conversations.c.deleted_at.is_(None))
    row = connection.execute(query).first()
    if row is None:
        raise NotFound("conversation", id)
    return _load(connection, [row])[0]


def _new_values(owner: str, title: str, system: str, parameters: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    time = current_time()
    return {
        "id": new_id(),
        "owner_id": owner,
        "title": clean_title(title),
        "title_given": bool(title),
        "system": system,
        "parameters": dict(parameters),
        "key": None if key is None else check_name("key", key),
        "created_at": time,
        "updated_at": time,
    }


def _select_owned(owner: str, deleted: bool) -> Select[Any]:
    query = select(conversations).where(conversations.c.owner_id == owner)
    if not deleted:
        return query.where(conversations.c.deleted_at.is_(None))
    has_messages = exists().where(messages.c.conversation_id == conversations.c.id)
    return query.where(conversations.c.deleted_at.is_not(None), has_messages | (conversations.c.title != ""))


def _microseconds(conversation: Conversation) -> int:
    return round(conversation.updated_at.timestamp() * 1e6)


def _find_by_key(connection: Connection, owner: str, key: str) -> Any:
    query = select(conversations).where(conversations.c.owner_id == owner, conversations.c.key == key)
    return connection.execute(query).first()


def _check_member(connection: Connection, id: str, message: str) -> None:
    query = select(messages.c.seq).where(messages.c.conversation_id == id, messages.c.id == message)
    if connection.execute(query).first() is None:
        raise NotFound("message", message)


def _check_tags(names: Iterable[str]) -> list[str]:
    return sorted({check_name("tag", tag) for tag in names})


def _insert_tags(connection: Connection, id: str, names: Sequence[str]) -> None:
    if names:
        connection.execute(insert(tags), [{"conversation_id": id, "tag": tag} for tag in names])


def _load(connection: Connection, rows: Sequence[Any]) -> tuple[Conversation, ...]:
    query = select(tags).where(tags.c.conversation_id.in_([row.id for row in rows])).order_by(tags.c.tag)
    by_id: dict[str, list[str]] = {row.id: [] for row in rows}
    for row in connection.execute(query) if rows else ():
        by_id[row.conversation_id].append(row.tag)
    return tuple(_conversation(row, by_id[row.id]) for row in rows)


def _conversation(row: Any, found: Sequence[str]) -> Conversation:
    return Conversation(
        id=row.id,
        owner_id=row.owner_id,
        title=row.title,
        title_given=row.title_given,
        system=row.system,
        parameters=row.parameters,
        tags=tuple(found),
        head_id=row.head_id,
        created_at=parse_time(row.created_at),
        updated_at=parse_time(row.updated_at),
        deleted_at=None if row.deleted_at is None else parse_time(row.deleted_at),
        pinned=row.pinned,
    )


MAX_MOVES = 1000
"""Moves in the journal of one client; older ones are deleted."""


@dataclass(frozen=True, slots=True)
class Cursor:
    message_id: str | None
    """None is before the first message."""
    can_undo: bool
    can_redo: bool


class Cursors:
    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, conversation_id: str, client: str) -> Cursor:
        """The cursor of the client. A new client is at the head."""
        with self._database.read_transaction() as connection:
            conversation = get_conversation(connection, conversation_id)
            number = _number(connection, conversation_id, client)
            if number is None:
                return Cursor(conversation.head_id, False, False)
            return _cursor(connection, conversation_id, client, number)

    def move(self, conversation_id: str, client: str, to: str | None) -> Cursor:
        """Moves to a message of the conversation (None: before the first)."""
        check_name("client", client)
        with self._database.write_transaction() as connection:
            conversation = get_conversation(connection, conversation_id)
            _check_message(connection, conversation_id, to)
            number = _number(connection, conversation_id, client)
            if number is None:
                number = _insert_cursor(connection, conversation_id, client, conversation.head_id)
            if _message_at(connection, conversation_id, client, number) != to:
                number = _insert_move(connection, conversation_id, client, number, to)
            return _cursor(connection, conversation_id, client, number)

    def undo(self, conversation_id: str, client: str) -> Cursor:
        """Returns to the position before the last move."""
        return self._step(conversation_id, client, -1, "undo")

    def redo(self, conversation_id: str, client: str) -> Cursor:
        return self._step(conversation_id, client, 1, "redo")

    def _step(self, conversation_id: str, client: str, direction: int, verb: str) -> Cursor:
        with self._database.write_transaction() as connection:
            get_conversation(connection, conversation_id)
            number = _number(connection, conversation_id, client)
            if number is None or not _has_move(connection, conversation_id, client, number + direction):
                raise Conflict(f"There is nothing to {verb}.")
            _set_number(connection, conversation_id, client, number + direction)
            return _cursor(connection, conversation_id, client, number + direction)


def _number(connection: Connection, conversation: str, client: str) -> int | None:
    query = select(cursors.c.number).where(cursors.c.conversation_id == conversation, cursors.c.client == client)
    number: int | None = connection.execute(query.with_for_update()).scalar()
    return number


def _is_move_of(conversation: str, client: str) -> Any:
    return (moves.c.conversation_id == conversation) & (moves.c.client == client)


def _message_at(connection: Connection, conversation: str, client: str, number: int) -> str | None:
    query = select(moves.c.message_id).where(_is_move_of(conversation, client), moves.c.number == number)
    message_id: str | None = connection.execute(query).scalar_one()
    return message_id


def _has_move(connection: Connection, conversation: str, client: str, number: int) -> bool:
    query = select(func.count()).select_from(moves).where(_is_move_of(conversation, client), moves.c.number == number)
    return bool(connection.execute(query).scalar())


def _cursor(connection: Connection, conversation: str, client: str, number: int) -> Cursor:
    return Cursor(
        _message_at(connection, conversation, client, number),
        can_undo=_has_move(connection, conversation, client, number - 1),
        can_redo=_has_move(connection, conversation, client, number + 1),
    )


def _insert_cursor(connection: Connection, conversation: str, client: str, at: str | None) -> int:
    connection.execute(insert(cursors).values(conversation_id=conversation, client=client, number=0))
    _insert_move_row(connection, conversation, client, 0, at)
    return 0


def _insert_move(connection: Connection, conversation: str, client: str, number: int, to: str | None) -> int:
    undone = moves.c.number > number
    old = moves.c.number <= number + 1 - MAX_MOVES
    connection.execute(delete(moves).where(_is_move_of(conversation, client), undone | old))
    _insert_move_row(connection, conversation, client, number + 1, to)
    _set_number(connection, conversation, client, number + 1)
    return number + 1


def _insert_move_row(connection: Connection, conversation: str, client: str, number: int, to: str | None) -> None:
    values = {"conversation_id": conversation, "client": client, "number": number, "message_id": to}
    connection.execute(insert(moves).values(values))


def _set_number(connection: Connection, conversation: str, client: str, number: int) -> None:
    is_cursor = (cursors.c.conversation_id == conversation) & (cursors.c.client == client)
    connection.execute(update(cursors).where(is_cursor).values(number=number))


def _check_message(connection: Connection, conversation: str, to: str | None) -> None:
    if to is not None and tree.get_message(connection, to).conversation_id != conversation:
        raise NotFound("message", to)
