"""Where each client stands in a conversation, and the journal of its moves: undo and redo walk it.

A client is whoever has a view of its own: a terminal, a tab. A move after an undo forgets the moves that were
undone, as in every editor; the messages they led to stay in the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from palaver.store import conversations, tree
from palaver.store.database import Database
from palaver.store.errors import Conflict, NotFound
from palaver.store.records import check_name
from palaver.store.schema import cursors, moves

MAX_MOVES = 1000
"""Older moves are forgotten."""


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
        """Where the client stands; one that was never here stands at the head."""
        with self._database.reading() as connection:
            conversation = conversations.conversation_row(connection, conversation_id)
            number = _number(connection, conversation_id, client)
            if number is None:
                return Cursor(conversation.head_id, False, False)
            return _cursor(connection, conversation_id, client, number)

    def move(self, conversation_id: str, client: str, to: str | None) -> Cursor:
        """Goes to a message of the conversation (None: before the first)."""
        check_name("client", client)
        with self._database.writing() as connection:
            conversation = conversations.conversation_row(connection, conversation_id)
            _check_place(connection, conversation_id, to)
            number = _number(connection, conversation_id, client)
            if number is None:
                number = _begun(connection, conversation_id, client, conversation.head_id)
            if _at(connection, conversation_id, client, number) != to:
                number = _moved(connection, conversation_id, client, number, to)
            return _cursor(connection, conversation_id, client, number)

    def undo(self, conversation_id: str, client: str) -> Cursor:
        """Back to where the client was before its last move."""
        return self._walk(conversation_id, client, -1, "undo")

    def redo(self, conversation_id: str, client: str) -> Cursor:
        return self._walk(conversation_id, client, 1, "redo")

    def _walk(self, conversation_id: str, client: str, way: int, verb: str) -> Cursor:
        with self._database.writing() as connection:
            conversations.conversation_row(connection, conversation_id)
            number = _number(connection, conversation_id, client)
            if number is None or not _has(connection, conversation_id, client, number + way):
                raise Conflict(f"There is nothing to {verb}.")
            _set(connection, conversation_id, client, number + way)
            return _cursor(connection, conversation_id, client, number + way)


def _number(connection: Connection, conversation: str, client: str) -> int | None:
    query = select(cursors.c.number).where(cursors.c.conversation_id == conversation, cursors.c.client == client)
    number: int | None = connection.execute(query.with_for_update()).scalar()
    return number


def _mine(conversation: str, client: str) -> Any:
    return (moves.c.conversation_id == conversation) & (moves.c.client == client)


def _at(connection: Connection, conversation: str, client: str, number: int) -> str | None:
    query = select(moves.c.message_id).where(_mine(conversation, client), moves.c.number == number)
    place: str | None = connection.execute(query).scalar_one()
    return place


def _has(connection: Connection, conversation: str, client: str, number: int) -> bool:
    query = select(func.count()).select_from(moves).where(_mine(conversation, client), moves.c.number == number)
    return bool(connection.execute(query).scalar())


def _cursor(connection: Connection, conversation: str, client: str, number: int) -> Cursor:
    return Cursor(
        _at(connection, conversation, client, number),
        can_undo=_has(connection, conversation, client, number - 1),
        can_redo=_has(connection, conversation, client, number + 1),
    )


def _begun(connection: Connection, conversation: str, client: str, at: str | None) -> int:
    connection.execute(insert(cursors).values(conversation_id=conversation, client=client, number=0))
    _write(connection, conversation, client, 0, at)
    return 0


def _moved(connection: Connection, conversation: str, client: str, number: int, to: str | None) -> int:
    undone = moves.c.number > number
    old = moves.c.number <= number + 1 - MAX_MOVES
    connection.execute(delete(moves).where(_mine(conversation, client), undone | old))
    _write(connection, conversation, client, number + 1, to)
    _set(connection, conversation, client, number + 1)
    return number + 1


def _write(connection: Connection, conversation: str, client: str, number: int, to: str | None) -> None:
    values = {"conversation_id": conversation, "client": client, "number": number, "message_id": to}
    connection.execute(insert(moves).values(values))


def _set(connection: Connection, conversation: str, client: str, number: int) -> None:
    mine = (cursors.c.conversation_id == conversation) & (cursors.c.client == client)
    connection.execute(update(cursors).where(mine).values(number=number))


def _check_place(connection: Connection, conversation: str, to: str | None) -> None:
    if to is not None and tree.message_row(connection, to).conversation_id != conversation:
        raise NotFound("message", to)
