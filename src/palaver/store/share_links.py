"""Links to read-only pages of conversations. A link shows one branch, up to the message at which it was made."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select

from palaver.store.database import Database
from palaver.store.errors import Conflict, NotFound
from palaver.store.records import current_time, new_id, parse_time
from palaver.store.schema import conversations, shares

MAX_SHARES = 100
"""Links of one conversation that are valid at the same time."""
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Share:
    """A link's record. The secret part of the link is shown once, when it is created."""

    id: str
    conversation_id: str
    leaf_id: str
    """The last message that it shows."""
    thoughts: bool
    tools: bool
    """Whether it shows tool calls and their results."""
    created_at: datetime
    expires_at: datetime


class Shares:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self, conversation_id: str, leaf_id: str, seconds: int, *, thoughts: bool = False, tools: bool = False
    ) -> tuple[Share, str]:
        """Returns the record and the secret of the link, of which only a digest is stored."""
        now, token = current_time(), secrets.token_urlsafe(_TOKEN_BYTES)
        values: dict[str, Any] = {
            "id": new_id(),
            "digest": _digest(token),
            "conversation_id": conversation_id,
            "leaf_id": leaf_id,
            "thoughts": thoughts,
            "tools": tools,
            "created_at": now,
            "expires_at": now + seconds * 1_000_000,
        }
        mine = shares.c.conversation_id == conversation_id
        with self._database.write_transaction() as connection:
            connection.execute(delete(shares).where(shares.c.expires_at <= now))
            count = connection.execute(select(func.count()).select_from(shares).where(mine)).scalar_one()
            if count >= MAX_SHARES:
                raise Conflict(f"The conversation has {MAX_SHARES} links: revoke one first.")
            connection.execute(insert(shares).values(values))
        return self.get(values["id"]), token

    def get(self, id: str) -> Share:
        """Raises NotFound, also for a link that has expired."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_select().where(shares.c.id == id)).first()
        if row is None:
            raise NotFound("link", id)
        return _share(row)

    def list(self, conversation_id: str) -> tuple[Share, ...]:
        """The links that are valid, the oldest first."""
        query = _select().where(shares.c.conversation_id == conversation_id).order_by(shares.c.created_at)
        with self._database.read_transaction() as connection:
            return tuple(map(_share, connection.execute(query)))

    def find(self, token: str) -> Share | None:
        """The link with this secret. None if it is unknown, revoked or expired, or its conversation was deleted."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_select().where(shares.c.digest == _digest(token))).first()
        return None if row is None else _share(row)

    def revoke(self, id: str) -> None:
        """Ends the link for good."""
        with self._database.write_transaction() as connection:
            connection.execute(delete(shares).where(shares.c.id == id))


def _select() -> Any:
    query = select(shares).join(conversations, conversations.c.id == shares.c.conversation_id)
    return query.where(conversations.c.deleted_at.is_(None), shares.c.expires_at > current_time())


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _share(row: Any) -> Share:
    return Share(
        id=row.id,
        conversation_id=row.conversation_id,
        leaf_id=row.leaf_id,
        thoughts=row.thoughts,
        tools=row.tools,
        created_at=parse_time(row.created_at),
        expires_at=parse_time(row.expires_at),
    )
