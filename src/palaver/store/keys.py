"""Keys: by which users of a server are known. Only a digest of a key is kept, so nobody can read one here."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select, update

from palaver.store.database import Database
from palaver.store.errors import NotFound
from palaver.store.identity import moment, new_id, now
from palaver.store.schema import keys, users

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
        values = {"id": id, "user_id": user_id, "digest": _digest(text), "admin": admin, "created_at": now()}
        with self._database.writing() as connection:
            connection.execute(insert(keys).values(values))
        return self.get(id), text

    def get(self, id: str) -> Key:
        with self._database.reading() as connection:
            row = connection.execute(_named().where(keys.c.id == id)).first()
        if row is None:
            raise NotFound("key", id)
        return _key(row)

    def all(self) -> tuple[Key, ...]:
        with self._database.reading() as connection:
            return tuple(map(_key, connection.execute(_named().order_by(keys.c.created_at))))

    def any(self) -> bool:
        """Whether there is one that still opens something."""
        return any(key.revoked_at is None for key in self.all())

    def find(self, text: str) -> Key | None:
        """The key, unless it is unknown or revoked. How long this takes tells nothing about a digest."""
        with self._database.reading() as connection:
            row = connection.execute(_named().where(keys.c.id == _id(text))).first()
        same = hmac.compare_digest(row.digest if row else _NOBODYS, _digest(text))
        return _key(row) if row is not None and same and row.revoked_at is None else None

    def revoke(self, id: str) -> Key:
        """It opens nothing from now on. Once revoked it stays so."""
        with self._database.writing() as connection:
            which = update(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None))
            connection.execute(which.values(revoked_at=now()))
        return self.get(id)


def _named() -> Any:
    return select(keys, users.c.name.label("user")).join(users, users.c.id == keys.c.user_id)


def _id(text: str) -> str:
    mark, _, rest = text.partition("-")
    return rest[:_ID_LENGTH] if mark == _MARK and rest.isascii() and rest.isprintable() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _key(row: Any) -> Key:
    revoked = moment(row.revoked_at) if row.revoked_at is not None else None
    return Key(row.id, row.user_id, row.user, row.admin, moment(row.created_at), revoked)
