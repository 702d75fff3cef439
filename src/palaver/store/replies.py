"""Replies: begun under a lease, their tokens written frame by frame, ended, continued, taken over.

A reply is a message of the tree. While it runs its text is in the making and its tokens are the record; when it ends
the text is written too and the tokens are packed into one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, bindparam, delete, exists, insert, select, update

from palaver.errors import NothingToContinue
from palaver.events import Usage
from palaver.generation import Step
from palaver.messages import Part, Role
from palaver.store import tree
from palaver.store.blobs import Blob, Blobs
from palaver.store.database import Database, Durability
from palaver.store.errors import Conflict, LeaseLost, NotFound
from palaver.store.json_values import ReplySettings, StoredPart, parts_to_json, settings_to_json, store_media
from palaver.store.leases import Lease, Leases, check_lease, hold_lease
from palaver.store.records import ReplyStatus, StoredMessage, check_name, current_time
from palaver.store.schema import message_blobs, messages, replies, reply_tokens, running
from palaver.store.search_index import reindex
from palaver.store.token_codec import pack_tokens, unpack_tokens

RESUMED = 8
"""Of so many of the last times that a reply was gone on with, the keys are known."""


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """New tokens of one reply: `start` is how many it had before."""

    reply_id: str
    start: int
    steps: tuple[Step, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.steps)


@dataclass(frozen=True, slots=True)
class ReplyEnding:
    status: ReplyStatus
    parts: tuple[Part | Blob, ...] | None
    """All that was said in the reply, folded from its tokens. None leaves the stored text as it is."""
    usage: Usage | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


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
        made_by: ReplySettings,
        *,
        goes_on_from: Sequence[Step] = (),
        key: str | None = None,
        expected_head: str | None = None,
    ) -> StoredMessage:
        """A new reply under its parent, running. A retry is a second one under the same parent.

        `goes_on_from`: tokens it begins with, of another reply or of an edited text (`tokens.given`). LeaseLost where
        another process has taken over this lease.
        """
        head = parent_id if expected_head is None else expected_head
        new = tree.TreeMessage(conversation_id, parent_id, Role.ASSISTANT, (), key=key, expected_head=head)
        try:
            with self._database.writing() as connection:
                if found := tree.message_by_key(connection, new):
                    return found
                return _started(connection, lease, new, made_by, goes_on_from)
        except Conflict:  # two writers with one key at once: the second takes what the first has put
            with self._database.reading() as connection:
                if found := tree.message_by_key(connection, new):
                    return found
            raise

    def append(self, lease: Lease, pieces: Sequence[TokenFrame]) -> frozenset[str]:
        """All tokens of one engine frame, in one transaction, before any is published.

        Gives the ids of replies that this lease no longer holds: nothing of those was written, stop them.
        """
        with self._database.writing(Durability.NORMAL) as connection:
            counts = _counts(connection, lease)
            ours = [piece for piece in pieces if piece.reply_id in counts and piece.steps]
            for piece in ours:
                _check_start(piece, counts[piece.reply_id])
            if ours:
                connection.execute(_PUT, [_row(one.reply_id, one.start, one.steps) for one in ours])
                connection.execute(_COUNT, [{"id": one.reply_id, "count": one.end} for one in ours])
        return frozenset(piece.reply_id for piece in pieces) - counts.keys()

    def finish(self, lease: Lease, reply_id: str, ending: ReplyEnding) -> StoredMessage:
        """Ends a running reply, durably: text, status, tokens in one piece. LeaseLost where it isn't ours."""
        assert ending.status is not ReplyStatus.RUNNING
        parts = None if ending.parts is None else store_media(ending.parts, self._blobs)
        with self._database.writing() as connection:
            if reply_id not in _counts(connection, lease):
                raise LeaseLost(reply_id)
            _pack_tokens(connection, reply_id)
            if parts is not None:
                _set_parts(connection, reply_id, parts)
            _end(connection, [reply_id], _ended(ending))
            return tree.message_row(connection, reply_id, deleted=True)

    def keyed(self, conversation_id: str, parent_id: str | None, key: str) -> StoredMessage | None:
        """The reply that was begun there with this key."""
        with self._database.reading() as connection:
            return tree.message_by_key(
                connection, tree.TreeMessage(conversation_id, parent_id, Role.ASSISTANT, (), key=key)
            )

    def resume(self, lease: Lease, reply_id: str, key: str | None = None, fingerprint: str = "") -> StoredMessage:
        """A reply that ended before it was whole runs again, under this lease, on top of its tokens.

        `fingerprint` is that of the engine that goes on with it.
        Conflict where the conversation has gone on below it: then start a sibling that goes on from its tokens.
        LeaseLost where another process has taken over this lease.
        """
        with self._database.writing() as connection:
            check_lease(connection, lease)
            reply = tree.message_row(connection, reply_id)
            _check_resumable(connection, reply)
            tokens = _stored_count(connection, reply_id)
            made_by = _resumed(reply, key).continued_by(fingerprint, tokens)
            values = {"status": ReplyStatus.RUNNING.value, "ended_at": None, "error": None}
            connection.execute(_of(reply_id).values(**values, settings=settings_to_json(made_by)))
            _hold(connection, reply_id, lease.id, tokens)
            return tree.message_row(connection, reply_id)

    def computed_by(self, reply_id: str, fingerprint: str) -> StoredMessage:
        """Records the engine that goes on with a running reply, such as one of a process that died."""
        with self._database.writing() as connection:
            reply = tree.message_row(connection, reply_id, deleted=True)
            if reply.reply is None:
                raise NotFound("reply", reply_id)
            made_by = reply.reply.settings.continued_by(fingerprint, _stored_count(connection, reply_id))
            connection.execute(_of(reply_id).values(settings=settings_to_json(made_by)))
            return tree.message_row(connection, reply_id, deleted=True)

    def record_answer_at(self, lease: Lease, reply_id: str, position: int) -> None:
        """Records how many tokens a running reply had when its answer was asked for. LeaseLost where it isn't ours."""
        with self._database.writing() as connection:
            if reply_id not in _counts(connection, lease):
                raise LeaseLost(reply_id)
            reply = tree.message_row(connection, reply_id, deleted=True)
            assert reply.reply is not None
            made_by = replace(reply.reply.settings, answer_at=position)
            connection.execute(_of(reply_id).values(settings=settings_to_json(made_by)))

    def tokens(self, reply_id: str) -> tuple[Step, ...]:
        """Everything the model said in this reply so far, token by token."""
        query = select(reply_tokens.c.data).where(reply_tokens.c.message_id == reply_id)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(reply_tokens.c.start)).scalars().all()
        return tuple(step for data in rows for step in unpack_tokens(data))

    def token_ids(self, reply_id: str) -> tuple[int, ...]:
        return tuple(step.token_id for step in self.tokens(reply_id))

    def held(self, lease: Lease) -> tuple[str, ...]:
        with self._database.reading() as connection:
            return tuple(hold_lease(connection, lease.id))

    def interrupted(self) -> tuple[StoredMessage, ...]:
        """The interrupted replies below which their conversations have not gone on, the oldest first."""
        below = messages.alias("below")
        gone_on = exists().where(
            below.c.conversation_id == messages.c.conversation_id, below.c.parent_id == messages.c.id
        )
        query = tree.visible(tree.stored_query()).where(replies.c.status == ReplyStatus.INTERRUPTED.value, ~gone_on)
        with self._database.reading() as connection:
            return tuple(map(tree.stored_message, connection.execute(query.order_by(messages.c.seq))))

    def is_abandoned(self, reply_id: str) -> bool:
        """Whether the reply is running by its record, but its process is dead."""
        query = select(running.c.holder_id).where(running.c.message_id == reply_id)
        with self._database.reading() as connection:
            holder = connection.execute(query).scalar()
            return holder is not None and holder in self._leases.dead(connection)

    def take_over(self, lease: Lease) -> tuple[str, ...]:
        """Every running reply of a dead holder is this lease's now: to be resumed from its tokens.

        LeaseLost where another process has taken over this lease.
        """
        with self._database.reading() as connection:
            if not self._leases.dead(connection):
                return ()
        with self._database.writing() as connection:
            check_lease(connection, lease)
            dead, orphans = self._orphans(connection, lease)
            if orphans:
                connection.execute(_held_by(dead).values(holder_id=lease.id))
            self._leases.bury(connection, dead)
        return orphans

    def interrupt_orphans(self, lease: Lease | None = None) -> tuple[str, ...]:
        """Every running reply of a dead holder is marked as interrupted; it keeps its tokens and can be continued.

        `lease` is the caller's own: it is alive, even where it ran out.
        """
        with self._database.writing() as connection:
            dead, orphans = self._orphans(connection, lease)
            for id in orphans:
                _pack_tokens(connection, id)
            if orphans:
                _end(connection, orphans, {"status": ReplyStatus.INTERRUPTED.value, "ended_at": current_time()})
            self._leases.bury(connection, dead)
        return orphans

    def rewrite(self, reply_id: str, parts: Iterable[Part | Blob]) -> StoredMessage:
        """The text of a reply that nobody folded when it was interrupted; its tokens are the record and stay."""
        put_away = store_media(parts, self._blobs)
        with self._database.writing() as connection:
            reply = tree.message_row(connection, reply_id)
            if reply.reply is None or reply.reply.status is not ReplyStatus.INTERRUPTED:
                raise Conflict(f"The message {reply_id!r} is no interrupted reply.")
            _set_parts(connection, reply_id, put_away)
            return tree.message_row(connection, reply_id)

    def annotate(self, reply_id: str, note: Mapping[str, Any]) -> StoredMessage:
        """Sets what is kept with a reply for whoever asked for it; what decided its tokens stays as it is."""
        with self._database.writing() as connection:
            reply = tree.message_row(connection, reply_id)
            if reply.reply is None:
                raise NotFound("reply", reply_id)
            made_by = reply.reply.settings
            noted = replace(made_by, options={**made_by.options, "note": dict(note)})
            connection.execute(_of(reply_id).values(settings=settings_to_json(noted)))
            return tree.message_row(connection, reply_id)

    def _orphans(self, connection: Connection, lease: Lease | None) -> tuple[list[str], tuple[str, ...]]:
        dead = [id for id in self._leases.dead(connection) if lease is None or id != lease.id]
        query = select(running.c.message_id).where(running.c.holder_id.in_(dead)).with_for_update()
        return dead, tuple(connection.execute(query).scalars()) if dead else ()


# what every engine frame runs is built once
_HELD = (
    select(running.c.message_id, running.c.tokens).where(running.c.holder_id == bindparam("holder")).with_for_update()
)
_PUT = insert(reply_tokens)
_COUNT = update(running).where(running.c.message_id == bindparam("id")).values(tokens=bindparam("count"))


def _started(
    connection: Connection, lease: Lease, new: tree.TreeMessage, made_by: ReplySettings, goes_on_from: Sequence[Step]
) -> StoredMessage:
    check_lease(connection, lease)
    id = tree.put_message(connection, new)
    connection.execute(insert(replies).values(_new_reply(id, made_by)))
    if goes_on_from:
        connection.execute(insert(reply_tokens).values(_row(id, 0, goes_on_from)))
    _hold(connection, id, lease.id, len(goes_on_from))
    return tree.message_row(connection, id)


def was_resumed_with(reply: StoredMessage, key: str) -> bool:
    """Whether this very wish was fulfilled before."""
    return reply.reply is not None and key in reply.reply.settings.options.get("resumed", ())


def _resumed(reply: StoredMessage, key: str | None) -> ReplySettings:
    """The reply's settings, with the key of this wish where it has one."""
    assert reply.reply is not None
    made_by = reply.reply.settings
    if key is None:
        return made_by
    check_name("key", key)
    keys = [*made_by.options.get("resumed", ()), key][-RESUMED:]
    return replace(made_by, options={**made_by.options, "resumed": keys})


def _new_reply(id: str, made_by: ReplySettings) -> dict[str, Any]:
    return {
        "message_id": id,
        "status": ReplyStatus.RUNNING.value,
        "model": made_by.model,
        "tokenizer": made_by.tokenizer,
        "settings": settings_to_json(made_by),
        "timings": {},
        "started_at": current_time(),
    }


def _row(id: str, start: int, steps: Sequence[Step]) -> dict[str, Any]:
    return {"message_id": id, "start": start, "count": len(steps), "data": pack_tokens(steps)}


def _hold(connection: Connection, id: str, holder: str, count: int) -> None:
    connection.execute(insert(running).values(message_id=id, holder_id=holder, tokens=count))


def _counts(connection: Connection, lease: Lease) -> dict[str, int]:
    """How many tokens each reply has that this lease holds; nobody takes them over until we are done."""
    return {row.message_id: row.tokens for row in connection.execute(_HELD, {"holder": lease.id})}


def _check_start(piece: TokenFrame, count: int) -> None:
    if count != piece.start:
        raise Conflict(f"The reply {piece.reply_id!r} has {count} tokens, not {piece.start}.")


def _pack_tokens(connection: Connection, id: str) -> None:
    mine = reply_tokens.c.message_id == id
    rows = connection.execute(select(reply_tokens).where(mine).order_by(reply_tokens.c.start)).all()
    if len(rows) < 2:
        return
    steps = [step for row in rows for step in unpack_tokens(row.data)]
    connection.execute(delete(reply_tokens).where(mine))
    connection.execute(insert(reply_tokens).values(_row(id, 0, steps)))


def _set_parts(connection: Connection, id: str, parts: tuple[StoredPart, ...]) -> None:
    """What the reply says now, for readers and for the index."""
    seq = connection.execute(select(messages.c.seq).where(messages.c.id == id)).scalar_one()
    content = parts_to_json(parts)
    connection.execute(update(messages).where(messages.c.id == id).values(parts=content))
    connection.execute(delete(message_blobs).where(message_blobs.c.message_id == id))
    tree.name_blobs(connection, id, parts)
    reindex(connection, seq, content)


def _stored_count(connection: Connection, id: str) -> int:
    query = select(reply_tokens.c.start + reply_tokens.c.count).where(reply_tokens.c.message_id == id)
    return max(connection.execute(query).scalars(), default=0)


def _ended(ending: ReplyEnding) -> dict[str, Any]:
    return {
        "status": ending.status.value,
        "usage": None if ending.usage is None else asdict(ending.usage),
        "timings": dict(ending.timings),
        "error": ending.error,
        "ended_at": current_time(),
    }


def _end(connection: Connection, ids: Sequence[str], values: Mapping[str, Any]) -> None:
    connection.execute(delete(running).where(running.c.message_id.in_(ids)))
    connection.execute(update(replies).where(replies.c.message_id.in_(ids)).values(**values))


def _of(id: str) -> Any:
    return update(replies).where(replies.c.message_id == id)


def _held_by(ids: Sequence[str]) -> Any:
    return update(running).where(running.c.holder_id.in_(ids))


def _check_resumable(connection: Connection, reply: StoredMessage) -> None:
    if reply.reply is None:
        raise NotFound("reply", reply.id)
    if reply.reply.status is ReplyStatus.RUNNING:
        raise Conflict(f"The reply {reply.id!r} is running already.")
    if reply.reply.status is ReplyStatus.DONE:
        raise NothingToContinue("The reply is whole: there is nothing to continue.")
    if tree.child_messages(connection, reply.conversation_id, reply.id):
        raise Conflict(f"The conversation has gone on below {reply.id!r}: continue it in a branch of its own.")
