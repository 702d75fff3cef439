"""Rounds of tool calls: the calls of one reply that Palaver runs, from their approval to their results.

A call is recorded as running before it runs, and its result before it is used. Each change names the state that it
expects, so that no two processes run a call. A call that was running when its process died is interrupted: only a new
decision of the user runs it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, insert, select, update

from palaver.messages import ToolCall
from palaver.store.blobs import Blob
from palaver.store.database import Database
from palaver.store.encoding import decode_parts, encode_parts
from palaver.store.leases import Lease, Leases, check_lease
from palaver.store.notifications import RoundStopped, notify
from palaver.store.records import current_time, parse_time
from palaver.store.schema import conversations, holders, message_blobs, messages, tool_calls, tool_rounds


class RoundState(StrEnum):
    OPEN = "open"
    """Calls wait for approval, or run, or their results are about to be used."""
    STOPPED = "stopped"
    """Stopped by a client; it can be continued."""
    FAILED = "failed"
    """The next reply could not be started, or a limit was reached; it can be continued."""
    DONE = "done"
    """The results are messages of the conversation."""


class CallState(StrEnum):
    NEW = "new"
    """Recorded; the user's rules are about to be applied."""
    WAITING = "waiting"
    """For the user's approval."""
    APPROVED = "approved"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """It had begun when it was stopped or its process died. It is not known what it did, and it waits for the user."""
    DONE = "done"
    DENIED = "denied"


UNDECIDED = (CallState.WAITING, CallState.INTERRUPTED)
ENDED = (CallState.DONE, CallState.DENIED)


@dataclass(frozen=True, slots=True)
class RoundCall:
    """A tool call that Palaver runs."""

    position: int
    call_id: str
    name: str
    arguments: str
    """As the model wrote them."""
    state: CallState
    edited: str | None = None
    """The arguments that the user wants instead."""
    result: str | None = None
    is_error: bool = False
    media: tuple[Blob, ...] = ()
    """Pictures and sounds that the tool returned beside the text."""
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ToolRound:
    """The calls of one reply."""

    reply_id: str
    conversation_id: str
    state: RoundState
    calls: tuple[RoundCall, ...]
    next_id: str | None = None
    """The reply that follows their results."""
    error: str | None = None
    continued: bool = False
    """Whether a user continued it: the limits of the loop count from here."""


class ToolRounds:
    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases

    def get(self, reply_id: str) -> ToolRound | None:
        with self._database.read_transaction() as connection:
            return _get_round(connection, reply_id)

    def list_open(self, conversation_id: str | None = None) -> tuple[str, ...]:
        """The replies whose rounds are open, in one conversation or in all that are not deleted."""
        in_it = () if conversation_id is None else (conversations.c.id == conversation_id,)
        return self._list_open(*in_it)

    def list_actionable(self) -> tuple[str, ...]:
        """The replies whose open rounds go on without a decision: calls are new or approved, or all have ended."""
        calls = select(tool_calls.c.position).where(tool_calls.c.message_id == tool_rounds.c.message_id)
        ready = calls.where(_in_states(CallState.NEW, CallState.APPROVED)).exists()
        unfinished = calls.where(~_in_states(*ENDED)).exists()
        return self._list_open(ready | ~unfinished)

    def _list_open(self, *conditions: ColumnElement[bool]) -> tuple[str, ...]:
        query = (
            select(tool_rounds.c.message_id)
            .join(messages, messages.c.id == tool_rounds.c.message_id)
            .join(conversations, conversations.c.id == messages.c.conversation_id)
            .where(tool_rounds.c.state == RoundState.OPEN.value, conversations.c.deleted_at.is_(None), *conditions)
        )
        with self._database.read_transaction() as connection:
            return tuple(connection.execute(query.order_by(messages.c.seq)).scalars())

    def await_decision(self, reply_id: str, position: int) -> None:
        """No rule decides about the new call: it waits for the user."""
        self._change(reply_id, position, (CallState.NEW,), {"state": CallState.WAITING.value})

    def decide(self, reply_id: str, position: int, allowed: bool, edited: str | None, answer: str) -> bool:
        """Approves or denies a call that is new or waits. A denied call gets the `answer` as its result.

        Returns False, without a change, if the call does not wait for a decision (any more).
        """
        values: dict[str, Any] = {"state": CallState.APPROVED.value, "edited": edited, "holder_id": None}
        if not allowed:
            values = {"state": CallState.DENIED.value, "result": answer, "is_error": True}
        return self._change(reply_id, position, (CallState.NEW, *UNDECIDED), values)

    def apply_rule(self, reply_id: str, position: int, allowed: bool, answer: str) -> None:
        """Decides about a new call by a rule. A call that waits since its round was stopped is left to the user."""
        values: dict[str, Any] = {"state": CallState.APPROVED.value}
        if not allowed:
            values = {"state": CallState.DENIED.value, "result": answer, "is_error": True}
        self._change(reply_id, position, (CallState.NEW,), values)

    def begin(self, lease: Lease, reply_id: str, position: int, tried: Collection[str] = ()) -> bool:
        """Records that this process runs the call now. Returns False if it must not: another process does, or the round
        was stopped. Raises LeaseLost if the lease is lost: the call would be interrupted at once.

        `tried`: the leases of earlier attempts, which failed; one of them may be committed all the same.
        """
        values = {"state": CallState.RUNNING.value, "holder_id": lease.id, "started_at": current_time()}
        with self._database.write_transaction() as connection:
            check_lease(connection, lease)
            query = select(tool_rounds.c.state).where(tool_rounds.c.message_id == reply_id).with_for_update()
            if connection.execute(query).scalar() != RoundState.OPEN.value:
                return False
            begun = tool_calls.c.holder_id.in_(tried)
            return _update_call(connection, reply_id, position, (CallState.APPROVED,), values) or _update_call(
                connection, reply_id, position, (CallState.RUNNING,), values, begun
            )

    def record_result(
        self, lease: Lease, reply_id: str, position: int, result: str, is_error: bool, media: tuple[Blob, ...] = ()
    ) -> bool:
        """Records what a call returned, also one that was considered interrupted. The reply references its media.

        Returns False, without a change, if the user has decided about the call again since this process began it.
        """
        values = {"state": CallState.DONE.value, "result": result, "is_error": is_error, "ended_at": current_time()}
        values["media"] = encode_parts(media) or None
        before = (CallState.RUNNING, CallState.INTERRUPTED)
        with self._database.write_transaction() as connection:
            for blob in media:
                row = {"message_id": reply_id, "digest": blob.digest}
                self._database.insert_new(connection, message_blobs, row)
            return _update_call(connection, reply_id, position, before, values, tool_calls.c.holder_id == lease.id)

    def interrupt(self, lease: Lease, reply_id: str, position: int) -> None:
        """Marks a call that this process runs as interrupted: it ended without a result."""
        with self._database.write_transaction() as connection:
            _interrupt(connection, reply_id, position, tool_calls.c.holder_id == lease.id)

    def interrupt_orphans(self) -> tuple[str, ...]:
        """Marks calls of dead processes as interrupted. Returns the replies that have one."""
        with self._database.read_transaction() as connection:
            if not _running_calls(connection):
                return ()
        with self._database.write_transaction() as connection:
            dead = set(self._leases.dead_holders(connection))
            alive = set(connection.execute(select(holders.c.id)).scalars()) - dead
            orphans = [row for row in _running_calls(connection) if row.holder_id not in alive]
            for row in orphans:
                _interrupt(connection, row.message_id, row.position)
        return tuple(dict.fromkeys(row.message_id for row in orphans))

    def stop(self, reply_id: str) -> bool:
        """Stops an open round, or the calls that still run in a failed one, which stays failed. Calls that had begun
        are interrupted; approvals of others are taken back. Returns False if there was nothing to stop."""
        with self._database.write_transaction() as connection:
            stopped = _set_round(connection, reply_id, (RoundState.OPEN,), state=RoundState.STOPPED.value)
            running = _running_calls(connection, reply_id)
            if not stopped and not running:
                return False
            for row in running:
                _interrupt(connection, reply_id, row.position)
            not_begun = _where_call(reply_id, None, (CallState.NEW, CallState.APPROVED))
            connection.execute(update(tool_calls).where(*not_begun).values(state=CallState.WAITING.value))
            notify(self._database, connection, RoundStopped(reply_id))
            return True

    def reopen(self, reply_id: str) -> bool:
        """Continues a round that was stopped or failed."""
        before = (RoundState.STOPPED, RoundState.FAILED)
        values = {"state": RoundState.OPEN.value, "error": None, "continued": True}
        with self._database.write_transaction() as connection:
            return _set_round(connection, reply_id, before, **values)

    def fail(self, reply_id: str, error: str) -> bool:
        with self._database.write_transaction() as connection:
            return _set_round(connection, reply_id, (RoundState.OPEN,), state=RoundState.FAILED.value, error=error)

    def close(self, reply_id: str, next_id: str | None) -> bool:
        """The results are messages now; `next_id` is the reply to them, unless the client starts it."""
        with self._database.write_transaction() as connection:
            return _set_round(connection, reply_id, (RoundState.OPEN,), state=RoundState.DONE.value, next_id=next_id)

    def _change(self, reply_id: str, position: int, before: Sequence[CallState], values: dict[str, Any]) -> bool:
        with self._database.write_transaction() as connection:
            return _update_call(connection, reply_id, position, before, values)


def open_round(connection: Connection, reply_id: str, calls: Iterable[ToolCall]) -> None:
    """Records the calls of a reply, in the transaction that ends the reply."""
    connection.execute(insert(tool_rounds).values(message_id=reply_id, state=RoundState.OPEN.value, continued=False))
    rows = [
        {
            "message_id": reply_id,
            "position": position,
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "state": CallState.NEW.value,
            "is_error": False,
        }
        for position, call in enumerate(calls)
    ]
    connection.execute(insert(tool_calls), rows)


def _get_round(connection: Connection, reply_id: str) -> ToolRound | None:
    query = (
        select(tool_rounds, messages.c.conversation_id)
        .join(messages, messages.c.id == tool_rounds.c.message_id)
        .where(tool_rounds.c.message_id == reply_id)
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    rows = connection.execute(
        select(tool_calls).where(tool_calls.c.message_id == reply_id).order_by(tool_calls.c.position)
    )
    return ToolRound(
        reply_id,
        row.conversation_id,
        RoundState(row.state),
        tuple(map(_round_call, rows)),
        row.next_id,
        row.error,
        row.continued,
    )


def _round_call(row: Any) -> RoundCall:
    return RoundCall(
        row.position,
        row.call_id,
        row.name,
        row.arguments,
        CallState(row.state),
        row.edited,
        row.result,
        row.is_error,
        tuple(part for part in decode_parts(row.media or ()) if isinstance(part, Blob)),
        None if row.started_at is None else parse_time(row.started_at),
        None if row.ended_at is None else parse_time(row.ended_at),
    )


def _running_calls(connection: Connection, reply_id: str | None = None) -> list[Any]:
    query = select(tool_calls.c.message_id, tool_calls.c.position, tool_calls.c.holder_id)
    query = query.where(tool_calls.c.state == CallState.RUNNING.value)
    return list(connection.execute(query if reply_id is None else query.where(tool_calls.c.message_id == reply_id)))


def _interrupt(connection: Connection, reply_id: str, position: int, *conditions: ColumnElement[bool]) -> None:
    values = {"state": CallState.INTERRUPTED.value, "ended_at": current_time()}
    _update_call(connection, reply_id, position, (CallState.RUNNING,), values, *conditions)


def _update_call(
    connection: Connection,
    reply_id: str,
    position: int,
    before: Sequence[CallState],
    values: dict[str, Any],
    *conditions: ColumnElement[bool],
) -> bool:
    which = update(tool_calls).where(*_where_call(reply_id, position, before), *conditions)
    return connection.execute(which.values(**values)).rowcount == 1


def _where_call(reply_id: str, position: int | None, before: Sequence[CallState]) -> tuple[ColumnElement[bool], ...]:
    found = (tool_calls.c.message_id == reply_id, _in_states(*before))
    return found if position is None else (*found, tool_calls.c.position == position)


def _in_states(*states: CallState) -> ColumnElement[bool]:
    return tool_calls.c.state.in_([state.value for state in states])


def _set_round(connection: Connection, reply_id: str, before: Sequence[RoundState], **values: Any) -> bool:
    states = [state.value for state in before]
    which = update(tool_rounds).where(tool_rounds.c.message_id == reply_id, tool_rounds.c.state.in_(states))
    return connection.execute(which.values(**values)).rowcount == 1
