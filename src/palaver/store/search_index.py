"""The full-text index: tokenizes messages into words and writes the index rows. `search.py` queries them.

SQLite keeps one row per message in an FTS5 table. PostgreSQL stores at most 256 positions of a word per row. There a
short message is one row. A long message has rows with all its words, without positions (pieces 0, -1, ...), for word
queries, and overlapping rows with the words of one piece and their positions (1, 2, ...), for phrase queries. Both
databases get words that were split here, so that their own tokenizers do not matter.

Every message has two more words, which users cannot type: its owner and its conversation. So the index itself restricts
a search to one user."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, select, text

from palaver.store.schema import messages

MAX_WORD = 64
MAX_TERMS = 16

_UNSPACED = (
    "\u2600-\u27bf\u2e80-\u2fdf\u3005-\u3007\u3041-\u30ff\u3100-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\u1100-\u11ff\uf900-\ufaff\U0001f300-\U0001faff\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
"""Scripts without spaces (Han, Kana, Hangul, Thai, Lao, Burmese, Khmer), and emoji: every character is a word."""
_INDIC = "\u0900-\u0963\u0966-\u0dff"
"""Letters with vowel signs, which are no letters by themselves but belong to the word."""
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(rf"(?:[^\W_]|[{_UNSPACED}{_INDIC}])+")
_ACCENTS = re.compile("[\u0300-\u036f]+")


@dataclass(frozen=True, slots=True)
class SearchTerm:
    """Words that must follow each other. With `is_prefix` the last one matches as a prefix."""

    words: tuple[str, ...]
    is_prefix: bool


def fold_text(text: str) -> str:
    bare = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFC", bare).casefold()


def split_words(text: str) -> list[str]:
    plain = text.casefold() if text.isascii() else _UNSPACED_CHARACTER.sub(r" \g<0> ", fold_text(text))
    return [word[:MAX_WORD] for word in _WORD.findall(plain)]


def is_unspaced(word: str) -> bool:
    """Whether the word is a character of a script without spaces."""
    return _UNSPACED_CHARACTER.fullmatch(word) is not None


def query_terms(query: str) -> tuple[SearchTerm, ...]:
    """Parses a query: every term must match, one in "quotes" exactly, others as word prefixes."""
    terms = []
    for quoted, bare in re.findall(r'"([^"]*)"?|([^\s"]+)', query):
        parts = tuple(split_words(quoted or bare))
        if parts:
            terms.append(SearchTerm(parts, is_prefix=not quoted and not _UNSPACED_CHARACTER.match(parts[-1])))
    return tuple(terms[:MAX_TERMS])


_PIECE_WORDS = 250
OVERLAP = 40
"""Words that neighbouring pieces share: the longest phrase that is always found in a long message."""
_ROW_WORDS = 10_000
"""Words in a row without positions. All terms of a query must be in one such row."""
_REBUILD_BATCH = 1000

_OWNER_MARK, _CONVERSATION_MARK = "\ue000", "\ue001"
"""Prefixes of the two scope words: private-use characters, which no query contains."""
_FROM_MESSAGE = "FROM messages AS m JOIN conversations AS c ON c.id = m.conversation_id WHERE m.seq = :seq"
_INSERT_SQLITE = text(
    "INSERT INTO search_words (rowid, words) "
    f"SELECT m.seq, :words || ' {_OWNER_MARK}' || c.owner_id || ' {_CONVERSATION_MARK}' || c.id {_FROM_MESSAGE}"
)
_DELETE_SQLITE = text("DELETE FROM search_words WHERE rowid = :seq")
_INSERT_POSTGRES = text(
    "INSERT INTO search_words (seq, piece, words) SELECT m.seq, :piece, CAST(CAST(:words AS TEXT) "
    f"|| ' ''{_OWNER_MARK}' || c.owner_id || ''' ''{_CONVERSATION_MARK}' || c.id || '''' AS tsvector) {_FROM_MESSAGE}"
)
_DELETE_POSTGRES = text("DELETE FROM search_words WHERE seq = :seq")


def index(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    """Adds a message that is not indexed yet."""
    _insert(connection, list(_rows(connection, seq, parts)))


def reindex(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    connection.execute(_DELETE_SQLITE if _is_sqlite(connection) else _DELETE_POSTGRES, {"seq": seq})
    index(connection, seq, parts)


def rebuild(connection: Connection) -> None:
    """Rebuilds the whole index from the messages."""
    connection.execute(text("DELETE FROM search_words"))
    after = 0
    while rows := _batch(connection, after):
        _insert(connection, [put for row in rows for put in _rows(connection, row.seq, row.parts)])
        after = rows[-1].seq


def indexed_text(parts: Iterable[Mapping[str, Any]]) -> str:
    """The searchable text of a message: no thinking, no tool calls."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def scope_words(owner: str, conversation: str | None) -> list[str]:
    """The index words that restrict a search to this owner, and to this conversation."""
    return [_OWNER_MARK + owner] + ([] if conversation is None else [_CONVERSATION_MARK + conversation])


def bigrams(words: Sequence[str]) -> list[str]:
    """Pairs of consecutive characters of a script without spaces.

    Single characters are common, pairs are rare. With pairs as words, PostgreSQL need not compare positions in every
    text that contains the characters. SQLite compares them quickly enough.
    """
    return [one + other for one, other in pairwise(words) if is_unspaced(one) and is_unspaced(other)]


def lexeme(word: str) -> str:
    """A word quoted for a tsvector or tsquery. Only ids from requests can need escaping."""
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(_INSERT_SQLITE if _is_sqlite(connection) else _INSERT_POSTGRES, rows)


def _batch(connection: Connection, after: int) -> list[Any]:
    query = select(messages.c.seq, messages.c.parts).where(messages.c.seq > after).order_by(messages.c.seq)
    return list(connection.execute(query.limit(_REBUILD_BATCH)))


def _rows(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    words = split_words(indexed_text(parts))
    if not words:
        return
    if _is_sqlite(connection):
        yield {"seq": seq, "words": " ".join(words)}
        return
    for piece, vector in _pieces(words):
        yield {"seq": seq, "piece": piece, "words": vector}


def _pieces(words: list[str]) -> Iterator[tuple[int, str]]:
    if len(words) <= _PIECE_WORDS:
        yield 0, f"{_vector_with_positions(words)} {_vector(bigrams(words))}"
        return
    unique = list(dict.fromkeys((*words, *bigrams(words))))
    for number, start in enumerate(range(0, len(unique), _ROW_WORDS)):
        yield -number, _vector(unique[start : start + _ROW_WORDS])
    for piece, start in enumerate(range(0, len(words) - OVERLAP, _PIECE_WORDS - OVERLAP), 1):
        yield piece, _vector_with_positions(words[start : start + _PIECE_WORDS])


def _vector_with_positions(words: Iterable[str]) -> str:
    return " ".join(f"{lexeme(word)}:{position}" for position, word in enumerate(words, 1))


def _vector(words: Iterable[str]) -> str:
    return " ".join(map(lexeme, words))


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"
