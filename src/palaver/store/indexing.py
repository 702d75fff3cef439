"""The index of words: what is put in when a message is written. `search.py` asks it.

SQLite keeps one row a message in an FTS5 table. PostgreSQL remembers at most 256 places of a word in a row, so a
message is several rows there, each short enough, with an overlap that a phrase may span. Both get words that are cut
already, so that neither's own idea of a word matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, select, text
from sqlalchemy.dialects.postgresql import TSVECTOR

from palaver.store.schema import messages
from palaver.store.words import words

_PIECE = 250
OVERLAP = 40
"""The longest phrase that is surely found in a long message."""
_BATCH = 1000

_PUT_SQLITE = text("INSERT INTO search_words (rowid, words) VALUES (:seq, :words)")
_DROP_SQLITE = text("DELETE FROM search_words WHERE rowid = :seq")
_PUT_POSTGRES = text(
    "INSERT INTO search_words (seq, piece, words) VALUES (:seq, :piece, CAST(:words AS tsvector))"
).bindparams(bindparam("words", type_=TSVECTOR))
_DROP_POSTGRES = text("DELETE FROM search_words WHERE seq = :seq")


def index(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    """Adds a message that isn't there yet."""
    rows = list(_rows(connection, seq, parts))
    if rows:
        connection.execute(_PUT_SQLITE if _is_sqlite(connection) else _PUT_POSTGRES, rows)


def reindex(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    connection.execute(_DROP_SQLITE if _is_sqlite(connection) else _DROP_POSTGRES, {"seq": seq})
    index(connection, seq, parts)


def rebuild(connection: Connection) -> None:
    """The whole index anew, from the messages."""
    connection.execute(text("DELETE FROM search_words"))
    after = 0
    while rows := _batch(connection, after):
        for row in rows:
            index(connection, row.seq, row.parts)
        after = rows[-1].seq


def said(parts: Iterable[Mapping[str, Any]]) -> str:
    """What is searched: the text that was said, not thoughts nor calls."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def lexeme(word: str) -> str:
    """A word as PostgreSQL reads it in a vector or a query; ours hold no quote and no backslash."""
    return f"'{word}'"


def _batch(connection: Connection, after: int) -> list[Any]:
    query = select(messages.c.seq, messages.c.parts).where(messages.c.seq > after).order_by(messages.c.seq)
    return list(connection.execute(query.limit(_BATCH)))


def _rows(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    found = words(said(parts))
    if not found:
        return
    if _is_sqlite(connection):
        yield {"seq": seq, "words": " ".join(found)}
        return
    for piece, start in enumerate(range(0, max(1, len(found) - OVERLAP), _PIECE - OVERLAP)):
        yield {"seq": seq, "piece": piece, "words": _vector(found[start : start + _PIECE])}


def _vector(found: list[str]) -> str:
    return " ".join(f"{lexeme(word)}:{place}" for place, word in enumerate(found, 1))


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"
