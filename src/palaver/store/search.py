"""Full-text search in messages, newest first, in any script: the index rows of messages, and queries on them.

SQLite keeps one row per message in an FTS5 table. PostgreSQL stores at most 256 positions of a word per row. There a
short message is one row. A long message has rows with all its words, without positions (pieces 0, -1, ...), for word
queries, and overlapping rows with the words of one piece and their positions (1, 2, ...), for phrase queries. Both
databases get words that were split here, so that their own tokenizers do not matter.

Every message has two more words, which users cannot type: its owner and its conversation. So the index itself restricts
a search to one user.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, TextClause, select, text

from palaver.messages import Role
from palaver.store.database import Database, JsonColumn
from palaver.store.records import parse_time
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

OWNER_MARK, CONVERSATION_MARK = "\ue000", "\ue001"
"""Prefixes of the two scope words: private-use characters, which no query contains."""
_FROM_MESSAGE = "FROM messages AS m JOIN conversations AS c ON c.id = m.conversation_id WHERE m.seq = :seq"
_INSERT_SQLITE = text(
    "INSERT INTO search_words (rowid, words) "
    f"SELECT m.seq, :words || ' {OWNER_MARK}' || c.owner_id || ' {CONVERSATION_MARK}' || c.id {_FROM_MESSAGE}"
)
_DELETE_SQLITE = text("DELETE FROM search_words WHERE rowid = :seq")
_INSERT_POSTGRES = text(
    "INSERT INTO search_words (seq, piece, words) SELECT m.seq, :piece, CAST(CAST(:words AS TEXT) "
    f"|| ' ''{OWNER_MARK}' || c.owner_id || ''' ''{CONVERSATION_MARK}' || c.id || '''' AS tsvector) {_FROM_MESSAGE}"
)
_DELETE_POSTGRES = text("DELETE FROM search_words WHERE seq = :seq")


def index(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    """Adds a message that is not indexed yet."""
    _insert(connection, list(_rows(connection, seq, parts)))


def reindex(connection: Connection, seq: int, parts: Iterable[Mapping[str, Any]]) -> None:
    connection.execute(_DELETE_SQLITE if _is_sqlite(connection) else _DELETE_POSTGRES, {"seq": seq})
    index(connection, seq, parts)


def index_words(parts: Iterable[Mapping[str, Any]]) -> str:
    """The words of a message on SQLite, without its two scope words; empty if it has none."""
    return " ".join(split_words(indexed_text(parts)))


def replace_words(connection: Connection, seq: int, words: str) -> None:
    """As `reindex` on SQLite, with the words of the message."""
    connection.execute(_DELETE_SQLITE, {"seq": seq})
    if words:
        connection.execute(_INSERT_SQLITE, {"seq": seq, "words": words})


def rebuild(connection: Connection) -> None:
    """Rebuilds the whole index from the messages."""
    connection.execute(text("DELETE FROM search_words"))
    after = 0
    while rows := _batch(connection, after):
        _insert(connection, [put for row in rows for put in _rows(connection, row.seq, row.parts)])
        after = rows[-1].seq


def indexed_text(parts: Iterable[Mapping[str, Any]]) -> str:
    """The searchable text of a message: what was said, then what was thought; no tool calls."""
    return "\n".join(_texts(parts, "text") + _texts(parts, "thinking"))


def _texts(parts: Iterable[Mapping[str, Any]], kind: str) -> list[str]:
    return [part["text"] for part in parts if part["type"] == kind]


def scope_words(owner: str, conversation: str | None) -> list[str]:
    """The index words that restrict a search to this owner, and to this conversation."""
    return [OWNER_MARK + owner] + ([] if conversation is None else [CONVERSATION_MARK + conversation])


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
    if not _is_sqlite(connection):
        for row in index_rows(parts):
            yield {"seq": seq, **row}
    elif words := index_words(parts):
        yield {"seq": seq, "words": words}


def index_rows(parts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The pieces of a message on PostgreSQL, without its two scope words."""
    if words := split_words(indexed_text(parts)):
        for piece, vector in _pieces(words):
            yield {"piece": piece, "words": vector}


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
    in_thought: bool = False
    """Whether the message contains the query only together with its thoughts. The snippet is then of a thought."""


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
    said, thought = ("\n".join(_texts(row.parts, kind)) for kind in ("text", "thinking"))
    words = split_words(said)
    missing = [term for term in terms if not _contains(words, term)] if thought else []
    snippet = _snippet(thought, missing[0]) if missing else _snippet(said, terms[0])
    created_at = parse_time(row.created_at)
    return SearchHit(row.conversation_id, row.title, row.id, Role(row.role), created_at, snippet, bool(missing))


def _contains(words: Sequence[str], term: SearchTerm) -> bool:
    *first, last = term.words
    ends = (number for number, word in enumerate(words) if (word.startswith(last) if term.is_prefix else word == last))
    return any(words[end - len(first) : end] == first for end in ends if end >= len(first))


def _snippet(content: str, term: SearchTerm) -> str:
    """The text around the first word of the term. Folding may shift the position by a few characters."""
    position = max(0, fold_text(content).find(term.words[0]))
    start = max(0, position - _SNIPPET_BEFORE)
    piece = " ".join(content[start : start + _SNIPPET].split())
    return f"{'…' if start else ''}{piece}{'…' if start + _SNIPPET < len(content) else ''}"
