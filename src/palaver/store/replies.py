"""Replies: started under a lease, appended token by token, finished, resumed, or claimed after a crash.

A reply is a message of the tree. While it runs, its tokens are the record and its text is empty. When it ends, the text
is written and the tokens are merged into one row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection, Text, bindparam, delete, exists, func, insert, select, text, type_coerce, update

from palaver.errors import NothingToContinue
from palaver.events import Usage
from palaver.generation import Step
from palaver.messages import Part, Role, ToolCall
from palaver.store import reply_statements, tree
from palaver.store.blobs import Blob, Blobs
from palaver.store.database import Database, Durability, json_text
from palaver.store.encoding import (
    ReplySettings,
    StoredPart,
    blob_digests,
    decode_settings,
    decode_usage,
    encode_parts,
    encode_settings,
    encode_usage,
    merge_tokens,
    pack_tokens,
    store_media,
    unpack_tokens,
)
from palaver.store.errors import Conflict, LeaseLost, NotFound, TokenCountMismatch
from palaver.store.leases import Lease, Leases, check_lease, running_reply_ids
from palaver.store.notifications import (
    CHANNEL,
    CommandStored,
    encode_notification,
    notify,
    tokens_stored,
)
from palaver.store.records import ReplyStatus, StoredMessage, check_name, current_time, format_time, parse_time
from palaver.store.reply_statements import TokenFrame
from palaver.store.schema import message_blobs, messages, replies, reply_tokens, running
from palaver.store.search import reindex
from palaver.store.tool_rounds import open_round

MAX_RESUME_KEYS = 8
"""Idempotency keys of `resume` that are remembered per reply."""

# built once: they run for every engine step
_SELECT_HELD = select(running.c.message_id, running.c.tokens, running.c.watched).where(
    running.c.holder_id == bindparam("holder")
)
_INSERT_TOKENS = insert(reply_tokens)
_UPDATE_RUNNING = (
    update(running)
    .where(running.c.message_id == bindparam("id"))
    .values(tokens=bindparam("count"), timings=bindparam("timings"))
)
_REQUEST = """
    UPDATE running SET stop_requested = stop_requested OR :stop, answer_requested = answer_requested OR :answer
    WHERE message_id = :id AND holder_id <> :not_held_by AND EXISTS (
        SELECT 1 FROM messages AS m JOIN conversations AS c ON c.id = m.conversation_id
        WHERE m.id = :id AND c.deleted_at IS NULL AND (:owner = '' OR c.owner_id = :owner)
    )
    RETURNING (SELECT model FROM replies WHERE replies.message_id = running.message_id) AS model
"""
_REQUEST_SQLITE = text(_REQUEST)
_REQUEST_POSTGRES = text(
    f"WITH changed AS ({_REQUEST}) SELECT model, pg_notify(:channel, CAST(:notification AS text)) FROM changed"
)
_STORED_SETTINGS = type_coerce(replies.c.settings, Text).label("stored_settings")
"""As they are stored, to find out whether they were changed meanwhile."""
_SELECT_SETTINGS = select(replies.c.model, replies.c.tokenizer, replies.c.settings, _STORED_SETTINGS).where(
    replies.c.message_id == bindparam("id")
)
_SELECT_TOKENS = (
    select(reply_tokens.c.data).where(reply_tokens.c.message_id == bindparam("id")).order_by(reply_tokens.c.start)
)
_TOKEN_COUNT = (
    select(func.coalesce(func.max(reply_tokens.c.start + reply_tokens.c.count), 0))
    .where(reply_tokens.c.message_id == bindparam("id"))
    .scalar_subquery()
)
_SELECT_RESUMED = (
    tree.exclude_deleted(tree.select_messages())
    .add_columns(_TOKEN_COUNT.label("tokens"))
    .where(messages.c.id == bindparam("id"))
)
_RESUMABLE = frozenset(one.value for one in ReplyStatus) - {ReplyStatus.RUNNING.value, ReplyStatus.DONE.value}
_SELECT_NEW = """
    SELECT replies.message_id, replies.status, replies.usage, replies.error, reply_tokens.start, reply_tokens.data
    FROM {positions} AS position
    JOIN replies ON replies.message_id = position.key
    LEFT JOIN reply_tokens ON reply_tokens.message_id = position.key
        AND reply_tokens.start + reply_tokens.count > CAST(position.value AS integer)
        AND reply_tokens.start >= (
            SELECT coalesce(max(earlier.start), 0) FROM reply_tokens AS earlier
            WHERE earlier.message_id = position.key AND earlier.start <= CAST(position.value AS integer)
        )
    ORDER BY 1, 5
"""
_SELECT_NEW_SQLITE = text(_SELECT_NEW.format(positions="json_each(:positions)"))
_SELECT_NEW_POSTGRES = text(_SELECT_NEW.format(positions="json_each_text(CAST(:positions AS json))"))
"""Tokens after a number, for many replies. A row may begin before the number: those of a reply that ended are merged
into one, and tokens that a database lost are stored again in one."""


@dataclass(frozen=True, slots=True)
class ReplyEnding:
    status: ReplyStatus
    parts: tuple[Part | Blob, ...] | None
    """The content of the whole reply, folded from its tokens. None leaves the stored parts as they are."""
    usage: Usage | None = None
    timings: Mapping[str, float] | None = None
    """None: those that were recorded with its last token."""
    error: str | None = None
    tokens: int | None = None
    """How many tokens must be stored. None: as many as there are."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that Palaver runs: their round is opened with the end of the reply."""


@dataclass(frozen=True, slots=True)
class TurnCommand:
    """What another process wants from the holder of a running reply."""

    reply_id: str
    stop: bool
    answer: bool


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a reply after a number, and its status when they were read."""

    status: ReplyStatus
    steps: tuple[Step, ...]
    usage: Usage | None = None
    error: str | None = None
    """The last two if it has ended."""


class Replies:
    def __init__(self, database: Database, blobs: Blobs, leases: Leases) -> None:
        self._database = database
        self._blobs = blobs
        self._leases = leases

    def start(
        self,
        lease: Lease,
        conversation_id: str,
        parent_id: str | None,
        settings: ReplySettings,
        *,
        prefix: Sequence[Step] = (),
        key: str | None = None,
        expected_head: str | None = None,
    ) -> StoredMessage:
        """Inserts a running reply under its parent. A retry is a second reply under the same parent.

        `prefix`: tokens that the reply starts with, from another reply or an edited text (`generation.prefill_steps`).
        Raises LeaseLost if another process claimed this lease's replies.
        """
        head = parent_id if expected_head is None else expected_head
        new = tree.TreeMessage(conversation_id, parent_id, Role.ASSISTANT, (), key=key, expected_head=head)
        try:
            with self._database.write_transaction() as connection:
                if found := tree.find_by_key(connection, new):
                    return found
                return _insert_reply(connection, lease, new, settings, prefix)
        except Conflict:  # two writers used one key at once: return the message of the first
            with self._database.read_transaction() as connection:
                if found := tree.find_by_key(connection, new):
                    return found
            raise

    def append(self, lease: Lease, frames: Sequence[TokenFrame]) -> frozenset[str]:
        """Writes all tokens of one engine step in one transaction, before any is published.

        Returns the ids of replies that this lease no longer holds. Nothing of those was written: stop them.
        Raises TokenCountMismatch if a reply has another number of tokens than its frame says.
        """
        append = _append_sqlite if self._database.is_sqlite else reply_statements.append
        with self._database.write_statement() as connection:
            held = append(connection, lease.id, frames)
            mismatched = {
                one.reply_id: held[one.reply_id].tokens
                for one in frames
                if one.reply_id in held and one.start != held[one.reply_id].tokens
            }
            if self._database.is_sqlite and not mismatched:
                written = (one.reply_id for one in frames if one.steps and one.reply_id in held)
                self._notify_readers(connection, [id for id in written if held[id].watched])
        if mismatched:
            raise TokenCountMismatch(mismatched)
        return frozenset(frame.reply_id for frame in frames) - held.keys()

    def finish(self, lease: Lease, reply_id: str, ending: ReplyEnding) -> StoredMessage:
        """Ends a running reply, as `end` does, and returns it."""
        self.end(lease, reply_id, ending)
        with self._database.read_transaction() as connection:
            return tree.get_message(connection, reply_id, deleted=True)

    def end(self, lease: Lease, reply_id: str, ending: ReplyEnding) -> datetime:
        """Ends a running reply durably: text, status, tokens in one row. Returns when, as it is stored.

        Raises LeaseLost if not held, and TokenCountMismatch if it has fewer tokens than the ending says.
        """
        assert ending.status is not ReplyStatus.RUNNING
        parts = None if ending.parts is None else store_media(ending.parts, self._blobs)
        values = _final_values(ending)
        if self._end_at_once(lease, reply_id, ending, parts, values):
            return parse_time(values["ended_at"])
        with self._database.write_transaction(Durability.SYNCED_AFTER) as connection:
            held = _delete_held(connection, lease, reply_id)
            if held.tokens < (ending.tokens or 0):
                raise TokenCountMismatch({reply_id: held.tokens})
            _merge_token_rows(connection, reply_id)
            if parts is not None:
                _set_parts(connection, reply_id, parts)
            if held.timings is not None:  # None: no token in this run
                values = {"timings": held.timings, **values}
            connection.execute(_update_reply(reply_id).values(values))
            if ending.tool_calls:
                open_round(connection, reply_id, ending.tool_calls)
            if held.watched:
                self._notify_readers(connection, [reply_id])
        return parse_time(values["ended_at"])

    def _end_at_once(
        self,
        lease: Lease,
        reply_id: str,
        ending: ReplyEnding,
        parts: tuple[StoredPart, ...] | None,
        values: Mapping[str, Any],
    ) -> bool:
        """Whether the reply was ended by what was computed before: by one statement on PostgreSQL, and on SQLite while
        the lock of the writers is held for a moment only. Not one with media or calls."""
        if ending.tool_calls or blob_digests(parts or ()):
            return False
        content = None if parts is None else encode_parts(parts)
        stored = reply_statements.StoredEnding(ending.tokens or 0, content, values)
        with self._database.read_transaction() as connection:
            prepared = reply_statements.prepare_end(connection, lease.id, reply_id, stored)
        if prepared is None:
            return False
        with self._write_ending() as connection:
            watched = reply_statements.end(connection, prepared)
            if watched:
                self._notify_readers(connection, [reply_id])
        return watched is not None

    def _write_ending(self) -> AbstractContextManager[Connection]:
        database = self._database
        return database.write_transaction(Durability.SYNCED_AFTER) if database.is_sqlite else database.write_statement()

    def find_by_key(self, conversation_id: str, parent_id: str | None, key: str) -> StoredMessage | None:
        """The reply that was started there with this idempotency key."""
        with self._database.read_transaction() as connection:
            return tree.find_by_key(
                connection, tree.TreeMessage(conversation_id, parent_id, Role.ASSISTANT, (), key=key)
            )

    def resume(
        self,
        lease: Lease,
        reply_id: str,
        key: str | None = None,
        fingerprint: str = "",
        read: tuple[StoredMessage, int] | None = None,
    ) -> StoredMessage:
        """Runs an incomplete reply again, under this lease, from its stored tokens.

        `fingerprint` is that of the engine that continues it. `read`: the reply and the number of its tokens, if they
        were read before: they are not read again if nothing has changed since. Call `sync` before anybody is told.
        Raises Conflict if the reply has children: start a sibling with its tokens as `prefix` instead.
        Raises LeaseLost if another process claimed this lease's replies.
        """
        if read is None:
            read = self._read_resumable(reply_id)
        if read is not None and (resumed := self._resume_at_once(lease, *read, key, fingerprint)) is not None:
            return resumed
        with self._database.write_transaction(Durability.SERVER) as connection:
            check_lease(connection, lease)
            reply = tree.get_message(connection, reply_id)
            _check_resumable(connection, reply)
            tokens = _count_tokens(connection, reply_id)
            settings = _resumed_settings(reply, key, fingerprint, tokens)
            values = {"status": ReplyStatus.RUNNING.value, "ended_at": None, "error": None}
            connection.execute(_update_reply(reply_id).values(**values, settings=encode_settings(settings)))
            _insert_running(connection, reply_id, lease.id, tokens)
            return _as_resumed(reply, settings)

    def sync(self) -> None:
        """Waits until everything that is committed survives the death of the database server (`Durability.SERVER`)."""
        if not self._database.is_sqlite:
            with self._database.write_statement() as connection:
                reply_statements.sync(connection)

    def _read_resumable(self, reply_id: str) -> tuple[StoredMessage, int] | None:
        """The reply and the number of its tokens; None if it can't be resumed."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_SELECT_RESUMED, {"id": reply_id}).first()
        if row is None or row.reply_status not in _RESUMABLE:
            return None
        return tree.stored_message(row), row.tokens

    def _resume_at_once(
        self, lease: Lease, reply: StoredMessage, tokens: int, key: str | None, fingerprint: str
    ) -> StoredMessage | None:
        """Resumes the reply if it is still as it was read. None if it is not: the transaction finds out why."""
        if reply.reply is None or reply.reply.status not in _RESUMABLE:
            return None
        settings = _resumed_settings(reply, key, fingerprint, tokens)
        values = {
            "id": reply.id,
            "holder": lease.id,
            "running": ReplyStatus.RUNNING.value,
            "status": reply.reply.status.value,
            "ended_at": None if reply.reply.ended_at is None else format_time(reply.reply.ended_at),
            "settings": json_text(encode_settings(settings)),
            "old_settings": json_text(encode_settings(reply.reply.settings)),
            "conversation": reply.conversation_id,
            "tokens": tokens,
        }
        with self._database.write_statement() as connection:  # on SQLite as durable as Durability.SERVER
            return _as_resumed(reply, settings) if reply_statements.resume(connection, values) else None

    def record_engine(self, lease: Lease, reply_id: str, fingerprint: str) -> StoredMessage:
        """Records the engine that continues a running reply, such as one claimed from a dead process.

        Raises LeaseLost if not held.
        """
        with self._database.write_transaction() as connection:
            _check_held(connection, lease, reply_id)
            reply = tree.get_message(connection, reply_id, deleted=True)
            if reply.reply is None:
                raise NotFound("reply", reply_id)
            settings = reply.reply.settings.continued_by(fingerprint, _count_tokens(connection, reply_id))
            connection.execute(_update_reply(reply_id).values(settings=encode_settings(settings)))
            return tree.get_message(connection, reply_id, deleted=True)

    def record_answer_at(self, lease: Lease, reply_id: str, position: int) -> None:
        """Records at which token count the answer of a running reply was requested. Raises LeaseLost if not held."""
        if self._record_answer_at_once(lease, reply_id, position):
            return
        with self._database.write_transaction(Durability.SERVER) as connection:
            _check_held(connection, lease, reply_id)
            requested = update(running).where(running.c.message_id == reply_id)
            connection.execute(requested.values(answer_requested=False))
            reply = tree.get_message(connection, reply_id, deleted=True)
            assert reply.reply is not None
            settings = replace(reply.reply.settings, answer_at=position)
            connection.execute(_update_reply(reply_id).values(settings=encode_settings(settings)))

    def _record_answer_at_once(self, lease: Lease, reply_id: str, position: int) -> bool:
        """Whether it was recorded by one statement, on PostgreSQL."""
        if self._database.is_sqlite:
            return False
        with self._database.write_statement() as connection:
            row = connection.execute(_SELECT_SETTINGS, {"id": reply_id}).first()
            if row is None:
                return False
            settings = replace(decode_settings(row.model, row.tokenizer, row.settings), answer_at=position)
            values = {
                "id": reply_id,
                "holder": lease.id,
                "settings": json_text(encode_settings(settings)),
                "old_settings": row.stored_settings,
            }
            return reply_statements.set_answer_at(connection, values)

    # readers and commands of other processes

    def watch(self, reply_id: str) -> Mapping[str, float]:
        """From now on every process is notified of the tokens and the end of the reply, if it runs.

        Returns its timings up to its last token.
        """
        saved = select(replies.c.timings).where(replies.c.message_id == reply_id).scalar_subquery()
        change = update(running).where(running.c.message_id == reply_id).values(watched=True)
        with self._database.write_statement() as connection:
            found = connection.execute(change.returning(func.coalesce(running.c.timings, saved))).first()
        return self.timings(reply_id) if found is None else cast("Mapping[str, float]", found[0])

    def read_new(self, positions: Mapping[str, int]) -> dict[str, NewTokens]:
        """The tokens of each reply after its position: only those are read. A reply that was purged is left out."""
        query = _SELECT_NEW_SQLITE if self._database.is_sqlite else _SELECT_NEW_POSTGRES
        endings: dict[str, tuple[ReplyStatus, Any, Any]] = {}
        steps: dict[str, list[Step]] = {}
        with self._database.read_transaction() as connection:
            rows = connection.execute(query, {"positions": json_text(dict(positions))}).all()
        for id, status, usage, error, start, data in rows:
            endings[id] = ReplyStatus(status), usage, error
            read = steps.setdefault(id, [])
            if data is not None:
                read += unpack_tokens(data)[max(0, positions[id] - start) :]
        return {id: _new_tokens(steps[id], *ending) for id, ending in endings.items()}

    def request(
        self, reply_id: str, *, stop: bool = False, answer: bool = False, owner: str = "", not_held_by: str = ""
    ) -> str | None:
        """Stores a command for the process that holds the reply, and notifies it.

        Returns the name of the reply's model; None if it does not run, is not this owner's, or is held by the lease
        `not_held_by`.

        If that process dies first, the one that takes the reply over runs the command.
        """
        values = {"id": reply_id, "stop": stop, "answer": answer, "owner": owner, "not_held_by": not_held_by}
        command = CommandStored(reply_id, stop, answer)
        with self._database.write_statement() as connection:
            if self._database.is_sqlite:
                model: str | None = connection.execute(_REQUEST_SQLITE, values).scalar()
                if model is not None:
                    notify(self._database, connection, command)
                return model
            values |= {"channel": CHANNEL, "notification": encode_notification(command)}
            return cast("str | None", connection.execute(_REQUEST_POSTGRES, values).scalar())

    def commands(self, lease: Lease) -> tuple[TurnCommand, ...]:
        """The commands for the replies that this lease holds."""
        query = select(running.c.message_id, running.c.stop_requested, running.c.answer_requested).where(
            running.c.holder_id == lease.id, running.c.stop_requested | running.c.answer_requested
        )
        with self._database.read_transaction() as connection:
            return tuple(TurnCommand(*row) for row in connection.execute(query))

    def running_in(self, conversation_id: str) -> tuple[str, ...]:
        """The running replies of a conversation, in any process."""
        query = select(running.c.message_id).join(messages, messages.c.id == running.c.message_id)
        with self._database.read_transaction() as connection:
            return tuple(connection.execute(query.where(messages.c.conversation_id == conversation_id)).scalars())

    def holder(self, reply_id: str) -> str | None:
        """The id of the lease under which the reply runs; None if it does not run."""
        query = select(running.c.holder_id).where(running.c.message_id == reply_id)
        with self._database.read_transaction() as connection:
            holder: str | None = connection.execute(query).scalar()
        return holder

    def tokens(self, reply_id: str) -> tuple[Step, ...]:
        """The tokens of the reply so far."""
        with self._database.read_transaction() as connection:
            rows = connection.execute(_SELECT_TOKENS, {"id": reply_id}).scalars().all()
        return tuple(step for data in rows for step in unpack_tokens(data))

    def token_ids(self, reply_id: str) -> tuple[int, ...]:
        return tuple(step.token_id for step in self.tokens(reply_id))

    def timings(self, reply_id: str) -> Mapping[str, float]:
        """The timings of the reply up to its last token, also while it runs; empty if they are not known."""
        query = select(replies.c.timings, running.c.timings).outerjoin(running).where(replies.c.message_id == reply_id)
        with self._database.read_transaction() as connection:
            saved, current = connection.execute(query).one()
        timings: Mapping[str, float] = saved if current is None else current
        return timings

    def running_ids(self, lease: Lease) -> tuple[str, ...]:
        """The running replies that this lease holds."""
        with self._database.read_transaction() as connection:
            return tuple(running_reply_ids(connection, lease.id))

    def list_interrupted(self) -> tuple[StoredMessage, ...]:
        """Interrupted replies without children, oldest first."""
        child = messages.alias("child")
        has_child = exists().where(
            child.c.conversation_id == messages.c.conversation_id, child.c.parent_id == messages.c.id
        )
        query = tree.exclude_deleted(tree.select_messages()).where(
            replies.c.status == ReplyStatus.INTERRUPTED.value, ~has_child
        )
        with self._database.read_transaction() as connection:
            return tuple(map(tree.stored_message, connection.execute(query.order_by(messages.c.seq))))

    def is_abandoned(self, reply_id: str) -> bool:
        """Whether the reply is marked as running but its process is dead."""
        query = select(running.c.holder_id).where(running.c.message_id == reply_id)
        with self._database.read_transaction() as connection:
            holder = connection.execute(query).scalar()
            return holder is not None and holder in self._leases.dead_holders(connection)

    def list_orphans(self, lease: Lease) -> Mapping[str, str]:
        """The running replies of dead holders: the name of the model by the reply's id. `lease` is the caller's own."""
        with self._database.read_transaction() as connection:
            dead = self._dead_holders(connection, lease)
            query = select(replies.c.message_id, replies.c.model).join(running).where(running.c.holder_id.in_(dead))
            return {row.message_id: row.model for row in connection.execute(query)} if dead else {}

    def claim_orphans(self, lease: Lease, ids: Collection[str] | None = None) -> tuple[str, ...]:
        """Transfers the running replies of dead holders to this lease, to be continued from their tokens.

        With `ids` only those: the others wait for a process that has their models. Raises LeaseLost if another process
        claimed this lease's replies.
        """
        with self._database.read_transaction() as connection:
            if not self._leases.dead_holders(connection):
                return ()
        with self._database.write_transaction() as connection:
            check_lease(connection, lease)
            dead, orphans = self._orphans(connection, lease)
            if ids is not None:
                orphans = tuple(id for id in orphans if id in ids)
            if orphans:
                connection.execute(update(running).where(running.c.message_id.in_(orphans)).values(holder_id=lease.id))
                _save_timings(connection, orphans)
            self._leases.delete_holders(connection, dead)
        return orphans

    def interrupt_orphans(self, lease: Lease | None = None) -> tuple[str, ...]:
        """Marks the running replies of dead holders as interrupted. They keep their tokens and can be resumed.

        `lease` is the caller's own: it counts as alive even if it has expired.
        """
        with self._database.write_transaction() as connection:
            dead, orphans = self._orphans(connection, lease)
            for id in orphans:
                _merge_token_rows(connection, id)
            if orphans:
                _save_timings(connection, orphans)
                self._notify_readers(connection, orphans)
                _end_replies(connection, orphans, {"status": ReplyStatus.INTERRUPTED.value, "ended_at": current_time()})
            self._leases.delete_holders(connection, dead)
        return orphans

    def rewrite(self, reply_id: str, parts: Iterable[Part | Blob]) -> StoredMessage:
        """Writes the text of an interrupted reply, folded from its tokens. The tokens stay as they are."""
        stored_parts = store_media(parts, self._blobs)
        with self._database.write_transaction() as connection:
            reply = tree.get_message(connection, reply_id)
            if reply.reply is None or reply.reply.status is not ReplyStatus.INTERRUPTED:
                raise Conflict(f"The message {reply_id!r} is not an interrupted reply.")
            _set_parts(connection, reply_id, stored_parts)
            return tree.get_message(connection, reply_id)

    def annotate(self, reply_id: str, entries: Mapping[str, Any]) -> StoredMessage:
        """Replaces entries of a reply's options, such as a client's note. They must not be those that determined its
        tokens."""
        with self._database.write_transaction() as connection:
            reply = tree.get_message(connection, reply_id)
            if reply.reply is None:
                raise NotFound("reply", reply_id)
            settings = reply.reply.settings
            annotated = replace(settings, options={**settings.options, **entries})
            connection.execute(_update_reply(reply_id).values(settings=encode_settings(annotated)))
            return tree.get_message(connection, reply_id)

    def _notify_readers(self, connection: Connection, reply_ids: Sequence[str]) -> None:
        for notification in tokens_stored(reply_ids):
            notify(self._database, connection, notification)

    def _orphans(self, connection: Connection, lease: Lease | None) -> tuple[list[str], tuple[str, ...]]:
        dead = self._dead_holders(connection, lease)
        query = select(running.c.message_id).where(running.c.holder_id.in_(dead))
        query = query.order_by(running.c.message_id).with_for_update()
        return dead, tuple(connection.execute(query).scalars()) if dead else ()

    def _dead_holders(self, connection: Connection, lease: Lease | None) -> list[str]:
        return [id for id in self._leases.dead_holders(connection) if lease is None or id != lease.id]


def _new_tokens(steps: Sequence[Step], status: ReplyStatus, usage: str | None, error: str | None) -> NewTokens:
    if status is ReplyStatus.RUNNING:
        return NewTokens(status, tuple(steps))
    used = None if usage is None else decode_usage(json.loads(usage))
    return NewTokens(status, tuple(steps), used, None if error is None else json.loads(error))


def _insert_reply(
    connection: Connection, lease: Lease, new: tree.TreeMessage, settings: ReplySettings, prefix: Sequence[Step]
) -> StoredMessage:
    check_lease(connection, lease)
    id = tree.insert_message(connection, new)
    connection.execute(insert(replies).values(_reply_row(id, settings)))
    if prefix:
        connection.execute(insert(reply_tokens).values(_token_row(id, 0, prefix)))
    _insert_running(connection, id, lease.id, len(prefix))
    return tree.get_message(connection, id)


def was_resumed_with(reply: StoredMessage, key: str) -> bool:
    """Whether a resume with this idempotency key was done before."""
    return reply.reply is not None and key in reply.reply.settings.options.get("resumed", ())


def _resumed_settings(reply: StoredMessage, key: str | None, fingerprint: str, tokens: int) -> ReplySettings:
    """The reply's settings when it continues after so many tokens."""
    assert reply.reply is not None
    settings = _with_resume_key(reply, key).continued_by(fingerprint, tokens)
    return settings.extended_at(tokens) if reply.reply.status is ReplyStatus.LENGTH else settings


def _with_resume_key(reply: StoredMessage, key: str | None) -> ReplySettings:
    """The reply's settings, with the idempotency key added."""
    assert reply.reply is not None
    settings = reply.reply.settings
    if key is None:
        return settings
    check_name("key", key)
    keys = [*settings.options.get("resumed", ()), key][-MAX_RESUME_KEYS:]
    return replace(settings, options={**settings.options, "resumed": keys})


def _reply_row(id: str, settings: ReplySettings) -> dict[str, Any]:
    return {
        "message_id": id,
        "status": ReplyStatus.RUNNING.value,
        "model": settings.model,
        "tokenizer": settings.tokenizer,
        "settings": encode_settings(settings),
        "timings": {},
        "started_at": current_time(),
    }


def _token_row(id: str, start: int, steps: Sequence[Step]) -> dict[str, Any]:
    return {"message_id": id, "start": start, "count": len(steps), "data": pack_tokens(steps)}


def _insert_running(connection: Connection, id: str, holder: str, count: int) -> None:
    connection.execute(insert(running).values(message_id=id, holder_id=holder, tokens=count))


def _check_held(connection: Connection, lease: Lease, id: str) -> Any:
    """Locks the row of a running reply, and returns it. Raises LeaseLost if this lease does not hold it."""
    query = _SELECT_HELD.where(running.c.message_id == id).with_for_update()
    row = connection.execute(query, {"holder": lease.id}).first()
    if row is None:
        raise LeaseLost(id)
    return row


def _delete_held(connection: Connection, lease: Lease, id: str) -> Any:
    """Deletes the row of a running reply, and returns it. Raises LeaseLost if this lease does not hold it."""
    mine = delete(running).where(running.c.message_id == id, running.c.holder_id == lease.id)
    row = connection.execute(mine.returning(running.c.tokens, running.c.watched, running.c.timings)).first()
    if row is None:
        raise LeaseLost(id)
    return row


def _append_sqlite(connection: Connection, holder: str, frames: Sequence[TokenFrame]) -> dict[str, Any]:
    """Appends the frames of held replies, unless one does not fit to its count. Returns the rows of held replies."""
    held = {row.message_id: row for row in connection.execute(_SELECT_HELD, {"holder": holder})}
    mine = [frame for frame in frames if frame.reply_id in held]
    written = [frame for frame in mine if frame.steps]
    if written and all(frame.start == held[frame.reply_id].tokens for frame in mine):
        connection.execute(_INSERT_TOKENS, [_token_row(one.reply_id, one.start, one.steps) for one in written])
        counted = [{"id": one.reply_id, "count": one.end, "timings": dict(one.timings)} for one in written]
        connection.execute(_UPDATE_RUNNING, counted)
    return held


def _merge_token_rows(connection: Connection, id: str) -> None:
    columns = (reply_tokens.c.start, reply_tokens.c.count, reply_tokens.c.data)
    found = connection.execute(delete(reply_tokens).where(reply_tokens.c.message_id == id).returning(*columns))
    rows = sorted(map(tuple, found))
    if rows:
        count, data = sum(row[1] for row in rows), merge_tokens([row[2] for row in rows])
        connection.execute(insert(reply_tokens).values(message_id=id, start=0, count=count, data=data))


def _set_parts(connection: Connection, id: str, parts: tuple[StoredPart, ...]) -> None:
    """Replaces the parts of a reply, its blob references and its search index entries."""
    content = encode_parts(parts)
    change = update(messages).where(messages.c.id == id).values(parts=content).returning(messages.c.seq)
    seq = connection.execute(change).scalar_one()
    connection.execute(delete(message_blobs).where(message_blobs.c.message_id == id))
    tree.link_blobs(connection, id, parts)
    reindex(connection, seq, content)


def _count_tokens(connection: Connection, id: str) -> int:
    query = select(reply_tokens.c.start + reply_tokens.c.count).where(reply_tokens.c.message_id == id)
    return max(connection.execute(query).scalars(), default=0)


def _final_values(ending: ReplyEnding) -> dict[str, Any]:
    """Without timings if they are those that were recorded with its last token."""
    values = {
        "status": ending.status.value,
        "usage": None if ending.usage is None else encode_usage(ending.usage),
        "error": ending.error,
        "ended_at": current_time(),
    }
    return values if ending.timings is None else {**values, "timings": dict(ending.timings)}


def _save_timings(connection: Connection, ids: Sequence[str]) -> None:
    """Copies the timings that were recorded with the last tokens of running replies to the replies themselves."""
    query = select(running.c.message_id, running.c.timings).where(running.c.message_id.in_(ids))
    for id, timings in connection.execute(query).all():
        if timings is not None:  # None: no token since the reply was started or resumed
            connection.execute(_update_reply(id).values(timings=timings))


def _end_replies(connection: Connection, ids: Sequence[str], values: Mapping[str, Any]) -> None:
    connection.execute(delete(running).where(running.c.message_id.in_(ids)))
    connection.execute(update(replies).where(replies.c.message_id.in_(ids)).values(**values))


def _update_reply(id: str) -> Any:
    return update(replies).where(replies.c.message_id == id)


def _as_resumed(reply: StoredMessage, settings: ReplySettings) -> StoredMessage:
    assert reply.reply is not None
    resumed = replace(reply.reply, settings=settings, status=ReplyStatus.RUNNING, ended_at=None, error=None)
    return replace(reply, reply=resumed)


def _check_resumable(connection: Connection, reply: StoredMessage) -> None:
    if reply.reply is None:
        raise NotFound("reply", reply.id)
    if reply.reply.status is ReplyStatus.RUNNING:
        raise Conflict(f"The reply {reply.id!r} is running already.")
    if reply.reply.status is ReplyStatus.DONE:
        raise NothingToContinue("The reply is complete: there is nothing to continue.")
    if tree.list_children(connection, reply.conversation_id, reply.id):
        raise Conflict(f"The conversation already continues after {reply.id!r}: continue it in a new branch.")
