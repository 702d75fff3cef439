"""Full-text search in messages, newest first, in any script."""

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
    bigrams,
    fold_text,
    indexed_text,
    lexeme,
    query_terms,
    rebuild,
    scope_words,
)

_SNIPPET_BEFORE, _SNIPPET = 40, 160
"""Characters of a snippet: before the match, and in total."""
_RECENT, _RECENT_FOR_PHRASES = 1000, 8000
"""Recent messages that PostgreSQL scans one by one. A word with less than a page of hits there is rare. A phrase may be
rare although its words are common, and then the index is of little help."""


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
        """Messages that contain every term of the query, in conversations that are not deleted.

        Terms are word prefixes (in scripts without spaces: any consecutive characters); "in quotes" they are a phrase.
        """
        terms = query_terms(query)
        if not terms:
            return ()
        values: dict[str, Any] = {"owner": owner, "limit": limit, "conversation": conversation_id}
        with self._database.read_transaction() as connection:
            rows = (
                _search_sqlite(connection, terms, values)
                if self._database.is_sqlite
                else _search_postgres(connection, terms, values)
            )
        return tuple(_hit(row, terms) for row in rows)

    def rebuild(self) -> None:
        """Rebuilds the index from the messages."""
        with self._database.write_transaction() as connection:
            rebuild(connection)


_COLUMNS = "m.id, m.conversation_id, c.title, m.role, m.created_at, m.parts"
_SCOPE = (
    "c.owner_id = :owner AND c.deleted_at IS NULL "
    "AND (CAST(:conversation AS TEXT) IS NULL OR m.conversation_id = :conversation)"
)


def _search_sqlite(connection: Connection, terms: Sequence[SearchTerm], values: dict[str, Any]) -> Sequence[Any]:
    places = scope_words(values["owner"], values["conversation"])
    match = " AND ".join(_fts_phrase(term) for term in (*(SearchTerm((word,), False) for word in places), *terms))
    # CROSS JOIN keeps the index outermost: it returns the newest first, so that few rows are read
    statement = text(
        f"SELECT {_COLUMNS} FROM search_words AS w CROSS JOIN messages AS m ON m.seq = w.rowid "
        f"CROSS JOIN conversations AS c ON c.id = m.conversation_id "
        f"WHERE w.words MATCH :match AND {_SCOPE} ORDER BY w.rowid DESC LIMIT :limit"
    ).columns(parts=JsonColumn)
    return connection.execute(statement, {**values, "match": match}).all()


def _fts_phrase(term: SearchTerm) -> str:
    phrase = " ".join(term.words).replace('"', '""')
    return f'"{phrase}"{" *" if term.is_prefix else ""}'


def _search_postgres(connection: Connection, terms: Sequence[SearchTerm], values: dict[str, Any]) -> Sequence[Any]:
    """Scans recent messages first, where common words are found at once, then asks the index for rare ones.

    The planner by itself confuses the two cases and reads half the store.
    """
    condition, parameters = _match_condition(terms, values)
    newest = _newest_query(condition, _RECENT_FOR_PHRASES if any(map(_needs_positions, terms)) else _RECENT)
    rows = _load_rows(connection, connection.execute(newest, parameters).scalars().all(), values)
    count = values["limit"]
    while len(rows) < values["limit"]:
        found = connection.execute(_index_query(condition), {**parameters, "limit": count}).scalars().all()
        rows = _load_rows(connection, found, values)
        if len(found) < count:
            break
        count *= 10  # some were in deleted conversations
    return rows


def _match_condition(terms: Sequence[SearchTerm], values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A condition that a row contains all words, and that it or a piece of its message contains each phrase."""
    words = [lexeme(word) for word in scope_words(values["owner"], values["conversation"])]
    conditions = ["w.piece <= 0", "w.words @@ CAST(:words AS tsquery)"]
    parameters: dict[str, Any] = {"limit": values["limit"]}
    for number, term in enumerate(terms):
        *first, last = map(lexeme, term.words)
        last = f"{last}:*" if term.is_prefix else last
        term_bigrams = bigrams(term.words)
        words += (
            map(lexeme, term_bigrams)
            if len(term_bigrams) == len(first) > 0
            else (*first, last, *map(lexeme, term_bigrams))
        )
        if first:
            matches = f"words @@ CAST(:phrase{number} AS tsquery)"
            piece = f"SELECT 1 FROM search_words AS p WHERE p.seq = w.seq AND p.piece > 0 AND p.{matches}"
            conditions.append(f"(w.{matches} OR EXISTS ({piece}))")
            parameters[f"phrase{number}"] = " <-> ".join((*first, last))
    return " AND ".join(conditions), {**parameters, "words": " & ".join(words)}


def _needs_positions(term: SearchTerm) -> bool:
    """Whether the term is a phrase that bigrams do not cover, so that the index knows only its words."""
    return len(bigrams(term.words)) < len(term.words) - 1


def _newest_query(condition: str, count: int) -> TextClause:
    newest = f"SELECT * FROM search_words WHERE piece <= 0 ORDER BY seq DESC, piece DESC LIMIT {count}"
    return text(f"SELECT DISTINCT w.seq FROM ({newest}) AS w WHERE {condition} ORDER BY w.seq DESC LIMIT :limit")


def _index_query(condition: str) -> TextClause:
    return text(
        f"WITH found AS MATERIALIZED (SELECT w.seq FROM search_words AS w WHERE {condition}) "
        "SELECT DISTINCT seq FROM found ORDER BY seq DESC LIMIT :limit"
    )


def _load_rows(connection: Connection, found: Sequence[int], values: dict[str, Any]) -> Sequence[Any]:
    statement = text(
        f"SELECT {_COLUMNS} FROM messages AS m JOIN conversations AS c ON c.id = m.conversation_id "
        f"WHERE m.seq = ANY(:found) AND {_SCOPE} ORDER BY m.seq DESC LIMIT :limit"
    ).columns(parts=JsonColumn)
    return connection.execute(statement, {**values, "found": list(found)}).all() if found else ()


def _hit(row: Any, terms: Sequence[SearchTerm]) -> SearchHit:
    snippet = _snippet(indexed_text(row.parts), terms[0])
    return SearchHit(row.conversation_id, row.title, row.id, Role(row.role), parse_time(row.created_at), snippet)


def _snippet(content: str, term: SearchTerm) -> str:
    """The text around the first word of the term. Folding may shift the position by a few characters."""
    position = max(0, fold_text(content).find(term.words[0]))
    start = max(0, position - _SNIPPET_BEFORE)
    piece = " ".join(content[start : start + _SNIPPET].split())
    return f"{'…' if start else ''}{piece}{'…' if start + _SNIPPET < len(content) else ''}"
