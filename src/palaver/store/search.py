"""Finding what was said, the newest first, in any script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, TextClause, text

from palaver.messages import Role
from palaver.store.database import Database, JsonColumn
from palaver.store.records import parse_time
from palaver.store.search_index import (
    SearchTerm,
    fold_text,
    indexed_text,
    lexeme,
    pairs,
    place_words,
    query_terms,
    rebuild,
)

_BEFORE, _AROUND = 40, 160
"""Characters of a hit's surroundings: before it, and in all."""
_NEWEST, _NEWEST_FOR_PHRASES = 1000, 8000
"""Messages that PostgreSQL looks through one by one. A word with less than a page of hits there is rare; a phrase may
be rare although its words are common, and then the index is of little help."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    conversation_id: str
    title: str
    message_id: str
    role: Role
    created_at: datetime
    snippet: str


class MessageSearch:
    def __init__(self, database: Database) -> None:
        self._database = database

    def find(
        self, owner: str, query: str, limit: int = 20, conversation_id: str | None = None
    ) -> tuple[SearchHit, ...]:
        """Messages that hold every term of the query, in conversations that are not deleted.

        Terms are beginnings of words (in scripts without spaces: any characters that follow each other);
        "in quotes" they are a phrase.
        """
        wanted = query_terms(query)
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


def _sqlite(connection: Connection, wanted: Sequence[SearchTerm], values: dict[str, Any]) -> Sequence[Any]:
    places = place_words(values["owner"], values["conversation"])
    match = " AND ".join(_phrase(term) for term in (*(SearchTerm((word,), False) for word in places), *wanted))
    # CROSS JOIN keeps the index outermost: it gives the newest first, so that few rows are read
    statement = text(
        f"SELECT {_COLUMNS} FROM search_words AS w CROSS JOIN messages AS m ON m.seq = w.rowid "
        f"CROSS JOIN conversations AS c ON c.id = m.conversation_id "
        f"WHERE w.words MATCH :match AND {_CONDITION} ORDER BY w.rowid DESC LIMIT :limit"
    ).columns(parts=JsonColumn)
    return connection.execute(statement, {**values, "match": match}).all()


def _phrase(term: SearchTerm) -> str:
    together = " ".join(term.words).replace('"', '""')
    return f'"{together}"{" *" if term.open else ""}'


def _postgres(connection: Connection, wanted: Sequence[SearchTerm], values: dict[str, Any]) -> Sequence[Any]:
    """Common words are among the newest messages, so these are looked through first; rare ones the index gives
    quickly. Left to itself the planner takes the one for the other, and reads half the store."""
    condition, asked = _condition(wanted, values)
    newest = _newest(condition, _NEWEST_FOR_PHRASES if any(map(_is_loose, wanted)) else _NEWEST)
    rows = _shown(connection, connection.execute(newest, asked).scalars().all(), values)
    count = values["limit"]
    while len(rows) < values["limit"]:
        found = connection.execute(_indexed(condition), {**asked, "limit": count}).scalars().all()
        rows = _shown(connection, found, values)
        if len(found) < count:
            break
        count *= 10  # some were in deleted conversations
    return rows


def _condition(wanted: Sequence[SearchTerm], values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """That a row has all words; and for each phrase, that it or a piece of the same message has it."""
    words = [lexeme(word) for word in place_words(values["owner"], values["conversation"])]
    conditions = ["w.piece <= 0", "w.words @@ CAST(:words AS tsquery)"]
    asked: dict[str, Any] = {"limit": values["limit"]}
    for number, term in enumerate(wanted):
        *first, last = map(lexeme, term.words)
        last = f"{last}:*" if term.open else last
        paired = pairs(term.words)
        words += map(lexeme, paired) if len(paired) == len(first) > 0 else (*first, last, *map(lexeme, paired))
        if first:
            matches = f"words @@ CAST(:phrase{number} AS tsquery)"
            piece = f"SELECT 1 FROM search_words AS p WHERE p.seq = w.seq AND p.piece > 0 AND p.{matches}"
            conditions.append(f"(w.{matches} OR EXISTS ({piece}))")
            asked[f"phrase{number}"] = " <-> ".join((*first, last))
    return " AND ".join(conditions), {**asked, "words": " & ".join(words)}


def _is_loose(term: SearchTerm) -> bool:
    """Whether it is a phrase that the index knows by its words alone."""
    return len(pairs(term.words)) < len(term.words) - 1


def _newest(condition: str, count: int) -> TextClause:
    newest = f"SELECT * FROM search_words WHERE piece <= 0 ORDER BY seq DESC, piece DESC LIMIT {count}"
    return text(f"SELECT DISTINCT w.seq FROM ({newest}) AS w WHERE {condition} ORDER BY w.seq DESC LIMIT :limit")


def _indexed(condition: str) -> TextClause:
    return text(
        f"WITH found AS MATERIALIZED (SELECT w.seq FROM search_words AS w WHERE {condition}) "
        "SELECT DISTINCT seq FROM found ORDER BY seq DESC LIMIT :limit"
    )


def _shown(connection: Connection, found: Sequence[int], values: dict[str, Any]) -> Sequence[Any]:
    statement = text(
        f"SELECT {_COLUMNS} FROM messages AS m JOIN conversations AS c ON c.id = m.conversation_id "
        f"WHERE m.seq = ANY(:found) AND {_CONDITION} ORDER BY m.seq DESC LIMIT :limit"
    ).columns(parts=JsonColumn)
    return connection.execute(statement, {**values, "found": list(found)}).all() if found else ()


def _hit(row: Any, wanted: Sequence[SearchTerm]) -> SearchHit:
    snippet = _snippet(indexed_text(row.parts), wanted[0])
    return SearchHit(row.conversation_id, row.title, row.id, Role(row.role), parse_time(row.created_at), snippet)


def _snippet(content: str, term: SearchTerm) -> str:
    """About where the term's first word is; folding may shift a place by a few characters."""
    place = max(0, fold_text(content).find(term.words[0]))
    start = max(0, place - _BEFORE)
    piece = " ".join(content[start : start + _AROUND].split())
    return f"{'…' if start else ''}{piece}{'…' if start + _AROUND < len(content) else ''}"
