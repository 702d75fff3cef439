"""Users, their API keys, their presets and defaults, and the rates of callers."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from palaver.store.database import Database, Durability
from palaver.store.errors import Conflict, NotFound
from palaver.store.records import ConversationDefaults, Preset, User, check_name, current_time, new_id, parse_time
from palaver.store.schema import defaults, keys, presets, rate_limits, users

LOCAL = "local"
"""The name of the single user of an installation without accounts."""
_KEY_PREFIX = "pal"
_ID_LENGTH = 8
_SECRET_BYTES = 32
_DUMMY_DIGEST = hashlib.sha256(b"").hexdigest()


class Users:
    def __init__(self, database: Database) -> None:
        self._database = database

    def ensure(self, name: str = LOCAL) -> User:
        """The user of that name, created if there is none."""
        check_name("name", name)
        try:
            with self._database.write_transaction() as connection:
                return _find_user(connection, name) or _insert_user(connection, name)
        except Conflict:  # another process created it in between
            return self.get_by_name(name)

    def get_by_name(self, name: str) -> User:
        with self._database.read_transaction() as connection:
            user = _find_user(connection, name)
        if user is None:
            raise NotFound("user", name)
        return user

    def all(self) -> tuple[User, ...]:
        with self._database.read_transaction() as connection:
            return tuple(map(_user, connection.execute(select(users).order_by(users.c.name))))


def _find_user(connection: Connection, name: str) -> User | None:
    row = connection.execute(select(users).where(users.c.name == name)).first()
    return _user(row) if row else None


def _insert_user(connection: Connection, name: str) -> User:
    values: dict[str, Any] = {"id": new_id(), "name": name, "created_at": current_time()}
    connection.execute(insert(users).values(values))
    return User(values["id"], name, parse_time(values["created_at"]))


def _user(row: Any) -> User:
    return User(row.id, row.name, parse_time(row.created_at))


@dataclass(frozen=True, slots=True)
class Key:
    """An API key's record. The key itself is shown once, when it is created."""

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
        """Creates a key. Returns its record and its text, which cannot be recovered later."""
        id = new_id()[:_ID_LENGTH]
        text = f"{_KEY_PREFIX}-{id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        values = {"id": id, "user_id": user_id, "digest": _digest(text), "admin": admin, "created_at": current_time()}
        with self._database.write_transaction() as connection:
            connection.execute(insert(keys).values(values))
        return self.get(id), text

    def get(self, id: str) -> Key:
        with self._database.read_transaction() as connection:
            row = connection.execute(_select_keys().where(keys.c.id == id)).first()
        if row is None:
            raise NotFound("key", id)
        return _key(row)

    def all(self) -> tuple[Key, ...]:
        with self._database.read_transaction() as connection:
            return tuple(map(_key, connection.execute(_select_keys().order_by(keys.c.created_at))))

    def any(self) -> bool:
        """Whether there is a key that is not revoked."""
        return any(key.revoked_at is None for key in self.all())

    def find(self, text: str) -> Key | None:
        """The key with this text, unless it is unknown or revoked. Compares digests in constant time."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_select_keys().where(keys.c.id == _id(text))).first()
        same = hmac.compare_digest(row.digest if row else _DUMMY_DIGEST, _digest(text))
        return _key(row) if row is not None and same and row.revoked_at is None else None

    def revoke(self, id: str) -> Key:
        """Revokes the key for good."""
        with self._database.write_transaction() as connection:
            which = update(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None))
            connection.execute(which.values(revoked_at=current_time()))
        return self.get(id)


def _select_keys() -> Any:
    return select(keys, users.c.name.label("user")).join(users, users.c.id == keys.c.user_id)


def _id(text: str) -> str:
    mark, _, rest = text.partition("-")
    return rest[:_ID_LENGTH] if mark == _KEY_PREFIX and rest.isascii() and rest.isprintable() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _key(row: Any) -> Key:
    revoked = parse_time(row.revoked_at) if row.revoked_at is not None else None
    return Key(row.id, row.user_id, row.user, row.admin, parse_time(row.created_at), revoked)


class RateLimits:
    """A token bucket for each caller, which refills within a minute. All processes on the store share it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, caller: str, per_minute: int) -> float:
        """Takes one request from the bucket. Returns 0, or the seconds until there is one if it is empty."""
        mine = rate_limits.c.caller == caller
        query = select(rate_limits, self._database.now().label("now")).where(mine).with_for_update()
        full = {"caller": caller, "remaining": float(per_minute), "updated_at": self._database.now()}
        with self._database.write_transaction(Durability.NORMAL) as connection:
            self._database.insert_new(connection, rate_limits, full)
            row = connection.execute(query).one()
            rate = per_minute / 60e6
            remaining = min(float(per_minute), row.remaining + max(0, row.now - row.updated_at) * rate)
            if remaining < 1:
                return float((1 - remaining) / rate / 1e6)
            values = {"remaining": remaining - 1, "updated_at": row.now}
            connection.execute(update(rate_limits).where(mine).values(values))
        return 0.0

    def forget_full(self) -> None:
        """Deletes the buckets of callers that made no request for more than a minute: they are full."""
        old = rate_limits.c.updated_at < self._database.now() - 120_000_000
        with self._database.write_transaction(Durability.NORMAL) as connection:
            connection.execute(delete(rate_limits).where(old))


class Presets:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, owner: str) -> tuple[Preset, ...]:
        """Sorted by name."""
        query = select(presets).where(presets.c.owner_id == owner).order_by(presets.c.name)
        with self._database.read_transaction() as connection:
            return tuple(Preset(row.name, row.system, row.parameters) for row in connection.execute(query))

    def save(self, owner: str, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        """Replaces a preset of the same name."""
        preset = Preset(check_name("name", name), system, dict(parameters))
        with self._database.write_transaction() as connection:
            connection.execute(_delete_preset(owner, name))
            connection.execute(
                insert(presets).values(owner_id=owner, name=name, system=system, parameters=preset.parameters)
            )
        return preset

    def delete(self, owner: str, name: str) -> None:
        with self._database.write_transaction() as connection:
            if not connection.execute(_delete_preset(owner, name)).rowcount:
                raise NotFound("preset", name)


def _delete_preset(owner: str, name: str) -> Any:
    return delete(presets).where(presets.c.owner_id == owner, presets.c.name == name)


class Defaults:
    """The settings that each user's new conversations begin with."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, owner: str) -> ConversationDefaults:
        """Empty if the user has none."""
        with self._database.read_transaction() as connection:
            row = connection.execute(select(defaults).where(defaults.c.owner_id == owner)).first()
        return ConversationDefaults("", {}) if row is None else ConversationDefaults(row.system, row.parameters)

    def save(self, owner: str, system: str, parameters: Mapping[str, Any]) -> ConversationDefaults:
        values: dict[str, Any] = {"owner_id": owner, "system": system, "parameters": dict(parameters)}
        with self._database.write_transaction() as connection:
            connection.execute(delete(defaults).where(defaults.c.owner_id == owner))
            connection.execute(insert(defaults).values(values))
        return ConversationDefaults(system, values["parameters"])
