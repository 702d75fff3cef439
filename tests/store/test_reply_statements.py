"""The statements that write running replies store what the transactions store, with fewer messages to PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Executable, event, select, text

from palaver.errors import NothingToContinue
from palaver.events import Usage
from palaver.messages import Part, Text, Thinking
from palaver.store import (
    Conflict,
    Lease,
    LeaseLost,
    NotFound,
    ReplyEnding,
    ReplyStatus,
    Store,
    TokenCountMismatch,
    TokenFrame,
)
from palaver.store.notifications import Notification, TokensStored
from palaver.store.replies import Replies
from palaver.store.schema import messages, replies, reply_tokens, running
from tests.store.conftest import StoreLocation
from tests.store.factories import SETTINGS, add_message, new_conversation, steps


@pytest.fixture
def lease(store: Store) -> Lease:
    return store.leases.open()


def start(store: Store, lease: Lease, count: int = 3) -> str:
    talk = new_conversation(store)
    reply = store.replies.start(lease, talk.id, add_message(store, talk.id, None, "?").id, SETTINGS)
    for position in range(count):
        store.replies.append(lease, [TokenFrame(reply.id, position, steps(position), {"seconds": 1.0})])
    return reply.id


def ending(*parts: Part, tokens: int = 3, **more: Any) -> ReplyEnding:
    return ReplyEnding(ReplyStatus.STOPPED, parts, Usage(1, 0, tokens, 0), tokens=tokens, **more)


@contextmanager
def counted(store: Store) -> Iterator[list[str]]:
    """The statements and the commits of transactions in the block."""
    seen: list[str] = []
    database = store.database
    engines = {database.engine, database._statements}

    def count(connection: object, cursor: object, statement: str, *more: object) -> None:
        seen.append(statement)

    def commit(connection: object) -> None:
        seen.append("COMMIT")

    for engine in engines:
        event.listen(engine, "before_cursor_execute", count)
    event.listen(database.engine, "commit", commit)
    try:
        yield seen
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", count)
        event.remove(database.engine, "commit", commit)


def skip_sqlite(place: StoreLocation) -> None:
    if place.database is None:
        pytest.skip("SQLite has no messages to a server")


WORDS_POSTGRES = (
    "SELECT piece, regexp_replace(CAST(words AS text), '''[\ue000\ue001][^'']*''', '', 'g') FROM search_words "
    "WHERE seq = (SELECT seq FROM messages WHERE id = :id) ORDER BY piece"
)
WORDS_SQLITE = (
    "SELECT substr(words, 1, instr(words, '\ue000')) FROM search_words "
    "WHERE rowid = (SELECT seq FROM messages WHERE id = :id)"
)
"""Without the words of owner and conversation."""


def stored_rows(store: Store, id: str) -> Mapping[str, Any]:
    """Everything that is stored of a reply, but its times and ids."""
    queries: dict[str, Executable] = {
        "parts": select(messages.c.parts).where(messages.c.id == id),
        "reply": select(
            replies.c.status, replies.c.settings, replies.c.usage, replies.c.timings, replies.c.error
        ).where(replies.c.message_id == id),
        "tokens": select(reply_tokens.c.start, reply_tokens.c.count, reply_tokens.c.data).where(
            reply_tokens.c.message_id == id
        ),
        "running": select(running.c.tokens, running.c.answer_requested).where(running.c.message_id == id),
        "words": text(WORDS_SQLITE if store.database.is_sqlite else WORDS_POSTGRES).bindparams(id=id),
    }
    with store.database.read_transaction() as connection:
        return {name: [tuple(row) for row in connection.execute(query)] for name, query in queries.items()}


def run_life(store: Store, lease: Lease) -> Iterator[Mapping[str, Any]]:
    """What is stored of a reply at every stage of its life."""
    id = start(store, lease)
    store.replies.record_answer_at(lease, id, 2)
    yield stored_rows(store, id)
    store.replies.end(lease, id, ending(Thinking("hm"), Text("one two"), timings={"seconds": 2.0}))
    yield stored_rows(store, id)
    store.replies.resume(lease, id, "key", "engine")
    yield stored_rows(store, id)
    store.replies.append(lease, [TokenFrame(id, 3, steps(3), {"seconds": 3.0})])
    store.replies.end(lease, id, ending(Text("word " * 300), tokens=4, error="It broke."))
    yield stored_rows(store, id)
    store.replies.resume(lease, id)
    store.replies.end(lease, id, ReplyEnding(ReplyStatus.INTERRUPTED, None))
    yield stored_rows(store, id)
    store.replies.resume(lease, id)
    store.replies.end(lease, id, ReplyEnding(ReplyStatus.LENGTH, (Text("word"),), tokens=4))
    store.replies.resume(lease, id)
    yield stored_rows(store, id)


def test_a_statement_stores_what_the_transaction_stores(
    store: Store, lease: Lease, place: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_statements = list(run_life(store, lease))
    for name in ("_end_at_once", "_resume_at_once", "_record_answer_at_once"):
        monkeypatch.setattr(Replies, name, lambda *_: None)
    assert list(run_life(store, lease)) == by_statements
    assert len(by_statements[3]["words"]) > 1 or place.database is None, "a long text has several rows in the index"


def test_writes_of_replies_take_few_messages(store: Store, lease: Lease, place: StoreLocation) -> None:
    """Each statement is one, a transaction one more to begin, and one to commit."""
    skip_sqlite(place)
    id = start(store, lease)
    store.replies.watch(id)
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "append": (1, lambda: store.replies.append(lease, [TokenFrame(id, 3, steps(3))])),
        "request": (1, lambda: store.replies.request(id, answer=True)),
        "answer": (2, lambda: store.replies.record_answer_at(lease, id, 4)),
        "end": (3, lambda: store.replies.end(lease, id, ending(Text("a"), tokens=4))),  # the last notifies readers
        "resume": (2, lambda: store.replies.resume(lease, id)),
    }
    for name, (most, call) in calls.items():
        with counted(store) as seen:
            call()
        assert len(seen) <= most, (name, seen)


def test_an_ending_is_on_disk_before_the_call_returns(store: Store, lease: Lease, place: StoreLocation) -> None:
    skip_sqlite(place)
    id = start(store, lease)
    with store.database.read_transaction() as connection:
        before = connection.execute(text("SELECT pg_current_wal_insert_lsn()")).scalar_one()
        store.replies.end(lease, id, ending(Text("a")))
        query = text("SELECT pg_current_wal_flush_lsn() > CAST(:before AS pg_lsn)")
        assert connection.execute(query, {"before": before}).scalar_one()
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == "off"


def test_a_continued_reply_is_on_disk_after_a_sync(store: Store, lease: Lease, place: StoreLocation) -> None:
    skip_sqlite(place)
    id = start(store, lease)
    store.replies.end(lease, id, ending(Text("a")))
    store.replies.resume(lease, id)
    with store.database.read_transaction() as connection:
        after = connection.execute(text("SELECT pg_current_wal_insert_lsn()")).scalar_one()
        store.replies.sync()
        query = text("SELECT pg_current_wal_flush_lsn() >= CAST(:after AS pg_lsn)")
        assert connection.execute(query, {"after": after}).scalar_one()


def test_a_reply_that_is_not_held_or_has_lost_tokens_is_not_ended(store: Store, lease: Lease) -> None:
    id = start(store, lease)
    with pytest.raises(TokenCountMismatch):
        store.replies.end(lease, id, ending(Text("a"), tokens=4))
    with pytest.raises(LeaseLost):
        store.replies.end(store.leases.open(), id, ending(Text("a")))
    with pytest.raises(LeaseLost):
        store.replies.record_answer_at(store.leases.open(), id, 1)
    with pytest.raises(Conflict):
        store.replies.resume(lease, id)
    assert store.messages.get(id).parts == ()
    assert store.replies.running_ids(lease) == (id,)


def test_a_reply_with_children_or_a_lost_lease_is_not_resumed(store: Store, lease: Lease) -> None:
    id = start(store, lease)
    store.replies.end(lease, id, ending(Text("a")))
    gone = store.leases.open()
    gone.close()
    with pytest.raises(LeaseLost):
        store.replies.resume(gone, id)
    add_message(store, store.messages.get(id).conversation_id, id, "next")
    with pytest.raises(Conflict):
        store.replies.resume(lease, id)
    done = start(store, lease)
    store.replies.end(lease, done, replace(ending(Text("a")), status=ReplyStatus.DONE))
    with pytest.raises(NothingToContinue):
        store.replies.resume(lease, done)


def test_a_reply_that_was_read_before_is_not_read_again_to_resume_it(store: Store, lease: Lease) -> None:
    id = start(store, lease)
    store.replies.end(lease, id, ending(Text("a")))
    read = store.messages.get(id)
    with counted(store) as seen:
        resumed = store.replies.resume(lease, id, "key", "engine", (read, 3))
    assert not any("parts" in statement for statement in seen), seen
    assert resumed == store.messages.get(id)
    assert store.replies.append(lease, [TokenFrame(id, 3, steps(3))]) == frozenset()


def test_a_reply_that_has_changed_since_it_was_read_is_read_again(store: Store, lease: Lease) -> None:
    id = start(store, lease)
    store.replies.end(lease, id, ending(Text("a")))
    read = store.messages.get(id)
    store.replies.resume(lease, id, "first", "engine")
    with pytest.raises(Conflict):
        store.replies.resume(store.leases.open(), id, "second", "engine", (read, 3))
    store.replies.append(lease, [TokenFrame(id, 3, steps(3))])
    store.replies.end(lease, id, ending(Text("a b"), tokens=4))
    resumed = store.replies.resume(lease, id, "second", "engine", (read, 3))
    assert resumed == store.messages.get(id)
    assert resumed.text == "a b"
    assert resumed.reply is not None
    assert resumed.reply.settings.options["resumed"] == ["first", "second"]
    assert store.replies.append(lease, [TokenFrame(id, 4, steps(4))]) == frozenset()
    store.replies.end(lease, id, ending(Text("a b c"), tokens=5))
    latest = store.messages.get(id)
    store.replies.resume(lease, id, None, "", (latest, 3))
    with pytest.raises(TokenCountMismatch):  # it was resumed with the stored number of tokens, not the given one
        store.replies.append(lease, [TokenFrame(id, 3, steps(3))])
    store.replies.end(lease, id, ending(Text("a b c"), tokens=5))
    latest = store.messages.get(id)
    store.conversations.delete(latest.conversation_id)
    with pytest.raises(NotFound):
        store.replies.resume(lease, id, None, "", (latest, 5))


def test_a_command_is_for_another_process_and_of_the_owner(store: Store, lease: Lease) -> None:
    id = start(store, lease)
    owner = store.users.ensure().id
    assert store.replies.request(id, stop=True, owner="another") is None
    assert store.replies.request(id, stop=True, owner=owner, not_held_by=lease.id) is None
    assert store.replies.commands(lease) == ()
    assert store.replies.request(id, stop=True, owner=owner, not_held_by="another") == SETTINGS.model
    store.conversations.delete(store.messages.get(id).conversation_id)
    assert store.replies.request(id, answer=True, owner=owner) is None


def test_readers_of_many_replies_are_notified_of_each(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """More replies than one payload holds."""
    for module in ("notifications", "reply_statements"):
        monkeypatch.setattr(f"palaver.store.{module}.MAX_REPLIES", 2)
    received: list[Notification] = []
    assert store.notifications.listen(received.append)
    lease = store.leases.open()  # after listening: on SQLite it has the address
    ids = [start(store, lease, 0) for _ in range(5)]
    for id in ids[:4]:
        store.replies.watch(id)
    store.replies.append(lease, [TokenFrame(id, 0, steps(1)) for id in ids])
    store.notifications.send([TokensStored(("last",))])
    wait_for(lambda: TokensStored(("last",)) in received)
    store.notifications.stop_listening(received.append)
    notified = [one.reply_ids for one in received if isinstance(one, TokensStored)]
    assert sorted(id for reply_ids in notified[:-1] for id in reply_ids) == sorted(ids[:4])
    assert [len(reply_ids) for reply_ids in notified] == [2, 2, 1]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
