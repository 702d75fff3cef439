"""Comparisons: replies to one message that were started at once, and which of them the user prefers.

The replies are ordinary siblings in the tree. A comparison names them, in the order in which they are shown, and keeps
the choice for as long as the conversation exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, func, insert, select, update

from palaver.store.database import Database
from palaver.store.errors import Conflict, NotFound
from palaver.store.records import check_name, current_time, new_id, parse_time
from palaver.store.schema import compared_replies, comparisons, conversations, messages


@dataclass(frozen=True, slots=True)
class ComparedReply:
    """One column of a comparison. The name and the settings of a blind one are empty until the choice."""

    reply_id: str
    name: str
    model: str
    """The model that the reply was requested from."""
    parameters: Mapping[str, Any]
    """The parameters of its turn, which override those of the conversation."""


@dataclass(frozen=True, slots=True)
class Comparison:
    id: str
    conversation_id: str
    parent_id: str
    """The message that all replies answer."""
    blind: bool
    replies: tuple[ComparedReply, ...]
    created_at: datetime
    decided_at: datetime | None = None
    """When the user chose; None while the choice is open."""
    chosen_id: str | None = None
    """The preferred reply. None with `decided_at`: no reply is better than the others."""


@dataclass(frozen=True, slots=True)
class TallyRow:
    """How often the replies of one name were compared and chosen. Comparisons without a choice do not count."""

    name: str
    compared: int
    chosen: int
    blind_compared: int
    blind_chosen: int


class Comparisons:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        conversation_id: str,
        parent_id: str,
        replies: Sequence[ComparedReply],
        blind: bool = False,
        key: str | None = None,
    ) -> Comparison:
        """Records the replies in this order. With a `key` that was used before, returns the first comparison."""
        id = new_id()
        with self._database.write_transaction() as connection:
            if key is not None and (found := _find_by_key(connection, conversation_id, key)):
                return found
            connection.execute(
                insert(comparisons).values(
                    id=id,
                    conversation_id=conversation_id,
                    parent_id=parent_id,
                    blind=blind,
                    key=key,
                    created_at=current_time(),
                )
            )
            for position, one in enumerate(replies):
                values = {"name": one.name, "model": one.model, "parameters": dict(one.parameters)}
                row = {"comparison_id": id, "position": position, "message_id": one.reply_id, **values}
                connection.execute(insert(compared_replies).values(row))
            return _get(connection, id)

    def get(self, id: str) -> Comparison:
        """Raises NotFound, also for a comparison in a deleted conversation."""
        with self._database.read_transaction() as connection:
            return _get(connection, id)

    def find(self, conversation_id: str, key: str) -> Comparison | None:
        """The comparison that was created with this key."""
        with self._database.read_transaction() as connection:
            return _find_by_key(connection, conversation_id, key)

    def list(self, conversation_id: str) -> tuple[Comparison, ...]:
        """The comparisons of a conversation, the oldest first."""
        query = _select().where(comparisons.c.conversation_id == conversation_id)
        with self._database.read_transaction() as connection:
            return _load(connection, connection.execute(query.order_by(comparisons.c.created_at)).all())

    def decide(self, id: str, reply_id: str | None) -> Comparison:
        """Records the preferred reply, or that none is. A later choice replaces an earlier one."""
        with self._database.write_transaction() as connection:
            comparison = _get(connection, id)
            if reply_id is not None and reply_id not in {one.reply_id for one in comparison.replies}:
                raise Conflict("The reply is not one of this comparison.")
            change = update(comparisons).where(comparisons.c.id == id)
            connection.execute(change.values(chosen_id=reply_id, decided_at=current_time()))
            return _get(connection, id)

    def tally(self, owner: str) -> tuple[TallyRow, ...]:
        """By name, those that were chosen most often first."""
        name, blind = compared_replies.c.name, comparisons.c.blind
        is_chosen = comparisons.c.chosen_id == compared_replies.c.message_id
        query = (
            select(
                name,
                func.count().label("compared"),
                func.count().filter(is_chosen).label("chosen"),
                func.count().filter(blind).label("blind_compared"),
                func.count().filter(blind, is_chosen).label("blind_chosen"),
            )
            .join(comparisons, comparisons.c.id == compared_replies.c.comparison_id)
            .join(conversations, conversations.c.id == comparisons.c.conversation_id)
            .where(conversations.c.owner_id == owner, conversations.c.deleted_at.is_(None))
            .where(comparisons.c.decided_at.is_not(None))
            .group_by(name)
        )
        with self._database.read_transaction() as connection:
            rows = [TallyRow(*row) for row in connection.execute(query)]
        return tuple(sorted(rows, key=lambda row: (-row.chosen, row.compared, row.name)))


def _select() -> Select[Any]:
    query = select(comparisons).join(conversations, conversations.c.id == comparisons.c.conversation_id)
    return query.where(conversations.c.deleted_at.is_(None))


def _get(connection: Connection, id: str) -> Comparison:
    row = connection.execute(_select().where(comparisons.c.id == id)).first()
    if row is None:
        raise NotFound("comparison", id)
    return _load(connection, [row])[0]


def _find_by_key(connection: Connection, conversation_id: str, key: str) -> Comparison | None:
    check_name("key", key)
    query = _select().where(comparisons.c.conversation_id == conversation_id, comparisons.c.key == key)
    row = connection.execute(query).first()
    return None if row is None else _load(connection, [row])[0]


def _load(connection: Connection, rows: Sequence[Any]) -> tuple[Comparison, ...]:
    query = select(compared_replies).join(messages, messages.c.id == compared_replies.c.message_id)
    query = query.where(compared_replies.c.comparison_id.in_([row.id for row in rows]))
    columns: dict[str, list[ComparedReply]] = {row.id: [] for row in rows}
    for row in connection.execute(query.order_by(compared_replies.c.position)):
        columns[row.comparison_id].append(ComparedReply(row.message_id, row.name, row.model, row.parameters))
    return tuple(
        Comparison(
            id=row.id,
            conversation_id=row.conversation_id,
            parent_id=row.parent_id,
            blind=row.blind,
            replies=tuple(columns[row.id]),
            created_at=parse_time(row.created_at),
            decided_at=None if row.decided_at is None else parse_time(row.decided_at),
            chosen_id=row.chosen_id,
        )
        for row in rows
    )
