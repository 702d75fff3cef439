"""Users: whose conversations they are."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from palaver.store.database import Database
from palaver.store.errors import Conflict, NotFound
from palaver.store.records import Preset, User, check_name, current_time, new_id, parse_time
from palaver.store.schema import keys, presets, users

LOCAL = "local"
"""The name of the one user of a program that has no accounts."""


class Users:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure(self, name: str = LOCAL) -> User:
        """The user of that name, made where there is none."""
        check_name("name", name)
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
    values: dict[str, Any] = {"id": new_id(), "name": name, "created_at": current_time()}
    connection.execute(insert(users).values(values))
    return User(values["id"], name, parse_time(values["created_at"]))


def _user(row: Any) -> User:
    return User(row.id, row.name, parse_time(row.created_at))


_MARK = "pal"
_ID_LENGTH = 8
_SECRET_BYTES = 32
_NOBODYS = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key; the key itself is shown once, when it is made."""

    id: str
    user_id: str
    user: str
    admin: bool
    created_at: datetime
    revoked_at: datetime | None = None


class Keys:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, user_id: str, admin: bool = False) -> tuple[Key, str]:
        """A new key of that user, and its text, which can't be had again."""
        id = new_id()[:_ID_LENGTH]
        text = f"{_MARK}-{id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        values = {"id": id, "user_id": user_id, "digest": _digest(text), "admin": admin, "created_at": current_time()}
        with self._database.writing() as connection:
            connection.execute(insert(keys).values(values))
        return self.get(id), text

    def get(self, id: str) -> Key:
        with self._database.reading() as connection:
            row = connection.execute(_select_keys().where(keys.c.id == id)).first()
        if row is None:
            raise NotFound("key", id)
        return _key(row)

    def all(self) -> tuple[Key, ...]:
        with self._database.reading() as connection:
            return tuple(map(_key, connection.execute(_select_keys().order_by(keys.c.created_at))))

    def any(self) -> bool:
        """Whether there is one that still opens something."""
        return any(key.revoked_at is None for key in self.all())

    def find(self, text: str) -> Key | None:
        """The key, unless it is unknown or revoked. How long this takes tells nothing about a digest."""
        with self._database.reading() as connection:
            row = connection.execute(_select_keys().where(keys.c.id == _id(text))).first()
        same = hmac.compare_digest(row.digest if row else _NOBODYS, _digest(text))
        return _key(row) if row is not None and same and row.revoked_at is None else None

    def revoke(self, id: str) -> Key:
        """It opens nothing from now on. Once revoked it stays so."""
        with self._database.writing() as connection:
            which = update(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None))
            connection.execute(which.values(revoked_at=current_time()))
        return self.get(id)


def _select_keys() -> Any:
    return select(keys, users.c.name.label("user")).join(users, users.c.id == keys.c.user_id)


def _id(text: str) -> str:
    mark, _, rest = text.partition("-")
    return rest[:_ID_LENGTH] if mark == _MARK and rest.isascii() and rest.isprintable() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _key(row: Any) -> Key:
    revoked = parse_time(row.revoked_at) if row.revoked_at is not None else None
    return Key(row.id, row.user_id, row.user, row.admin, parse_time(row.created_at), revoked)


class Presets:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, owner: str) -> tuple[Preset, ...]:
        """By name."""
        wanted = select(presets).where(presets.c.owner_id == owner).order_by(presets.c.name)
        with self._database.reading() as connection:
            return tuple(Preset(row.name, row.system, row.parameters) for row in connection.execute(wanted))

    def save(self, owner: str, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        """In place of one that had the name."""
        preset = Preset(check_name("name", name), system, dict(parameters))
        with self._database.writing() as connection:
            connection.execute(_one(owner, name))
            connection.execute(
                insert(presets).values(owner_id=owner, name=name, system=system, parameters=preset.parameters)
            )
        return preset

    def delete(self, owner: str, name: str) -> None:
        with self._database.writing() as connection:
            if not connection.execute(_one(owner, name)).rowcount:
                raise NotFound("preset", name)


def _one(owner: str, name: str) -> Any:
    return delete(presets).where(presets.c.owner_id == owner, presets.c.name == name)
