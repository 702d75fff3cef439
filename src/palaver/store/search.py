"""Finding what was said, the newest first, in any script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, text

from palaver.messages import Role
from palaver.store.columns import Json
from palaver.store.database import Database
from palaver.store.identity import moment
from palaver.store.indexing import lexeme, rebuild, said
from palaver.store.words import Term, folded, terms

_BEFORE, _AROUND = 40, 160
"""Characters of a hit's surroundings: before it, and in all."""


@dataclass(frozen=True, slots=True)
class Hit:
    conversation_id: str
    title: str
    message_id: str
    role: Role
    created_at: datetime
    snippet: str


class Search:
    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, owner: str, query: str, limit: int = 20, conversation_id: str | None = None) -> tuple[Hit, ...]:
        """Messages that hold every term of the query, in conversations that are not deleted.

        Terms are beginnings of words (in scripts without spaces: any characters that follow each other);
        "in quotes" they are a phrase.
        """
        wanted = terms(query)
        if not wanted:
            return ()
        values: dict[str, Any] = {"owner": owner, "limit": limit, "conversation": conversation_id}
        with self._database.reading() as connection:
            rows = (
                _sqlite(connection, wanted, values)
                if self._database.is_sqlite
                else _postgres(connection, wanted, values)
            )
        return tuple(_hit(row, wanted) for row in rows)

    def rebuild(self) -> None:
        """Writes the index anew, from the messages."""
        with self._database.writing() as connection:
            rebuild(connection)


_COLUMNS = "m.id, m.conversation_id, c.title, m.role, m.created_at, m.parts"
_CONDITION = (
    "c.owner_id = :owner AND c.deleted_at IS NULL "
    "AND (CAST(:conversation AS TEXT) IS NULL OR m.conversation_id = :conversation)"
)


def _sqlite(connection: Connection, wanted: Sequence[Term], values: dict[str, Any]) -> Sequence[Any]:
    match = " AND ".join(_phrase(term) for term in wanted)
    # CROSS JOIN keeps the index outermost: it gives the newest first, so that few rows are read
    statement = text(
        f"SELECT {_COLUMNS} FROM search_words AS w CROSS JOIN messages AS m ON m.seq = w.rowid "
        f"CROSS JOIN conversations AS c ON c.id = m.conversation_id "
        f"WHERE w.words MATCH :match AND {_CONDITION} ORDER BY w.rowid DESC LIMIT :limit"
    ).columns(parts=Json)
    return connection.execute(statement, {**values, "match": match}).all()


def _phrase(term: Term) -> str:
    return f'"{" ".join(term.words)}"{" *" if term.open else ""}'


def _postgres(connection: Connection, wanted: Sequence[Term], values: dict[str, Any]) -> Sequence[Any]:
    """Where one piece holds all terms, which is quickly told; and unless that fills the page, where each term may be
    in another piece of a long message."""
    together = " & ".join(f"({_tsquery(term)})" for term in wanted)
    rows = _matching(connection, "w.words @@ CAST(:term0 AS tsquery)", {**values, "term0": together})
    if len(wanted) == 1 or len(rows) == values["limit"]:
        return rows
    apart = " AND ".join(
        f"EXISTS (SELECT 1 FROM search_words AS o WHERE o.seq = w.seq AND o.words @@ CAST(:term{place} AS tsquery))"
        for place in range(len(wanted))
    )
    queries = {f"term{place}": _tsquery(term) for place, term in enumerate(wanted)}
    return _matching(connection, f"w.piece = 0 AND {apart}", {**values, **queries})


def _matching(connection: Connection, condition: str, values: dict[str, Any]) -> Sequence[Any]:
    statement = text(
        f"SELECT DISTINCT ON (w.seq) {_COLUMNS} FROM search_words AS w JOIN messages AS m ON m.seq = w.seq "
        f"JOIN conversations AS c ON c.id = m.conversation_id "
        f"WHERE {condition} AND {_CONDITION} ORDER BY w.seq DESC LIMIT :limit"
    ).columns(parts=Json)
    return connection.execute(statement, values).all()


def _tsquery(term: Term) -> str:
    *first, last = map(lexeme, term.words)
    return " <-> ".join((*first, f"{last}:*" if term.open else last))


def _hit(row: Any, wanted: Sequence[Term]) -> Hit:
    snippet = _snippet(said(row.parts), wanted[0])
    return Hit(row.conversation_id, row.title, row.id, Role(row.role), moment(row.created_at), snippet)


def _snippet(content: str, term: Term) -> str:
    """About where the term's first word is; folding may shift a place by a few characters."""
    place = max(0, folded(content).find(term.words[0]))
    start = max(0, place - _BEFORE)
    piece = " ".join(content[start : start + _AROUND].split())
    return f"{'…' if start else ''}{piece}{'…' if start + _AROUND < len(content) else ''}"
