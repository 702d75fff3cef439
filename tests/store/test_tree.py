"""Random operations against a model of the tree, with crashes in between: after every step both are the same."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import URL, create_engine, text, update

from palaver.errors import NothingToContinue
from palaver.messages import Role, Text, user
from palaver.store import Conflict, Lease, NotFound, ReplyEnding, ReplyStatus, Store, StoreError, TokenFrame, tree
from palaver.store.schema import conversations
from tests.store.conftest import StoreLocation
from tests.store.factories import SETTINGS, new_conversation, steps

EXAMPLES = int(os.environ.get("PALAVER_EXAMPLES", "8"))
"""More of them find more."""
TEXTS = st.text(st.sampled_from("ab東 \x00"), min_size=1, max_size=5)
ENDS = st.sampled_from([ReplyStatus.DONE, ReplyStatus.STOPPED, ReplyStatus.LENGTH, ReplyStatus.FAILED])


@dataclass
class ExpectedMessage:
    """A message in the model of the store."""

    parent: str | None
    text: str
    status: ReplyStatus | None = None
    tokens: list[int] = field(default_factory=list)


class TreeMachine(RuleBasedStateMachine):
    ids = Bundle("ids")

    def __init__(self, place: StoreLocation) -> None:
        super().__init__()
        self.place = place
        self.store: Store = place.open()
        self.store.replies.interrupt_orphans()  # those of the run before
        self.lease: Lease = self.store.leases.open()
        self.expected: dict[str, ExpectedMessage] = {}
        self.journal: list[str | None] = []
        self.position = -1
        self.deleted = False
        self.head: str | None = None

    def teardown(self) -> None:
        self.store.close()

    @initialize(target=ids)
    def begin(self) -> str | None:
        self.id = new_conversation(self.store).id
        return None

    @precondition(lambda self: not self.deleted)
    @rule(target=ids, parent=ids, text=TEXTS)
    def append(self, parent: str | None, text: str) -> str:
        stored = self.store.messages.append(self.id, parent, user(text), key=f"key {len(self.expected)}")
        again = self.store.messages.append(self.id, parent, user(text), key=f"key {len(self.expected)}")
        assert again == stored
        return self._added(stored.id, ExpectedMessage(parent, text), expected_head=parent)

    @precondition(lambda self: not self.deleted)
    @rule(target=ids, old=ids, text=TEXTS)
    def edit(self, old: str | None, text: str) -> Any:
        if old is None:
            return multiple()
        stored = self.store.messages.edit(old, (Text(text),))
        return self._added(stored.id, ExpectedMessage(self.expected[old].parent, text), expected_head=old)

    @precondition(lambda self: not self.deleted)
    @rule(target=ids, parent=ids)
    def start(self, parent: str | None) -> str:
        stored = self.store.replies.start(self.lease, self.id, parent, SETTINGS)
        return self._added(stored.id, ExpectedMessage(parent, "", ReplyStatus.RUNNING), expected_head=parent)

    def _added(self, id: str, message: ExpectedMessage, expected_head: str | None) -> str:
        self.expected[id] = message
        if self.head == expected_head:
            self.head = id
        return id

    @rule(count=st.integers(1, 3))
    def frame(self, count: int) -> None:
        """Tokens for every running reply, in one transaction."""
        pieces = []
        for id, expected in self.expected.items():
            if expected.status is ReplyStatus.RUNNING:
                start = len(expected.tokens)
                expected.tokens += range(start, start + count)
                pieces.append(TokenFrame(id, start, steps(*expected.tokens[start:])))
        assert self.store.replies.append(self.lease, pieces) == frozenset()

    @precondition(lambda self: not self.deleted)
    @rule(id=ids, status=ENDS, text=TEXTS)
    def finish(self, id: str | None, status: ReplyStatus, text: str) -> None:
        if id is not None and self.expected[id].status is ReplyStatus.RUNNING:
            self.store.replies.finish(self.lease, id, ReplyEnding(status, (Text(text),)))
            self.expected[id].status, self.expected[id].text = status, text

    @precondition(lambda self: not self.deleted)
    @rule(id=ids)
    def resume(self, id: str | None) -> None:
        if id is None:
            return
        expected = self.expected[id]
        below = any(other.parent == id for other in self.expected.values())
        try:
            self.store.replies.resume(self.lease, id)
        except NotFound:
            assert expected.status is None
        except NothingToContinue:
            assert expected.status is ReplyStatus.DONE
        except Conflict:
            assert expected.status is ReplyStatus.RUNNING or below
        else:
            assert not below
            expected.status = ReplyStatus.RUNNING

    @rule(take_over=st.booleans())
    def crash(self, take_over: bool) -> None:
        """The process dies in the middle of a transaction, and another begins."""
        self.place = _reopen_after_kill(self.place, self.store, self.id)
        self.store = self.place.open()
        self.lease = self.store.leases.open()
        running = {id for id, expected in self.expected.items() if expected.status is ReplyStatus.RUNNING}
        if take_over:
            assert set(self.store.replies.claim_orphans(self.lease)) == running
            return
        assert set(self.store.replies.interrupt_orphans()) == running
        for id in running:
            self.expected[id].status = ReplyStatus.INTERRUPTED

    @precondition(lambda self: not self.deleted)
    @rule(to=ids)
    def move(self, to: str | None) -> None:
        if self.position < 0:
            self.journal, self.position = [self.head], 0
        if self.journal[self.position] != to:
            self.journal = [*self.journal[: self.position + 1], to]
            self.position += 1
        assert self.store.cursors.move(self.id, "tab", to).message_id == to

    @precondition(lambda self: not self.deleted)
    @rule(direction=st.sampled_from([-1, 1]))
    def undo_or_redo(self, direction: int) -> None:
        step = self.store.cursors.undo if direction < 0 else self.store.cursors.redo
        try:
            found = step(self.id, "tab").message_id
        except Conflict:
            assert self.position < 0 or not 0 <= self.position + direction < len(self.journal)
        else:
            self.position += direction
            assert found == self.journal[self.position]

    @precondition(lambda self: not self.deleted)
    @rule(expected=ids, to=ids)
    def move_head(self, expected: str | None, to: str | None) -> None:
        try:
            self.store.conversations.move_head(self.id, expected, to)
        except Conflict:
            assert self.head not in (expected, to)
        else:
            assert self.head in (expected, to)
            self.head = to

    @rule()
    def delete_or_undelete(self) -> None:
        change = self.store.conversations.undelete if self.deleted else self.store.conversations.delete
        change(self.id)
        self.deleted = not self.deleted

    @invariant()
    def the_tree_is_the_models(self) -> None:
        if not hasattr(self, "id") or self.deleted:
            return
        everything = self.store.messages.all(self.id)
        assert [(stored.id, stored.parent_id) for stored in everything] == [
            (id, expected.parent) for id, expected in self.expected.items()
        ]
        for stored in everything:
            expected = self.expected[stored.id]
            assert stored.text == expected.text
            assert (stored.reply.status if stored.reply else None) is expected.status
            assert list(self.store.replies.token_ids(stored.id)) == expected.tokens
        assert self.store.conversations.get(self.id).head_id == self.head
        if everything:
            self._check_path(everything[-1].id)

    def _check_path(self, leaf: str) -> None:
        path, ancestor = [], leaf
        while ancestor is not None:
            path.append(ancestor)
            ancestor = self.expected[ancestor].parent  # type: ignore[assignment]
        assert [stored.id for stored in self.store.messages.path(leaf)] == path[::-1]


def _reopen_after_kill(place: StoreLocation, store: Store, id: str) -> StoreLocation:
    """The store as found when nothing was closed, rolled back or released."""
    with suppress(StoreError, _Killed), store.database.write_transaction() as connection:
        connection.execute(update(conversations).values(title="half done"))
        tree.insert_row(connection, tree.TreeMessage(id, None, Role.USER, (Text("never acknowledged"),)))
        if place.database is None:
            folder = Path(tempfile.mkdtemp(dir=place.folder.parent))
            place = StoreLocation(Path(shutil.copytree(place.folder, folder, dirs_exist_ok=True)), None)
        else:
            _kill_connections(place.database)
        raise _Killed
    store.close()
    return place


class _Killed(Exception):
    pass


def _kill_connections(database: URL) -> None:
    engine = create_engine(database.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
    with engine.connect() as connection:
        connection.execute(text(kill + "pg_backend_pid()"))
    engine.dispose()


def test_the_store_matches_the_model_under_random_operations(place: StoreLocation) -> None:
    plan = settings(
        max_examples=EXAMPLES,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )

    class Here(TreeMachine):
        def __init__(self) -> None:
            super().__init__(place)

    run_state_machine_as_test(Here, settings=plan)
