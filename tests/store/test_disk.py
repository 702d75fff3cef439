"""What the disk may do to the store: lose power, fill up, refuse. Seen from below SQLite, write by write."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from palaver.messages import Image, Message, Role, Text
from palaver.store import DiskFull, ReplyEnding, ReplyStatus, Store, StoreError, TokenFrame, open_store
from palaver.store.database import _SQLITE_LEVEL, Durability
from tests.store.disk import Disk, Done, after_power_loss, reachable, watched
from tests.store.making import SETTINGS, conversation, said, steps

pytestmark = pytest.mark.skipif(
    not reachable(), reason="!!! NOT TESTED: this Python hides its SQLite, so that no layer can be put under it"
)
CUTS = 60


@dataclass
class Recorded:
    """A run of the store on a watched disk, and after which of its writes something was acknowledged."""

    done: list[Done] = field(default_factory=list)
    messages: list[tuple[int, str]] = field(default_factory=list)
    tokens: list[tuple[int, str, int]] = field(default_factory=list)
    conversation: str = ""


def _recorded(folder: Path) -> Recorded:
    run = Recorded()
    with watched(folder) as disk, open_store(folder) as store:
        run.done = disk.done
        run.conversation = conversation(store).id
        lease = store.leases.open()
        parent = None
        for turn in range(6):
            question = said(store, run.conversation, parent, f"question {turn} " + "words " * 400 * (turn % 2))
            run.messages.append((len(disk.done), question.id))
            reply = store.replies.start(lease, run.conversation, question.id, SETTINGS)
            run.messages.append((len(disk.done), reply.id))
            for place in range(10):
                store.replies.append(lease, [TokenFrame(reply.id, place, steps(place))])
                run.tokens.append((len(disk.done), reply.id, place + 1))
            store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("answer"),)))
            if turn % 2:
                _checkpoint(store)
            parent = reply.id
        run.done = list(disk.done)
    return run


def _checkpoint(store: Store) -> None:
    """What SQLite does by itself after a thousand pages."""
    with closing(sqlite3.connect(store.database.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(RESTART)")


def _found(folder: Path, files: dict[str, bytes]) -> Store:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return open_store(folder)


def _lost(run: Recorded, cut: int, store: Store) -> list[str]:
    """Acknowledged messages that are not there; what is there must be whole."""
    with store.database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        there = set(connection.exec_driver_sql("SELECT id FROM messages").scalars())
    for _, reply, _ in run.tokens:
        if reply in there:
            ids = store.replies.token_ids(reply)
            assert ids == tuple(range(len(ids)))
    return [id for place, id in run.messages if place <= cut and id not in there]


def _cuts(run: Recorded, chance: Random) -> list[int]:
    """At random places, and just after each acknowledgement."""
    told = [place for place, _ in run.messages]
    return sorted({*told, *(chance.randrange(len(run.done) + 1) for _ in range(CUTS - len(told)))})


@pytest.mark.slow
def test_whatever_was_acknowledged_is_there_after_a_power_cut_at_any_write(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "store")
    checkpoints = sum(one.what == "sync" and one.name == "palaver.db" for one in run.done)
    assert checkpoints >= 3, "the main file was written too, not only the log"
    chance = Random(5)
    for cut in _cuts(run, chance):
        with _found(tmp_path / f"cut{cut}", after_power_loss(run.done[:cut], chance)) as store:
            assert _lost(run, cut, store) == [], f"after write {cut} of {len(run.done)}"


def test_the_test_would_notice_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_SQLITE_LEVEL, Durability.FULL, "NORMAL")
    run = _recorded(tmp_path / "store")
    chance = Random(5)
    lost = 0
    for cut in [place for place, _ in run.messages]:
        with _found(tmp_path / f"cut{cut}", after_power_loss(run.done[:cut], chance)) as store:
            lost += len(_lost(run, cut, store))
    assert lost > 0


def test_a_persons_words_are_synced_and_tokens_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order, with the files of media in it: blob, its name, its folder, then the message that names it."""
    folder = tmp_path / "store"
    with watched(folder) as disk, open_store(folder) as store:
        made = conversation(store)
        lease = store.leases.open()
        reply = store.replies.start(lease, made.id, None, SETTINGS)
        monkeypatch.setattr(os, "fsync", _noting(disk, os.fsync))
        monkeypatch.setattr(Path, "replace", _naming(disk, Path.replace))
        begun = len(disk.done)
        store.messages.append(made.id, None, Message(Role.USER, (Text("x"), Image("image/png", b"picture"))))
        message = _order(disk.done[begun:])
        begun = len(disk.done)
        for place in range(20):
            store.replies.append(lease, [TokenFrame(reply.id, place, steps(place))])
        tokens = _order(disk.done[begun:])
    assert message == ["sync folder", "sync folder", "sync blob", "name blob", "sync folder", "write wal", "sync wal"]
    assert tokens == ["write wal"], "in the file, whatever happens to the program; on the disk a little later"


def _noting(disk: Disk, fsync: Callable[[int], None]) -> Callable[[int], None]:
    def noted(handle: int) -> None:
        fsync(handle)
        disk.done.append(Done("sync", "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "blob"))

    return noted


def _naming(disk: Disk, replace: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    def named(path: Path, to: Path) -> Path:
        disk.done.append(Done("name", "blob"))
        return replace(path, to)

    return named


def _order(done: list[Done]) -> list[str]:
    """What happened, several writes in a row as one."""
    names = [f"{one.what} {one.name.removeprefix('palaver.db-')}" for one in done]
    again = ("write" in name and names[place - 1 : place] == [name] for place, name in enumerate(names))
    return [name for name, repeated in zip(names, again, strict=True) if not repeated]


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[Disk, Store]]:
    with watched(tmp_path / "store") as disk, open_store(tmp_path / "store") as store:
        yield disk, store
        with store.database.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


def test_a_disk_that_is_full_from_any_write_on(on_disk: tuple[Disk, Store]) -> None:
    disk, store = on_disk
    id = conversation(store).id
    lease = store.leases.open()
    kept = [said(store, id, None, "0").id]
    reply = store.replies.start(lease, id, kept[0], SETTINGS)
    tokens, refused = 0, 0
    for room in range(40):
        disk.room = room
        try:
            kept.append(said(store, id, kept[-1], f"message {room}").id)
        except DiskFull:
            refused += 1
        disk.room = min(room, 3)
        try:
            store.replies.append(lease, [TokenFrame(reply.id, tokens, steps(tokens))])
            tokens += 1
        except DiskFull:
            refused += 1
        assert [message.id for message in store.messages.path(kept[-1])] == kept, "intact, and can be read"
        assert store.replies.token_ids(reply.id) == tuple(range(tokens))
        disk.room = None
        kept.append(said(store, id, kept[-1], "there is room again").id)
        store.replies.append(lease, [TokenFrame(reply.id, tokens, steps(tokens))])
        tokens += 1
    assert refused >= 20
    assert len(store.messages.nodes(id)) == len(kept) + 1, "nothing is there that was refused"


def test_a_disk_that_refuses_to_sync_acknowledges_nothing(on_disk: tuple[Disk, Store]) -> None:
    disk, store = on_disk
    id = conversation(store).id
    first = said(store, id, None, "1")
    disk.refuses_to_sync = True
    with pytest.raises(StoreError, match="database failed"):
        said(store, id, first.id, "2")
    disk.refuses_to_sync = False
    assert store.messages.children(id, first.id) == ()
    assert said(store, id, first.id, "2 again").parent_id == first.id
