"""The writes of running replies on PostgreSQL, as one statement each: every statement is a message to the server, and a
transaction of several has two more. To end and to resume a reply are for SQLite too: everything is computed before
the lock of its writers is taken.

A statement that ends, continues or changes a reply writes only if what it was computed from is still stored. If not, it
writes nothing, and the caller runs its transaction, which finds out why. Rows are locked in the order of their ids, as
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, text

from palaver.generation import Step
from palaver.store.database import json_text
from palaver.store.encoding import merge_tokens, pack_tokens
from palaver.store.notifications import CHANNEL, MAX_REPLIES
from palaver.store.search import CONVERSATION_MARK, OWNER_MARK, index_rows, index_words, replace_words


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """New tokens of one reply. `start` is its token count before them."""

    reply_id: str
    start: int
    steps: tuple[Step, ...]
    timings: Mapping[str, float] = field(default_factory=dict)
    """The timings of the reply up to these tokens; empty if they are not known."""

    @property
    def end(self) -> int:
        return self.start + len(self.steps)


_APPEND = text("""
    WITH frames AS MATERIALIZED (
        SELECT id, start, count, CAST(timings AS text), substring(CAST(:data AS bytea) FROM first FOR size) AS data
        FROM json_to_recordset(CAST(:frames AS json))
        AS frame (id text, start int, count int, timings json, first int, size int)
    ), held AS (
        SELECT message_id, tokens, watched FROM running
        WHERE message_id IN (SELECT id FROM frames) AND holder_id = :holder
        ORDER BY message_id FOR UPDATE
    ), written AS (
        SELECT frames.* FROM frames JOIN held ON held.message_id = frames.id
        WHERE frames.count > 0
        AND NOT EXISTS (SELECT FROM frames JOIN held ON held.message_id = id WHERE held.tokens <> start)
    ), counted AS (
        UPDATE running SET tokens = written.start + written.count, timings = written.timings
        FROM written WHERE running.message_id = written.id
    ), inserted AS (
        INSERT INTO reply_tokens (message_id, start, count, data) SELECT id, start, count, data FROM written
    ), read_elsewhere AS (
        SELECT id, (row_number() OVER () - 1) / :max_replies AS part
        FROM written JOIN held ON held.message_id = id WHERE watched
    ), notified AS MATERIALIZED (
        SELECT pg_notify(:channel, CAST(json_build_object('type', 'tokens', 'reply_ids', json_agg(id)) AS text))
        FROM read_elsewhere GROUP BY part
    )
    SELECT message_id, tokens, watched, (SELECT count(*) FROM notified) FROM held
""")
"""The frames are one text and their data one value: the driver takes long for arrays."""


def append(connection: Connection, holder: str, frames: Sequence[TokenFrame]) -> dict[str, Any]:
    """Appends the frames of held replies, unless one does not fit to its count, and notifies their readers. Returns the
    rows of held replies."""
    rows, data = [], bytearray()
    for one in frames:
        packed = pack_tokens(one.steps)
        row = {"id": one.reply_id, "start": one.start, "count": len(one.steps), "timings": dict(one.timings)}
        rows.append({**row, "first": len(data) + 1, "size": len(packed)})
        data += packed
    values: dict[str, Any] = {"holder": holder, "frames": json_text(rows), "data": bytes(data)}
    values |= {"channel": CHANNEL, "max_replies": MAX_REPLIES}
    return {row.message_id: row for row in connection.execute(_APPEND, values)}


_SYNCED = "synced AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true))"
"""The commit of the statement waits for the disk, on a connection whose other statements do not. `true`: only this one.
The statement must read it."""

_SELECT_TOKENS = text("SELECT count, data FROM reply_tokens WHERE message_id = :id ORDER BY start")
_END = text(f"""
    WITH {_SYNCED}, held AS (
        DELETE FROM running WHERE message_id = :id AND holder_id = :holder AND tokens = :tokens
        RETURNING watched, timings
    ), merged AS (
        UPDATE reply_tokens SET count = :tokens, data = CAST(:data AS bytea)
        WHERE message_id = :id AND start = 0 AND EXISTS (SELECT FROM held)
    ), surplus AS (
        DELETE FROM reply_tokens WHERE message_id = :id AND start > 0 AND EXISTS (SELECT FROM held)
    ), written AS (
        UPDATE messages SET parts = coalesce(CAST(:parts AS text), parts)
        WHERE id = :id AND EXISTS (SELECT FROM held) RETURNING seq, conversation_id
    ), unlinked AS (
        DELETE FROM message_blobs
        WHERE message_id = :id AND CAST(:parts AS text) IS NOT NULL AND EXISTS (SELECT FROM held)
    ), unindexed AS (
        DELETE FROM search_words
        WHERE seq IN (SELECT seq FROM written) AND CAST(:parts AS text) IS NOT NULL RETURNING seq
    ), indexed AS (
        INSERT INTO search_words (seq, piece, words)
        SELECT written.seq, row.piece, CAST(
            row.words || ' ''{OWNER_MARK}' || c.owner_id || ''' ''{CONVERSATION_MARK}' || c.id || '''' AS tsvector)
        FROM written JOIN conversations AS c ON c.id = written.conversation_id
        CROSS JOIN (SELECT count(*) FROM unindexed) AS emptied
        CROSS JOIN json_to_recordset(CAST(:rows AS json)) AS row (piece int, words text)
    ), ended AS (
        UPDATE replies SET status = :status, usage = :usage, error = :error, ended_at = :ended_at,
            timings = coalesce(CAST(:timings AS text), held.timings, replies.timings)
        FROM held WHERE message_id = :id
    )
    SELECT watched, (SELECT count(*) FROM synced) FROM held
""")


@dataclass(frozen=True, slots=True)
class StoredEnding:
    """The ending of a reply as it is stored."""

    tokens: int
    """How many tokens must be stored."""
    parts: list[dict[str, Any]] | None
    """None leaves the stored parts as they are. They must not have media."""
    values: Mapping[str, Any]
    """The columns of the reply; without "timings", those that were recorded with its last token."""


_HELD = text("""
    DELETE FROM running WHERE message_id = :id AND holder_id = :holder AND tokens = :tokens RETURNING watched, timings
""")
_MERGED = text("UPDATE reply_tokens SET count = :tokens, data = :data WHERE message_id = :id AND start = 0")
_SURPLUS = text("DELETE FROM reply_tokens WHERE message_id = :id AND start > 0")
_WRITTEN = text("UPDATE messages SET parts = :parts WHERE id = :id RETURNING seq")
_UNLINKED = text("DELETE FROM message_blobs WHERE message_id = :id")
_ENDED = text("""
    UPDATE replies SET status = :status, usage = :usage, error = :error, ended_at = :ended_at,
        timings = coalesce(:timings, :held_timings, timings)
    WHERE message_id = :id
""")
"""The same on SQLite, in the order of their execution."""


def prepare_end(connection: Connection, holder: str, reply_id: str, ending: StoredEnding) -> dict[str, Any] | None:
    """Everything that `end` writes: on SQLite call it before the lock of the writers is taken.

    None if fewer tokens are stored than the ending says.
    """
    rows = connection.execute(_SELECT_TOKENS, {"id": reply_id}).all()
    tokens = sum(count for count, _ in rows)
    if tokens < ending.tokens:
        return None
    parts, values = ending.parts, ending.values
    if connection.dialect.name == "sqlite":
        index = {"words": index_words(parts or ())}
    else:
        index = {"rows": json_text([] if parts is None else list(index_rows(parts)))}
    return {
        "id": reply_id,
        "holder": holder,
        "tokens": tokens,
        "data": merge_tokens([data for _, data in rows]) if rows else b"",
        "parts": None if parts is None else json_text(parts),
        "status": values["status"],
        "ended_at": values["ended_at"],
        **{name: _json(values.get(name)) for name in ("usage", "error", "timings")},
        **index,
    }


def end(connection: Connection, prepared: Mapping[str, Any]) -> bool | None:
    """Whether the reply, which is ended now, is read elsewhere. On SQLite call it in a write transaction.

    None if nothing was written: the holder does not hold it, or it has other tokens.
    """
    if connection.dialect.name != "sqlite":
        row = connection.execute(_END, dict(prepared)).first()
        return None if row is None else bool(row.watched)
    row = connection.execute(_HELD, dict(prepared)).first()
    if row is None:
        return None
    if prepared["tokens"]:
        connection.execute(_MERGED, dict(prepared))
        connection.execute(_SURPLUS, dict(prepared))
    if prepared["parts"] is not None:
        seq = connection.execute(_WRITTEN, dict(prepared)).scalar_one()
        connection.execute(_UNLINKED, dict(prepared))
        replace_words(connection, seq, prepared["words"])
    connection.execute(_ENDED, {**prepared, "held_timings": row.timings})
    return bool(row.watched)


_RESUME = """
    UPDATE replies SET status = :running, ended_at = NULL, error = NULL, settings = :settings
    WHERE message_id = :id AND status = :status AND settings = :old_settings
    AND ended_at {is_same} CAST(:ended_at AS bigint)
    AND :tokens = (SELECT coalesce(max(start + count), 0) FROM reply_tokens WHERE message_id = :id)
    AND EXISTS (SELECT 1 FROM {holder} WHERE id = :holder)
    AND EXISTS (SELECT 1 FROM conversations WHERE id = :conversation AND deleted_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM messages WHERE conversation_id = :conversation AND parent_id = :id)
"""
_RESUME_POSTGRES = text(f"""
    WITH holder AS (
        SELECT id FROM holders WHERE id = :holder FOR SHARE
    ), resumed AS (
        {_RESUME.format(is_same="IS NOT DISTINCT FROM", holder="holder")} RETURNING message_id
    ), started AS (
        INSERT INTO running (message_id, holder_id, tokens)
        SELECT message_id, :holder, CAST(:tokens AS integer) FROM resumed RETURNING tokens
    )
    SELECT tokens FROM started
""")
_RESUME_SQLITE = text(_RESUME.format(is_same="IS", holder="holders"))
_INSERT_RUNNING = text("INSERT INTO running (message_id, holder_id, tokens) VALUES (:id, :holder, :tokens)")


def resume(connection: Connection, values: Mapping[str, Any]) -> bool:
    """Whether the reply, which had this status, end, settings and tokens and has no children, runs under the lease now.

    The commit does not wait for the disk: see `sync`. On SQLite it is two statements: call it in a write transaction.
    """
    if connection.dialect.name != "sqlite":
        return connection.execute(_RESUME_POSTGRES, dict(values)).first() is not None
    resumed = connection.execute(_RESUME_SQLITE, dict(values)).rowcount == 1
    if resumed:
        connection.execute(_INSERT_RUNNING, {name: values[name] for name in ("id", "holder", "tokens")})
    return resumed


_SYNC = text(f"WITH {_SYNCED} SELECT pg_logical_emit_message(true, 'palaver', '') FROM synced")
"""A commit that waits for the disk, and with that for all commits before. It must have written something."""


def sync(connection: Connection) -> None:
    """Waits until everything that is committed survives the death of PostgreSQL."""
    connection.execute(_SYNC).close()


_SET_ANSWER_AT = text(f"""
    WITH {_SYNCED}, held AS (
        SELECT message_id FROM running WHERE message_id = :id AND holder_id = :holder FOR UPDATE
    ), changed AS (
        UPDATE replies SET settings = :settings FROM held
        WHERE replies.message_id = held.message_id AND settings = :old_settings RETURNING replies.message_id
    ), cleared AS (
        UPDATE running SET answer_requested = FALSE FROM changed WHERE running.message_id = changed.message_id
    )
    SELECT message_id, (SELECT count(*) FROM synced) FROM changed
""")


def set_answer_at(connection: Connection, values: Mapping[str, Any]) -> bool:
    """Whether the settings of the held reply, which were these, are changed."""
    return connection.execute(_SET_ANSWER_AT, dict(values)).first() is not None


def _json(value: Any) -> str | None:
    return None if value is None else json_text(value)
