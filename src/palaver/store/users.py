"""Users: whose conversations they are."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, select

from palaver.store.database import Database
from palaver.store.errors import Conflict, NotFound
from palaver.store.identity import moment, new_id, now
from palaver.store.names import checked_name
from palaver.store.schema import users
from palaver.store.values import User

LOCAL = "local"
"""The name of the one user of a program that has no accounts."""


class Users:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure(self, name: str = LOCAL) -> User:
        """The user of that name, made where there is none."""
        checked_name("name", name)
        try:
            with self._database.writing() as connection:
                return _named(connection, name) or _made(connection, name)
        except Conflict:  # another process made it in between
            return self.named(name)

    def named(self, name: str) -> User:
        with self._database.reading() as connection:
            user = _named(connection, name)
        if user is None:
            raise NotFound("user", name)
        return user

    def all(self) -> tuple[User, ...]:
        with self._database.reading() as connection:
            return tuple(map(_user, connection.execute(select(users).order_by(users.c.name))))


def _named(connection: Connection, name: str) -> User | None:
    row = connection.execute(select(users).where(users.c.name == name)).first()
    return _user(row) if row else None


def _made(connection: Connection, name: str) -> User:
    values: dict[str, Any] = {"id": new_id(), "name": name, "created_at": now()}
    connection.execute(insert(users).values(values))
    return User(values["id"], name, moment(values["created_at"]))


def _user(row: Any) -> User:
    return User(row.id, row.name, moment(row.created_at))
