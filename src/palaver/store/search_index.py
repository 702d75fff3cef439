"""The index of words: what is put in when a message is written. `search.py` asks it.

SQLite keeps one row a message in an FTS5 table. PostgreSQL remembers at most 256 places of a word in a row: there a
short message is one row, and a long one has rows with all its words, without their places (pieces 0, -1, ...), which
are searched, and rows with some of its words in their places (1, 2, ...), with an overlap that a phrase may span, in
which phrases are looked up. Both get words that are cut already, so that neither's own idea of a word matters.

Every message has two more words, which nobody can type: its owner and its conversation. So the index itself finds
what one user said, among a thousand users."""

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

_ALONE = (
    "\u2600-\u27bf\u2e80-\u2fdf\u3005-\u3007\u3041-\u30ff\u3100-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\u1100-\u11ff\uf900-\ufaff\U0001f300-\U0001faff\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
"""Scripts without spaces (Han, Kana, Hangul, Thai, Lao, Burmese, Khmer), and emoji."""
_INDIC = "\u0900-\u0963\u0966-\u0dff"
"""Letters with vowel signs, which are no letters by themselves but part of the word."""
_EACH = re.compile(f"[{_ALONE}]")
_WORD = re.compile(rf"(?:[^\W_]|[{_ALONE}{_INDIC}])+")
_ACCENTS = re.compile("[\u0300-\u036f]+")


@dataclass(frozen=True, slots=True)
class SearchTerm:
    """Words that must follow each other; `open`: the last may go on."""

    words: tuple[str, ...]
    open: bool


def fold_text(text: str) -> str:
    bare = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFC", bare).casefold()


def split_words(text: str) -> list[str]:
    plain = text.casefold() if text.isascii() else _EACH.sub(r" \g<0> ", fold_text(text))
    return [word[:MAX_WORD] for word in _WORD.findall(plain)]


def is_alone(word: str) -> bool:
    """Whether it is a character of a script without spaces."""
    return _EACH.fullmatch(word) is not None


def query_terms(query: str) -> tuple[SearchTerm, ...]:
    """What a person typed: every term must be found; one in "quotes" exactly, others as beginnings of words."""
    found = []
    for quoted, bare in re.findall(r'"([^"]*)"?|([^\s"]+)', query):
        parts = tuple(split_words(quoted or bare))
        if parts:
            found.append(SearchTerm(parts, open=not quoted and not _EACH.match(parts[-1])))
    return tuple(found[:MAX_TERMS])


_PIECE = 250
OVERLAP = 40
"""The longest phrase that is surely found in a long message."""
_ALL = 10_000
"""Words in a row without places. The terms of a query must be in one such row."""
_BATCH = 1000

_OWNER, _CONVERSATION = "\ue000", "\ue001"
"""What the two words begin with: characters that are no letters."""
_FROM = "FROM messages AS m JOIN conversations AS c ON c.id = m.conversation_id WHERE m.seq = :seq"
_PUT_SQLITE = text(
    "INSERT INTO search_words (rowid, words) "
    f"SELECT m.seq, :words || ' {_OWNER}' || c.owner_id || ' {_CONVERSATION}' || c.id {_FROM}"
)
_DROP_SQLITE = text("DELETE FROM search_words WHERE rowid = :seq")
_PUT_POSTGRES = text(
    "INSERT INTO search_words (seq, piece, words) SELECT m.seq, :piece, CAST(CAST(:words AS TEXT) "
    f"|| ' ''{_OWNER}' || c.owner_id || ''' ''{_CONVERSATION}' || c.id || '''' AS tsvector) {_FROM}"
)
_DROP_POSTGRES = text("DELETE FROM search_words WHERE seq = :seq")


def index(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    """Adds a message that isn't there yet."""
    _put(connection, list(_rows(connection, seq, parts)))


def reindex(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    connection.execute(_DROP_SQLITE if _is_sqlite(connection) else _DROP_POSTGRES, {"seq": seq})
    index(connection, seq, parts)


def rebuild(connection: Connection) -> None:
    """The whole index anew, from the messages."""
    connection.execute(text("DELETE FROM search_words"))
    after = 0
    while rows := _batch(connection, after):
        _put(connection, [put for row in rows for put in _rows(connection, row.seq, row.parts)])
        after = rows[-1].seq


def indexed_text(parts: Iterable[Mapping[str, Any]]) -> str:
    """What is searched: the text that was said, not thoughts nor calls."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def place_words(owner: str, conversation: str | None) -> list[str]:
    """The words that the messages of this owner, and of this conversation, have."""
    return [_OWNER + owner] + ([] if conversation is None else [_CONVERSATION + conversation])


def pairs(found: Sequence[str]) -> list[str]:
    """Characters of a script without spaces that follow each other.

    Alone they are common, in pairs they are rare: with pairs as words, PostgreSQL need not compare the places in
    every text that has the characters somewhere. SQLite compares them quickly enough.
    """
    return [one + other for one, other in pairwise(found) if is_alone(one) and is_alone(other)]


def lexeme(word: str) -> str:
    """A word as PostgreSQL reads it in a vector or a query; only an id that somebody asks for may need escaping."""
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _put(connection: Connection, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(_PUT_SQLITE if _is_sqlite(connection) else _PUT_POSTGRES, rows)


def _batch(connection: Connection, after: int) -> list[Any]:
    query = select(messages.c.seq, messages.c.parts).where(messages.c.seq > after).order_by(messages.c.seq)
    return list(connection.execute(query.limit(_BATCH)))


def _rows(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    found = split_words(indexed_text(parts))
    if not found:
        return
    if _is_sqlite(connection):
        yield {"seq": seq, "words": " ".join(found)}
        return
    for piece, vector in _pieces(found):
        yield {"seq": seq, "piece": piece, "words": vector}


def _pieces(found: list[str]) -> Iterator[tuple[int, str]]:
    if len(found) <= _PIECE:
        yield 0, f"{_placed(found)} {_listed(pairs(found))}"
        return
    every = list(dict.fromkeys((*found, *pairs(found))))
    for number, start in enumerate(range(0, len(every), _ALL)):
        yield -number, _listed(every[start : start + _ALL])
    for piece, start in enumerate(range(0, len(found) - OVERLAP, _PIECE - OVERLAP), 1):
        yield piece, _placed(found[start : start + _PIECE])


def _placed(found: Iterable[str]) -> str:
    return " ".join(f"{lexeme(word)}:{place}" for place, word in enumerate(found, 1))


def _listed(found: Iterable[str]) -> str:
    return " ".join(map(lexeme, found))


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"
