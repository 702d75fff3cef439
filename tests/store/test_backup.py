from __future__ import annotations

import threading
import zipfile
from pathlib import Path

import pytest
from sqlalchemy import URL

from palaver.messages import Image, Message, Role, Text
from palaver.store import NotFound, ReplyStatus, Store, TokenFrame
from palaver.store.backup import backup, restore
from palaver.store.errors import BadBackup, NotEmpty
from palaver.store.store import open_store
from palaver.transcripts import read_conversation
from tests.store.conftest import StoreLocation, fresh_database
from tests.store.factories import SETTINGS, add_message, add_reply, new_conversation, steps


@pytest.fixture
def filled(store: Store) -> str:
    """A conversation with everything, one reply of which is still running."""
    made = new_conversation(store, title="All", tags=["t"], system="S")
    picture = Message(Role.USER, (Text("看 this"), Image("image/png", b"pixels")))
    root = store.messages.append(made.id, None, picture)
    lease = store.leases.open()
    add_reply(store, lease, made.id, root.id, "needle")
    running = store.replies.start(lease, made.id, root.id, SETTINGS)
    store.replies.append(lease, [TokenFrame(running.id, 0, steps(1, 2))])
    store.cursors.move(made.id, "tab", root.id)
    return made.id


def check_same(old: Store, new: Store, id: str) -> None:
    assert read_conversation(new, id) == read_conversation(old, id)
    owner = new.users.get_by_name("local").id
    assert len(new.search.find(owner, "needle")) == 1
    assert len(new.search.find(owner, "看")) == 1
    assert new.cursors.get(id, "tab") == old.cursors.get(id, "tab")
    statuses = []
    for stored in new.messages.all(id):
        assert new.replies.tokens(stored.id) == old.replies.tokens(stored.id)
        statuses += [stored.reply.status] if stored.reply else []
    assert statuses == [ReplyStatus.DONE, ReplyStatus.INTERRUPTED]
    assert add_message(new, id, None, "goes on").id


def test_a_backup_is_restored(store: Store, filled: str, place: StoreLocation, tmp_path: Path) -> None:
    manifest = backup(store, tmp_path / "one.zip")
    assert manifest.blobs == 1
    target = None if place.database is None else fresh_database(place.database.set(database="postgres"))
    restore(tmp_path / "one.zip", tmp_path / "new", target)
    with open_store(tmp_path / "new", target) as new:
        check_same(store, new, filled)
    with pytest.raises(NotEmpty):
        restore(tmp_path / "one.zip", tmp_path / "new", target)
    with pytest.raises(NotEmpty):
        backup(store, tmp_path / "one.zip")


def test_a_backup_goes_from_one_kind_of_database_to_the_other(
    store: Store, filled: str, place: StoreLocation, tmp_path: Path, postgres: URL
) -> None:
    backup(store, tmp_path / "one.zip")
    target = fresh_database(postgres) if place.database is None else None
    restore(tmp_path / "one.zip", tmp_path / "new", target)
    with open_store(tmp_path / "new", target) as new:
        check_same(store, new, filled)


def test_a_backup_under_load_is_consistent(store: Store, tmp_path: Path, place: StoreLocation) -> None:
    id = new_conversation(store).id
    parent = add_message(store, id, None, "0").id
    stop = threading.Event()

    def write() -> None:
        above = parent
        while not stop.is_set():
            above = add_message(store, id, above, "more").id

    writer = threading.Thread(target=write)
    writer.start()
    try:
        backup(store, tmp_path / "one.zip")
    finally:
        stop.set()
        writer.join()
    target = None if place.database is None else fresh_database(place.database.set(database="postgres"))
    restore(tmp_path / "one.zip", tmp_path / "new", target)
    with open_store(tmp_path / "new", target) as new:
        head = new.conversations.get(id).head_id
        assert head is not None
        assert len(new.messages.path(head)) == len(new.messages.nodes(id))


def test_a_damaged_backup_is_refused_and_leaves_nothing(store: Store, filled: str, tmp_path: Path) -> None:
    file = tmp_path / "one.zip"
    backup(store, file)
    whole = file.read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other.zip").write_bytes(b"hello")
    with zipfile.ZipFile(tmp_path / "foreign.zip", "w") as archive:
        archive.writestr("x", "y")
    for name in ("cut", "other", "foreign", "missing"):
        with pytest.raises(BadBackup):
            restore(tmp_path / f"{name}.zip", tmp_path / name)
        assert not (tmp_path / name / "palaver.db").exists()


def test_a_missing_blob_is_reported(store: Store, filled: str, tmp_path: Path) -> None:
    for digest in store.blobs.digests():
        store.blobs.path(digest).unlink()
    with pytest.raises(NotFound, match="blob"):
        backup(store, tmp_path / "one.zip")
    assert list(tmp_path.glob("*.zip*")) == []
