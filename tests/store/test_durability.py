"""Durability on a simulated disk under SQLite: power loss after any write, a full disk, a failed sync."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import pytest

from palaver.messages import Image, Message, Role, Text
from palaver.store import DiskFull, ReplyEnding, ReplyStatus, Store, StoreError, TokenFrame, database, open_store
from palaver.store.database import _SQLITE_SYNCHRONOUS, Durability
from tests.store.factories import SETTINGS, add_message, new_conversation, steps
from tests.store.faulty_disk import Disk, DiskOperation, after_power_loss, can_intercept, intercept

pytestmark = pytest.mark.skipif(
    not can_intercept(), reason="!!! NOT TESTED: this Python hides its SQLite, so that no layer can be put under it"
)
CUTS = 60


@dataclass
class RecordedRun:
    """The disk operations of a run, and after which of them each message or token was acknowledged."""

    operations: list[DiskOperation] = field(default_factory=list)
    messages: list[tuple[int, str]] = field(default_factory=list)
    tokens: list[tuple[int, str, int]] = field(default_factory=list)
    endings: list[tuple[int, str]] = field(default_factory=list)
    conversation: str = ""


def _record_run(folder: Path, syncs_endings: bool = True) -> RecordedRun:
    run = RecordedRun()
    with intercept(folder) as disk, open_store(folder) as store, pytest.MonkeyPatch.context() as patch:
        sync = partial(_sync_log, disk) if syncs_endings else lambda path: None
        patch.setattr(database, "_sync_log", sync)
        run.operations = disk.operations
        run.conversation = new_conversation(store).id
        lease = store.leases.open()
        parent = None
        for turn in range(6):
            question = add_message(store, run.conversation, parent, f"question {turn} " + "words " * 400 * (turn % 2))
            run.messages.append((len(disk.operations), question.id))
            reply = store.replies.start(lease, run.conversation, question.id, SETTINGS)
            run.messages.append((len(disk.operations), reply.id))
            for place in range(10):
                store.replies.append(lease, [TokenFrame(reply.id, place, steps(place))])
                run.tokens.append((len(disk.operations), reply.id, place + 1))
            store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("answer"),)))
            run.endings.append((len(disk.operations), reply.id))
            if turn % 2:
                _checkpoint(store)
            parent = reply.id
        run.operations = list(disk.operations)
    return run


def _sync_log(disk: Disk, path: Path) -> None:
    assert disk.sync(path.name, sync_folder=False) == 0


def _checkpoint(store: Store) -> None:
    """What SQLite does by itself after a thousand pages."""
    with closing(sqlite3.connect(store.database.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(RESTART)")


def _open_files(folder: Path, files: dict[str, bytes]) -> Store:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return open_store(folder)


def _missing_messages(run: RecordedRun, cut: int, store: Store) -> list[str]:
    """Acknowledged messages that are missing or have lost their ending. The stored ones must be intact."""
    with store.database.read_transaction() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        stored_ids = set(connection.exec_driver_sql("SELECT id FROM messages").scalars())
    for _, reply, _ in run.tokens:
        if reply in stored_ids:
            ids = store.replies.token_ids(reply)
            assert ids == tuple(range(len(ids)))
    missing = [id for place, id in run.messages if place <= cut and id not in stored_ids]
    ended = [id for place, id in run.endings if place <= cut and id in stored_ids]
    return missing + [id for id in ended if store.messages.get(id).text != "answer"]


def _power_cuts(run: RecordedRun, rng: Random) -> list[int]:
    """Random positions, and those just after each acknowledgement."""
    acknowledged = [place for place, _ in run.messages]
    return sorted({*acknowledged, *(rng.randrange(len(run.operations) + 1) for _ in range(CUTS - len(acknowledged)))})


def test_all_files_lie_in_the_simulated_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = tmp_path / "store"
    with intercept(folder), open_store(folder) as store:
        new_conversation(store)
        names = {path.name for path in folder.iterdir()}
        assert {"palaver.db", "palaver.db-wal", "palaver.db-shm"} <= names
        assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_acknowledged_writes_survive_a_power_cut_at_any_write(tmp_path: Path) -> None:
    run = _record_run(tmp_path / "store")
    checkpoints = sum(one.kind == "sync" and one.name == "palaver.db" for one in run.operations)
    assert checkpoints >= 3, "the main file was written too, not only the log"
    rng = Random(5)
    for cut in _power_cuts(run, rng):
        with _open_files(tmp_path / f"cut{cut}", after_power_loss(run.operations[:cut], rng)) as store:
            assert _missing_messages(run, cut, store) == [], f"after write {cut} of {len(run.operations)}"


def test_the_test_would_notice_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_SQLITE_SYNCHRONOUS, Durability.FULL, "NORMAL")
    run = _record_run(tmp_path / "store")
    rng = Random(5)
    lost = 0
    for cut in [place for place, _ in run.messages]:
        with _open_files(tmp_path / f"cut{cut}", after_power_loss(run.operations[:cut], rng)) as store:
            lost += len(_missing_messages(run, cut, store))
    assert lost > 0


def test_the_test_would_notice_an_ending_that_is_not_synced(tmp_path: Path) -> None:
    run = _record_run(tmp_path / "store", syncs_endings=False)
    rng = Random(5)
    lost = 0
    for cut in [place for place, _ in run.endings]:
        with _open_files(tmp_path / f"cut{cut}", after_power_loss(run.operations[:cut], rng)) as store:
            lost += len(_missing_messages(run, cut, store))
    assert lost > 0


def test_user_messages_are_synced_and_tokens_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order, with the files of media in it: blob, its name, its folder, then the message that names it."""
    folder = tmp_path / "store"
    with intercept(folder) as disk, open_store(folder) as store:
        made = new_conversation(store)
        lease = store.leases.open()
        reply = store.replies.start(lease, made.id, None, SETTINGS)
        monkeypatch.setattr(os, "fsync", _record_fsync(disk, os.fsync))
        monkeypatch.setattr(Path, "replace", _record_rename(disk, Path.replace))
        first = len(disk.operations)
        store.messages.append(made.id, None, Message(Role.USER, (Text("x"), Image("image/png", b"picture"))))
        message = _operation_order(disk.operations[first:])
        first = len(disk.operations)
        for place in range(20):
            store.replies.append(lease, [TokenFrame(reply.id, place, steps(place))])
        tokens = _operation_order(disk.operations[first:])
    assert message == ["sync folder", "sync folder", "sync blob", "name blob", "sync folder", "write wal", "sync wal"]
    assert tokens == ["write wal"], "in the file, whatever happens to the program; on the disk a little later"


def _record_fsync(disk: Disk, fsync: Callable[[int], None]) -> Callable[[int], None]:
    def recording_fsync(handle: int) -> None:
        fsync(handle)
        disk.operations.append(DiskOperation("sync", "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "blob"))

    return recording_fsync


def _record_rename(disk: Disk, replace: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    def recording_replace(path: Path, to: Path) -> Path:
        disk.operations.append(DiskOperation("name", "blob"))
        return replace(path, to)

    return recording_replace


def _operation_order(operations: list[DiskOperation]) -> list[str]:
    """The operations by name, consecutive writes as one."""
    names = [f"{one.kind} {one.name.removeprefix('palaver.db-')}" for one in operations]
    again = ("write" in name and names[place - 1 : place] == [name] for place, name in enumerate(names))
    return [name for name, repeated in zip(names, again, strict=True) if not repeated]


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[Disk, Store]]:
    with intercept(tmp_path / "store") as disk, open_store(tmp_path / "store") as store:
        yield disk, store
        with store.database.read_transaction() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


def test_a_disk_that_is_full_from_any_write_on(on_disk: tuple[Disk, Store]) -> None:
    disk, store = on_disk
    id = new_conversation(store).id
    lease = store.leases.open()
    ids = [add_message(store, id, None, "0").id]
    reply = store.replies.start(lease, id, ids[0], SETTINGS)
    tokens, failures = 0, 0
    for writes_left in range(40):
        disk.writes_left = writes_left
        try:
            ids.append(add_message(store, id, ids[-1], f"message {writes_left}").id)
        except DiskFull:
            failures += 1
        disk.writes_left = min(writes_left, 3)
        try:
            store.replies.append(lease, [TokenFrame(reply.id, tokens, steps(tokens))])
            tokens += 1
        except DiskFull:
            failures += 1
        assert [message.id for message in store.messages.path(ids[-1])] == ids, "intact, and can be read"
        assert store.replies.token_ids(reply.id) == tuple(range(tokens))
        disk.writes_left = None
        ids.append(add_message(store, id, ids[-1], "there is room again").id)
        store.replies.append(lease, [TokenFrame(reply.id, tokens, steps(tokens))])
        tokens += 1
    assert failures >= 20
    assert len(store.messages.nodes(id)) == len(ids) + 1, "nothing is there that was refused"


def test_a_write_that_is_not_synced_is_not_acknowledged(on_disk: tuple[Disk, Store]) -> None:
    disk, store = on_disk
    id = new_conversation(store).id
    first = add_message(store, id, None, "1")
    disk.fail_sync = True
    with pytest.raises(StoreError, match="database failed"):
        add_message(store, id, first.id, "2")
    disk.fail_sync = False
    assert [node.id for node in store.messages.nodes(id)] == [first.id]
    assert add_message(store, id, first.id, "2 again").parent_id == first.id


def test_others_write_while_an_ending_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def write_elsewhere(path: Path) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(add_message, store, id, None, "meanwhile").result()
        synced.append(path.name)

    with open_store(tmp_path) as store:
        id = new_conversation(store).id
        lease = store.leases.open()
        reply = store.replies.start(lease, id, None, SETTINGS)
        monkeypatch.setattr(database, "_sync_log", write_elsewhere)
        store.replies.end(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("answer"),)))
        assert synced == ["palaver.db-wal"]
        assert len(store.messages.nodes(id)) == 2


def test_an_ending_that_is_not_synced_is_not_acknowledged_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with open_store(tmp_path) as store:
        lease = store.leases.open()
        reply = store.replies.start(lease, new_conversation(store).id, None, SETTINGS)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, fail, raising=False)
        with pytest.raises(StoreError, match="database failed"):
            store.replies.end(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("answer"),)))
        monkeypatch.undo()
        assert store.messages.get(reply.id).text == "answer"
