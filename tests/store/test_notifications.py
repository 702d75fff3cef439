"""Notifications between processes that share a store, each with a connection of its own."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

import pytest
from sqlalchemy import delete, update

from palaver.store import ReplyEnding, ReplyStatus, Store, TokenFrame
from palaver.store.notifications import (
    CommandStored,
    ConversationChanged,
    Gap,
    Notification,
    RoundStopped,
    TokensStored,
    notify,
    tokens_stored,
)
from palaver.store.replies import TurnCommand
from palaver.store.schema import reply_tokens, running
from tests.store.conftest import StoreLocation, run_sql
from tests.store.factories import SETTINGS, steps

SECONDS = 30


class Receiver:
    """A store that listens, and what it received."""

    def __init__(self, store: Store) -> None:
        self._received: queue.Queue[Notification] = queue.Queue()
        assert store.notifications.listen(self._received.put)
        self.lease = store.leases.open()

    def next(self) -> Notification:
        return self._received.get(timeout=SECONDS)


def start_reply(store: Store, receiver: Receiver) -> str:
    talk = store.conversations.create(store.users.ensure().id)
    return store.replies.start(receiver.lease, talk.id, None, SETTINGS).id


def test_a_transaction_notifies_all_processes_once_it_is_committed(place: StoreLocation) -> None:
    with place.open() as one, place.open() as other:
        here, there = Receiver(one), Receiver(other)
        with suppress(RuntimeError), one.database.write_transaction() as connection:
            notify(one.database, connection, RoundStopped("rolled back"))
            raise RuntimeError
        with one.database.write_transaction() as connection:
            notify(one.database, connection, RoundStopped("committed"))
        assert here.next() == there.next() == RoundStopped("committed")
        change = ConversationChanged("me", "owner", "talk", "message", "id")
        other.notifications.send([change, CommandStored("reply")])
        assert [here.next(), here.next()] == [change, CommandStored("reply")]


def test_only_watched_replies_notify_and_only_new_tokens_are_read(place: StoreLocation) -> None:
    with place.open() as writer, place.open() as reader:
        here, there = Receiver(writer), Receiver(reader)
        quiet, followed = start_reply(writer, here), start_reply(writer, here)
        timings = {"seconds": 0.5}
        writer.replies.append(here.lease, [TokenFrame(id, 0, steps(1, 2), timings) for id in (quiet, followed)])
        assert reader.replies.watch(followed) == timings
        writer.replies.append(here.lease, [TokenFrame(id, 2, steps(3)) for id in (quiet, followed)])
        assert there.next() == TokensStored((followed,))
        new = reader.replies.read_new({followed: 2, quiet: 0, "purged": 0})
        assert [step.token_id for step in new[followed].steps] == [3]
        assert [step.token_id for step in new[quiet].steps] == [1, 2, 3]
        assert new.keys() == {followed, quiet}
        writer.replies.finish(here.lease, followed, ReplyEnding(ReplyStatus.DONE, ()))
        assert there.next() == TokensStored((followed,))
        for position in range(4):  # its tokens are one row now
            ended = reader.replies.read_new({followed: position})[followed]
            assert ended.status is ReplyStatus.DONE
            assert [step.token_id for step in ended.steps] == [1, 2, 3][position:]


def test_tokens_that_a_database_lost_are_read_once_though_they_are_stored_again_in_one_row(
    place: StoreLocation,
) -> None:
    """What a restart of PostgreSQL may do: commits that did not wait for the disk are gone."""
    with place.open() as writer, place.open() as reader:
        here = Receiver(writer)
        reply = start_reply(writer, here)
        for position in (0, 2):
            writer.replies.append(here.lease, [TokenFrame(reply, position, steps(position, position + 1))])
        with writer.database.write_transaction() as connection:
            connection.execute(delete(reply_tokens).where(reply_tokens.c.start == 2))
            connection.execute(update(running).values(tokens=2))
        assert reader.replies.read_new({reply: 4})[reply].steps == ()
        writer.replies.append(here.lease, [TokenFrame(reply, 2, steps(2, 3, 4, 5))])
        writer.replies.append(here.lease, [TokenFrame(reply, 6, steps(6))])
        for position in range(8):
            new = reader.replies.read_new({reply: position})[reply]
            assert [step.token_id for step in new.steps] == list(range(position, 7))


def test_the_timings_of_a_watched_reply_are_those_of_its_earlier_run_until_its_next_token(place: StoreLocation) -> None:
    with place.open() as writer, place.open() as reader:
        here = Receiver(writer)
        reply = start_reply(writer, here)
        ending = ReplyEnding(ReplyStatus.STOPPED, (), timings={"seconds": 2.0})
        writer.replies.finish(here.lease, reply, ending)
        assert reader.replies.watch(reply) == {"seconds": 2.0}, "it does not run"
        writer.replies.resume(here.lease, reply)
        assert reader.replies.watch(reply) == {"seconds": 2.0}
        writer.replies.append(here.lease, [TokenFrame(reply, 0, steps(1), {"seconds": 3.0})])
        assert reader.replies.watch(reply) == {"seconds": 3.0}


def test_a_command_is_stored_for_the_holder(place: StoreLocation) -> None:
    with place.open() as holder, place.open() as other:
        here, there = Receiver(holder), Receiver(other)
        reply = start_reply(holder, here)
        assert other.replies.request(reply, answer=True)
        assert here.next() == CommandStored(reply, answer=True)
        assert holder.replies.commands(here.lease) == (TurnCommand(reply, stop=False, answer=True),)
        assert other.replies.commands(there.lease) == ()
        holder.replies.record_answer_at(here.lease, reply, 0)
        assert holder.replies.commands(here.lease) == ()
        assert other.replies.request(reply, stop=True)
        here.lease.close()
        assert other.replies.claim_orphans(there.lease) == (reply,)
        assert other.replies.commands(there.lease) == (TurnCommand(reply, stop=True, answer=False),)
        assert not other.replies.request("no reply", stop=True)


def test_many_replies_are_split_into_payloads() -> None:
    ids = [f"{number:016}" for number in range(1000)]
    parts = list(tokens_stored(ids))
    assert [id for part in parts for id in part.reply_ids] == ids
    assert all(len(part.reply_ids) * 19 < 7900 for part in parts)


def test_a_lost_connection_is_opened_again_and_the_gap_is_reported(place: StoreLocation) -> None:
    if place.database is None:
        pytest.skip("SQLite's sockets have no connection")
    with place.open() as one, place.open() as other:
        here = Receiver(one)
        run_sql(
            place.database.set(database="postgres"),
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ILIKE 'LISTEN%' "
            f"AND datname = '{place.database.database}'",
        )
        assert here.next() == Gap()
        other.notifications.send([CommandStored("reply")])
        assert here.next() == CommandStored("reply")


def test_a_process_that_does_not_read_holds_no_writer_up(place: StoreLocation) -> None:
    with place.open() as one, place.open() as other:
        here, entered, release = Receiver(one), threading.Event(), threading.Event()

        def block(_: Notification) -> None:
            entered.set()
            release.wait(SECONDS)

        assert other.notifications.listen(block)
        other.leases.open()
        try:
            one.notifications.send([CommandStored("first")])
            assert entered.wait(SECONDS)
            for number in range(40):  # more than a socket's queue holds
                one.notifications.send([CommandStored(str(number))])
            received = [here.next() for _ in range(41)]
            assert received[-1] == CommandStored("39")
        finally:
            release.set()


def test_closing_ends_the_listener(place: StoreLocation) -> None:
    before = set(threading.enumerate())
    with place.open() as store:
        Receiver(store)
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if thread.name == "notifications"]
