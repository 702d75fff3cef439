"""Conversations are readable by their owner alone, whatever the umask is and whichever version made the files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from palaver.messages import Image, Message, Role
from palaver.store import Store, open_store
from palaver.store.backup import backup, restore
from palaver.store.store import data_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="NOTHING IS SHOWN HERE: permissions are those of POSIX")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def fill(store: Store) -> None:
    conversation = store.conversations.create(store.users.ensure().id)
    store.messages.append(conversation.id, None, Message(Role.USER, (Image("image/png", b"picture"),)))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def check(folder: Path) -> None:
    assert mode(folder) == 0o700
    found = list(folder.rglob("*"))
    assert {"palaver.db", "palaver.db-wal", "palaver.db-shm"} <= {path.name for path in found}
    for path in found:
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_new_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "data") as store:
        fill(store)
        check(tmp_path / "data")


def test_a_store_that_was_made_with_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with open_store(folder) as store:
        fill(store)
    for name in ("palaver.zip", "palaver.log", "palaver.db-wal"):
        (folder / name).touch()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with open_store(folder) as store:
        fill(store)
        check(folder)


def test_a_database_elsewhere(tmp_path: Path) -> None:
    with open_store(tmp_path / "data", f"sqlite:///{tmp_path}/other.db"):
        for name in ("other.db", "other.db-wal", "other.db-shm"):
            assert mode(tmp_path / name) == 0o600


def test_a_backup_and_what_is_restored_from_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "data") as store:
        fill(store)
        backup(store, tmp_path / "kept.zip")
    assert mode(tmp_path / "kept.zip") == 0o600
    restore(tmp_path / "kept.zip", tmp_path / "again")
    with open_store(tmp_path / "again"):
        check(tmp_path / "again")


def test_a_folder_that_is_shared_stays_shared(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    assert mode(data_folder(shared)) == 0o1777


def test_another_process_sees_what_is_written_after_its_visit(tmp_path: Path) -> None:
    """SQLite's locks are those of the process: closing the file anywhere in it would release them all."""
    with open_store(tmp_path) as store, ThreadPoolExecutor(4) as threads:
        owner_id = store.users.ensure().id
        list(threads.map(lambda _: store.conversations.ids(owner_id), range(16)))  # connections in every thread
        for count in range(1, 4):
            store.conversations.create(owner_id)
            list(threads.map(lambda _: store.conversations.ids(owner_id), range(16)))
            assert visit(tmp_path) == count


def visit(folder: Path) -> int:
    """Counts the conversations in another process, which opens the store and closes it."""
    program = (
        "import sys; from pathlib import Path; from palaver.store import open_store\n"
        "with open_store(Path(sys.argv[1])) as store: print(len(store.conversations.ids(store.users.ensure().id)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout)
