"""Rounds of tool calls in both databases: which process may record what, and which rounds go on by themselves."""

from __future__ import annotations

import pytest
from sqlalchemy import delete

from palaver.messages import ToolCall
from palaver.store import LeaseLost, ReplyEnding, ReplyStatus, Store
from palaver.store.schema import holders
from palaver.store.tool_rounds import CallState, RoundState
from tests.store.factories import SETTINGS, add_message, new_conversation


def call_tools(store: Store, *names: str) -> str:
    """The id of a reply that calls these tools."""
    lease = store.leases.open()
    conversation = new_conversation(store)
    question = add_message(store, conversation.id, None, "Call them.")
    calls = tuple(ToolCall(f"call_{number}", name, "{}") for number, name in enumerate(names))
    reply = store.replies.start(lease, conversation.id, question.id, SETTINGS)
    return store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, calls, tool_calls=calls)).id


def states(store: Store, reply_id: str) -> list[CallState]:
    round = store.tool_rounds.get(reply_id)
    assert round is not None
    return [call.state for call in round.calls]


def test_a_process_that_lost_its_call_does_not_record_over_the_next_run(store: Store) -> None:
    rounds, reply = store.tool_rounds, call_tools(store, "demo__clock")
    first, second = store.leases.open(), store.leases.open()
    assert rounds.decide(reply, 0, True, None, "")
    assert rounds.begin(first, reply, 0)
    first.release()  # counts as dead, but its process goes on
    assert rounds.interrupt_orphans() == (reply,)
    assert rounds.decide(reply, 0, True, None, "")
    assert not rounds.record_result(first, reply, 0, "before the next run", False)
    assert rounds.begin(second, reply, 0)
    assert not rounds.record_result(first, reply, 0, "of the first run", False)
    rounds.interrupt(first, reply, 0)
    assert states(store, reply) == [CallState.RUNNING]
    assert rounds.record_result(second, reply, 0, "of the second run", False)
    round = rounds.get(reply)
    assert round is not None
    assert round.calls[0].result == "of the second run"


def test_a_call_that_an_earlier_attempt_began_is_begun_again(store: Store) -> None:
    rounds, reply = store.tool_rounds, call_tools(store, "demo__clock")
    first, second = store.leases.open(), store.leases.open()
    assert rounds.decide(reply, 0, True, None, "")
    assert rounds.begin(first, reply, 0)
    assert not rounds.begin(first, reply, 0)
    assert not rounds.begin(second, reply, 0, [second.id])
    assert rounds.begin(second, reply, 0, [first.id])
    assert not rounds.record_result(first, reply, 0, "of the first lease", False)
    assert rounds.record_result(second, reply, 0, "of the second lease", False)
    assert not rounds.begin(second, reply, 0, [first.id, second.id])


def test_a_process_without_a_lease_begins_no_call(store: Store) -> None:
    rounds, reply = store.tool_rounds, call_tools(store, "demo__clock")
    lease = store.leases.open()
    assert rounds.decide(reply, 0, True, None, "")
    with store.database.write_transaction() as connection:  # as another process does that takes the lease for dead
        connection.execute(delete(holders).where(holders.c.id == lease.id))
    with pytest.raises(LeaseLost):
        rounds.begin(lease, reply, 0)
    assert states(store, reply) == [CallState.APPROVED]


def test_the_result_of_a_call_that_was_considered_interrupted_is_used(store: Store) -> None:
    rounds, reply = store.tool_rounds, call_tools(store, "demo__clock")
    lease = store.leases.open()
    assert rounds.decide(reply, 0, True, None, "")
    assert rounds.begin(lease, reply, 0)
    lease.release()
    rounds.interrupt_orphans()
    assert rounds.record_result(lease, reply, 0, "late", False)
    assert states(store, reply) == [CallState.DONE]


def test_a_stop_interrupts_what_still_runs_in_a_failed_round(store: Store) -> None:
    rounds, reply = store.tool_rounds, call_tools(store, "demo__clock", "demo__roll", "demo__read")
    lease = store.leases.open()
    for position in (0, 1):
        assert rounds.decide(reply, position, True, None, "")
    assert rounds.begin(lease, reply, 1)
    assert rounds.fail(reply, "call 0 was not recorded")
    assert rounds.stop(reply)
    assert states(store, reply) == [CallState.WAITING, CallState.INTERRUPTED, CallState.WAITING]
    round = rounds.get(reply)
    assert round is not None
    assert (round.state, round.error) == (RoundState.FAILED, "call 0 was not recorded")
    assert not rounds.stop(reply)


def test_rounds_that_wait_for_a_decision_do_not_go_on_by_themselves(store: Store) -> None:
    rounds = store.tool_rounds
    new, waiting, half, running, ended, stopped = (call_tools(store, "demo__clock", "demo__roll") for _ in range(6))
    for reply in (waiting, half, running, ended):
        rounds.await_decision(reply, 0)
        rounds.await_decision(reply, 1)
    for reply, position in ((half, 1), (running, 0)):
        assert rounds.decide(reply, position, True, None, "")
    lease = store.leases.open()
    assert rounds.begin(lease, running, 0)
    for position in (0, 1):
        assert rounds.decide(ended, position, False, None, "no")
    assert rounds.stop(stopped)
    assert set(rounds.list_open()) == {new, waiting, half, running, ended}
    assert set(rounds.list_actionable()) == {new, half, ended}
