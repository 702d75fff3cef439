"""The cursor of each client in a conversation, and the journal of its moves for undo and redo.

A client is a view with a position of its own: a terminal, a browser tab. A move after an undo discards the undone
moves, as in an editor; the messages stay in the tree.
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
            conversation = conversations.get_conversation(connection, conversation_id)
            number = _number(connection, conversation_id, client)
            if number is None:
                return Cursor(conversation.head_id, False, False)
            return _cursor(connection, conversation_id, client, number)

    def move(self, conversation_id: str, client: str, to: str | None) -> Cursor:
        """Moves to a message of the conversation (None: before the first)."""
        check_name("client", client)
        with self._database.write_transaction() as connection:
            conversation = conversations.get_conversation(connection, conversation_id)
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
            conversations.get_conversation(connection, conversation_id)
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
