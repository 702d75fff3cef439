from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palaver.constraints import Constraint, Grammar
from palaver.errors import NothingToContinue
from palaver.events import Usage
from palaver.generation import prefill_steps
from palaver.messages import Text, Thinking, Tool
from palaver.sampling import Sampling
from palaver.store import (
    Conflict,
    Lease,
    LeaseLost,
    NotFound,
    ReplyEnding,
    ReplySettings,
    ReplyStatus,
    Store,
    TokenCountMismatch,
    TokenFrame,
)
from tests.store.conftest import StoreLocation
from tests.store.factories import SETTINGS, add_message, add_reply, new_conversation, steps


@pytest.fixture
def lease(store: Store) -> Lease:
    return store.leases.open()


def test_a_reply_keeps_its_text_tokens_and_settings(store: Store, lease: Lease, place: StoreLocation) -> None:
    made_by = ReplySettings(
        model="sprout",
        sampling=Sampling(
            seed=2**62,
            logit_bias=((5, -1.5),),
            stop=("\n",),
            banned_ids=(3,),
            max_tokens=9,
            constraint=Constraint(Grammar.REGEX, "a+"),
        ),
        tokenizer="fingerprint",
        options={"thinking": True, "variables": {"x": [1]}},
        tools=(Tool("look", "looks", {"type": "object"}),),
        choice=2,
    )
    id = new_conversation(store).id
    question = add_message(store, id, None, "?")
    reply = store.replies.start(lease, id, question.id, made_by)
    assert store.replies.append(lease, [TokenFrame(reply.id, 0, steps(1, 2)), TokenFrame("gone", 0, steps(1))]) == {
        "gone"
    }
    assert store.replies.append(lease, [TokenFrame(reply.id, 2, steps(3))]) == frozenset()
    ending = ReplyEnding(
        ReplyStatus.STOPPED, (Thinking("hm"), Text("yes")), Usage(1, 2, 3, 4), {"prefill": 0.25}, "why"
    )
    store.replies.finish(lease, reply.id, ending)
    with place.open() as again:
        found = again.messages.get(reply.id)
        assert found.parts == ending.parts
        assert found.reply is not None
        assert found.reply.settings == made_by
        assert (found.reply.status, found.reply.usage) == (ReplyStatus.STOPPED, ending.usage)
        assert (found.reply.timings, found.reply.error) == (ending.timings, "why")
        assert again.replies.tokens(reply.id) == steps(1, 2, 3)


def test_tokens_of_many_replies_are_one_transaction(store: Store, lease: Lease) -> None:
    id = new_conversation(store).id
    first, second = (store.replies.start(lease, id, None, SETTINGS) for _ in range(2))
    with pytest.raises(TokenCountMismatch, match=second.id):
        store.replies.append(lease, [TokenFrame(first.id, 0, steps(1)), TokenFrame(second.id, 5, steps(1))])
    assert store.replies.token_ids(first.id) == ()
    store.replies.append(lease, [TokenFrame(first.id, 0, steps(1)), TokenFrame(second.id, 0, steps(2))])
    assert store.replies.token_ids(second.id) == (2,)
    assert set(store.replies.running_ids(lease)) == {first.id, second.id}


def test_a_retry_is_a_sibling(store: Store, lease: Lease) -> None:
    id = new_conversation(store).id
    question = add_message(store, id, None, "?")
    first = add_reply(store, lease, id, question.id, "a")
    second = add_reply(store, lease, id, question.id, "b")
    assert [one.id for one in store.messages.siblings(first.id)] == [first.id, second.id]


def test_a_stopped_reply_is_resumed_from_its_tokens(store: Store, lease: Lease) -> None:
    id = new_conversation(store).id
    reply = store.replies.start(lease, id, None, SETTINGS)
    store.replies.append(lease, [TokenFrame(reply.id, 0, steps(1, 2))])
    with pytest.raises(Conflict, match="running"):
        store.replies.resume(lease, reply.id)
    store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.STOPPED, (Text("ab"),)))
    store.replies.resume(lease, reply.id)
    store.replies.append(lease, [TokenFrame(reply.id, 2, steps(3))])
    done = store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("abc"),)))
    assert store.replies.token_ids(reply.id) == (1, 2, 3)
    assert done.text == "abc"
    with pytest.raises(NothingToContinue):
        store.replies.resume(lease, reply.id)


def test_the_limit_of_a_reply_that_reached_it_counts_from_where_it_is_continued(store: Store, lease: Lease) -> None:
    reply = store.replies.start(lease, new_conversation(store).id, None, SETTINGS)
    for position, status, limit_from in ((0, "stopped", 0), (1, "length", 2), (2, "stopped", 2), (3, "length", 4)):
        store.replies.append(lease, [TokenFrame(reply.id, position, steps(position))])
        store.replies.end(lease, reply.id, ReplyEnding(ReplyStatus(status), (Text("a"),)))
        resumed = store.replies.resume(lease, reply.id)
        assert resumed == store.messages.get(reply.id)
        assert resumed.reply is not None
        assert resumed.reply.settings.limit_from == limit_from
        assert resumed.reply.settings.sampling == SETTINGS.sampling


def test_a_reply_with_children_is_continued_in_a_sibling(store: Store, lease: Lease) -> None:
    id = new_conversation(store).id
    reply = store.replies.start(lease, id, None, SETTINGS)
    store.replies.append(lease, [TokenFrame(reply.id, 0, steps(1))])
    store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.LENGTH, (Text("a"),)))
    add_message(store, id, reply.id, "and?")
    with pytest.raises(Conflict, match="branch"):
        store.replies.resume(lease, reply.id)
    going = store.replies.tokens(reply.id)
    sibling = store.replies.start(lease, id, None, SETTINGS, prefix=going)
    store.replies.append(lease, [TokenFrame(sibling.id, 1, steps(2))])
    assert store.replies.token_ids(sibling.id) == (1, 2)
    assert store.replies.token_ids(reply.id) == (1,)


def test_an_edited_reply_is_continued_from_prefilled_tokens(store: Store, lease: Lease) -> None:
    id = new_conversation(store).id
    old = add_reply(store, lease, id, None, "so")
    edited = store.messages.edit(old.id, (Text("thus"),))
    with pytest.raises(NotFound):
        store.replies.resume(lease, edited.id)
    on = store.replies.start(lease, id, edited.parent_id, SETTINGS, prefix=prefill_steps((8, 9)), key="once")
    assert store.replies.start(lease, id, edited.parent_id, SETTINGS, key="once").id == on.id
    first = store.replies.tokens(on.id)[0]
    assert first.token_id == 8
    assert first.logprob != first.logprob


def test_only_the_holder_writes_and_only_a_dead_holder_loses_its_replies(store: Store) -> None:
    old, new = store.leases.open(), store.leases.open()
    reply = store.replies.start(old, new_conversation(store).id, None, SETTINGS)
    assert store.replies.claim_orphans(new) == ()
    assert store.replies.interrupt_orphans() == ()
    assert store.replies.append(new, [TokenFrame(reply.id, 0, steps(1))]) == {reply.id}
    old.close()
    assert store.replies.claim_orphans(new) == (reply.id,)
    assert store.replies.append(old, [TokenFrame(reply.id, 0, steps(1))]) == {reply.id}
    with pytest.raises(LeaseLost):
        store.replies.finish(old, reply.id, ReplyEnding(ReplyStatus.DONE, ()))
    assert not old.renew()
    assert new.renew()
    assert store.replies.append(new, [TokenFrame(reply.id, 0, steps(1))]) == frozenset()


def test_a_reply_of_a_deleted_conversation_is_finished(store: Store, lease: Lease) -> None:
    id = new_conversation(store).id
    reply = store.replies.start(lease, id, None, SETTINGS)
    store.conversations.delete(id)
    assert store.replies.append(lease, [TokenFrame(reply.id, 0, steps(1))]) == frozenset()
    store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("a"),)))
    store.conversations.undelete(id)
    assert store.messages.get(reply.id).text == "a"


def test_one_key_at_once_starts_one_reply(store: Store, lease: Lease) -> None:
    id = new_conversation(store).id
    with ThreadPoolExecutor(4) as pool:
        started = pool.map(lambda _: store.replies.start(lease, id, None, SETTINGS, key="k").id, range(8))
        assert len(set(started)) == 1
    assert len(store.replies.running_ids(lease)) == 1


def test_a_holder_on_another_machine_is_dead_when_its_lease_expires(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = store.leases.open(seconds=0.2)
    reply = store.replies.start(lease, new_conversation(store).id, None, SETTINGS)
    time.sleep(0.3)
    assert store.replies.interrupt_orphans() == (), "it lives on this machine, however late it is"
    lease.renew()
    monkeypatch.setattr("palaver.store.leases._host", lambda: "another machine")
    assert store.replies.interrupt_orphans() == ()
    time.sleep(0.3)
    assert store.replies.interrupt_orphans() == (reply.id,)


def test_a_killed_holders_replies_are_interrupted_and_continued(
    store: Store, place: StoreLocation, tmp_path: Path
) -> None:
    id = new_conversation(store).id
    told = tmp_path / "told"
    process = multiprocessing.get_context("spawn").Process(target=_hold_and_wait, args=(place, id, told))
    process.start()
    while not told.exists():
        time.sleep(0.02)
    reply_id = told.read_text()
    assert store.replies.interrupt_orphans() == ()
    process.kill()
    process.join()
    assert store.replies.interrupt_orphans() == (reply_id,)
    found = store.messages.get(reply_id)
    assert found.reply is not None
    assert found.reply.status is ReplyStatus.INTERRUPTED
    assert store.replies.rewrite(reply_id, (Text("ab"),)).text == "ab"
    lease = store.leases.open()
    store.replies.resume(lease, reply_id)
    store.replies.append(lease, [TokenFrame(reply_id, 2, steps(3))])
    assert store.replies.token_ids(reply_id) == (1, 2, 3)


def _hold_and_wait(place: StoreLocation, id: str, told: Path) -> None:
    store = place.open()
    lease = store.leases.open()
    reply = store.replies.start(lease, id, None, SETTINGS)
    store.replies.append(lease, [TokenFrame(reply.id, 0, steps(1))])
    store.replies.append(lease, [TokenFrame(reply.id, 1, steps(2))])
    told.with_suffix(".new").write_text(reply.id)
    told.with_suffix(".new").rename(told)
    time.sleep(60)


def test_a_lease_expires_by_the_clock_of_the_database(place: StoreLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is wrong neither takes replies from a process that lives nor keeps its own for ever."""
    if place.database is None:
        pytest.skip("SQLite has no clock of its own")
    with place.open() as here, place.open() as elsewhere:
        lease = here.leases.open(seconds=3600)
        reply = here.replies.start(lease, new_conversation(here).id, None, SETTINGS)
        monkeypatch.setattr("palaver.store.leases._host", lambda: "elsewhere")
        monkeypatch.setattr("time.time_ns", lambda: 2**60)
        mine = elsewhere.leases.open()
        assert elsewhere.replies.claim_orphans(mine) == ()
        lease._seconds = -1.0
        assert lease.renew()
        monkeypatch.setattr("time.time_ns", lambda: 0)
        assert elsewhere.replies.claim_orphans(mine) == (reply.id,)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "finish", "engine", "die", "claim"]), st.integers(0, 1), st.integers(0, 1)),
    max_size=12,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_every_write_of_a_former_holder_is_refused(store: Store, operations: list[tuple[str, int, int]]) -> None:
    leases = [store.leases.open(), store.leases.open()]
    replies = [store.replies.start(leases[n], new_conversation(store).id, None, SETTINGS).id for n in range(2)]
    holders: list[int | None] = [0, 1]
    """Which lease holds each reply; None if it has ended."""
    tokens = [0, 0]
    for operation, who, which in operations:
        lease, reply = leases[who], replies[which]
        may_write = holders[which] == who
        if operation == "append":
            lost = store.replies.append(lease, [TokenFrame(reply, tokens[which], steps(1))])
            assert lost == (frozenset() if may_write else {reply})
            tokens[which] += may_write
        elif operation in ("finish", "engine"):
            with nullcontext() if may_write else pytest.raises(LeaseLost):
                if operation == "engine":
                    store.replies.record_engine(lease, reply, "other")
                else:
                    store.replies.finish(lease, reply, ReplyEnding(ReplyStatus.DONE, ()))
                    holders[which] = None
        elif operation == "die":
            lease.close()
            leases[who] = store.leases.open()
            if who in holders:  # the other process takes its replies over
                claimed = store.replies.claim_orphans(leases[1 - who])
                assert set(claimed) == {replies[n] for n in range(2) if holders[n] == who}
                holders = [1 - who if holder == who else holder for holder in holders]
            frames = [TokenFrame(id, count, steps(1)) for id, count in zip(replies, tokens, strict=True)]
            assert store.replies.append(lease, frames) == set(replies), "the former holder"
            with pytest.raises(LeaseLost):
                store.replies.finish(lease, reply, ReplyEnding(ReplyStatus.DONE, ()))
        else:
            assert store.replies.claim_orphans(lease) == ()
        assert len(store.replies.tokens(reply)) == tokens[which]
