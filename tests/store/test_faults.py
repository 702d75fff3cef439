"""A full disk, a locked database, damage: a clear error, nothing half-written, and work goes on afterwards."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, event, select, text

from palaver.store import (
    Conflict,
    DiskFull,
    Lease,
    Locked,
    NotFound,
    ReplyEnding,
    ReplyStatus,
    Store,
    TokenFrame,
    open_store,
)
from palaver.store.blobs import Blobs
from palaver.store.database import Durability
from palaver.store.errors import Damaged, StoreError, Unreachable, Unstorable, translate_errors
from palaver.store.schema import running
from tests.store.conftest import StoreLocation, run_sql
from tests.store.factories import SETTINGS, add_message, new_conversation, steps
from tests.store.postgres import server_account


@pytest.fixture
def small_disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real file system with little room; not below a folder that only root may enter."""
    size = getattr(request, "param", "1m")
    folder = Path(tempfile.mkdtemp(prefix="palaver-small-"))
    folder.chmod(0o755)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a small file system can't be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def test_a_full_disk_is_an_error_and_the_conversation_goes_on_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with open_store(small_disk / "store") as store:
        id = new_conversation(store).id
        lease = store.leases.open()
        reply = store.replies.start(lease, id, None, SETTINGS)
        ids = [add_message(store, id, None, "first").id]
        _fill_disk(ballast)
        with pytest.raises(DiskFull, match="disk is full"):
            _append_messages(store, id, ids)
        with pytest.raises(DiskFull):
            _append_tokens(store, lease, reply.id)
        with pytest.raises(DiskFull):
            store.blobs.put(b"y" * 600_000)
        assert [path.name for path in store.blobs.folder.rglob("*.*")] == [], "no half a file is left"
        assert [message.id for message in store.messages.path(ids[-1])] == ids
        tokens = store.replies.token_ids(reply.id)
        assert tokens == tuple(range(len(tokens)))
        ballast.unlink()
        after = add_message(store, id, ids[-1], "there is room again")
        store.replies.append(lease, [TokenFrame(reply.id, len(tokens), steps(1))])
        assert len(store.messages.path(after.id)) == len(ids) + 1
    assert _integrity(small_disk / "store" / "palaver.db") == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", ["12m"], indirect=True)
def test_a_full_disk_under_postgresql(small_disk: Path, tmp_path: Path, prepared_postgres: URL) -> None:
    """The tables of this database are on a small file system, its log is not."""
    if account := server_account():
        shutil.chown(small_disk, account)
    run_sql(prepared_postgres, f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    run_sql(prepared_postgres, "CREATE DATABASE small TEMPLATE prepared TABLESPACE small")
    url = prepared_postgres.set(database="small")
    try:
        with open_store(tmp_path / "store", url) as store:
            id = new_conversation(store).id
            ids = [add_message(store, id, None, "first").id]
            with pytest.raises(DiskFull, match="disk is full"):
                _append_messages(store, id, ids)
            assert [message.id for message in store.messages.path(ids[-1])] == ids
            subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
            after = add_message(store, id, ids[-1], "there is room again")
            assert len(store.messages.path(after.id)) == len(ids) + 1 == len(store.messages.nodes(id))
    finally:
        run_sql(prepared_postgres, "DROP DATABASE small WITH (FORCE)")
        run_sql(prepared_postgres, "DROP TABLESPACE small")


def _append_messages(store: Store, id: str, ids: list[str]) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        ids.append(add_message(store, id, ids[-1], rng.randbytes(10_000).hex()).id)


def _append_tokens(store: Store, lease: Lease, id: str) -> None:
    for start in range(0, 100_000, 1000):
        store.replies.append(lease, [TokenFrame(id, start, steps(*range(start, start + 1000)))])


def _fill_disk(ballast: Path) -> None:
    size = 1 << 16
    with ballast.open("wb", buffering=0) as file:
        while size:
            try:
                file.write(b"0" * size)
            except OSError:
                size //= 2


def _integrity(path: Path) -> str:
    connection = sqlite3.connect(path)
    found: str = connection.execute("PRAGMA integrity_check").fetchone()[0]
    connection.close()
    return found


def test_a_locked_database_is_waited_for_then_reported(place: StoreLocation) -> None:
    with place.open(lock_timeout=0.2) as store:
        id = new_conversation(store).id
        first = add_message(store, id, None, "1")
        with _Locked(store):
            start = time.monotonic()
            with pytest.raises(Locked, match="Another program"):
                add_message(store, id, first.id, "2")
            assert time.monotonic() - start > 0.15
            assert len(store.messages.path(first.id)) == 1, "reading goes on meanwhile"
        assert add_message(store, id, first.id, "2").parent_id == first.id


def test_a_lock_is_waited_for_as_long_by_all_writers_of_a_process(tmp_path: Path) -> None:
    """They queue for one writer's turn: each waits as long as one alone, not for those before it too."""
    count, wait = 16, 1.0
    with open_store(tmp_path, lock_timeout=wait) as store:
        id = new_conversation(store).id
        first = add_message(store, id, None, "1")
        seconds: list[float] = []

        def write(number: int) -> None:
            start = time.monotonic()
            with pytest.raises(Locked):
                add_message(store, id, first.id, str(number))
            seconds.append(time.monotonic() - start)

        with _Locked(store):
            start = time.monotonic()
            writers = [threading.Thread(target=write, args=(number,)) for number in range(count)]
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join()
            assert time.monotonic() - start < wait * count / 2
            assert len(seconds) == count
            assert min(seconds) > 0.9 * wait
        assert add_message(store, id, first.id, "2").parent_id == first.id


def test_tokens_can_be_written_again_after_a_lock(place: StoreLocation) -> None:
    with place.open(lock_timeout=0.2) as store:
        lease = store.leases.open()
        reply = store.replies.start(lease, new_conversation(store).id, None, SETTINGS)
        with _Locked(store, "running"), pytest.raises(Locked):
            store.replies.append(lease, [TokenFrame(reply.id, 0, steps(0, 1))])
        assert store.replies.token_ids(reply.id) == ()
        store.replies.append(lease, [TokenFrame(reply.id, 0, steps(0, 1))])
        assert store.replies.token_ids(reply.id) == (0, 1)


def test_tokens_and_the_end_of_a_reply_wait_for_no_other_reply(place: StoreLocation) -> None:
    if place.database is None:
        pytest.skip("SQLite has one writer at a time")
    with place.open(lock_timeout=0.2) as store, place.open() as other:
        lease = store.leases.open()
        ids = [store.replies.start(lease, new_conversation(store).id, None, SETTINGS).id for _ in range(3)]
        with other.database.write_transaction() as connection:
            connection.execute(select(running).where(running.c.message_id == ids[0]).with_for_update())
            store.replies.append(lease, [TokenFrame(ids[1], 0, steps(1))])
            store.replies.finish(lease, ids[1], ReplyEnding(ReplyStatus.DONE, ()))
            store.replies.record_answer_at(lease, ids[2], 0)
            with pytest.raises(Locked):
                store.replies.append(lease, [TokenFrame(id, 0, steps(1)) for id in (ids[0], ids[2])])
        assert store.replies.token_ids(ids[2]) == ()


def test_a_connection_that_the_server_closed_is_replaced(place: StoreLocation) -> None:
    if place.database is None:
        pytest.skip("SQLite has no server")
    with place.open() as store:
        id = new_conversation(store).id
        message = add_message(store, id, None, "before")
        _terminate_connections(place.database)
        assert store.messages.get(message.id).text == "before"
        assert add_message(store, id, message.id, "after").text == "after"


def test_a_connection_that_is_given_back_after_the_end_is_closed(place: StoreLocation) -> None:
    with place.open() as store:
        reading = store.database.snapshot()
        driver = reading.__enter__().connection.driver_connection
    assert driver is not None
    driver.execute("SELECT 1").close()
    reading.__exit__(None, None, None)
    with pytest.raises(Exception, match="closed"):
        driver.execute("SELECT 1")


def _terminate_connections(database: URL) -> None:
    engine = create_engine(database.set(drivername="postgresql+psycopg", database="postgres"))
    connections = f"FROM pg_stat_activity WHERE datname = '{database.database}'"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while connection.execute(text(f"SELECT pg_terminate_backend(pid) {connections}")).all():
            time.sleep(0.01)
    engine.dispose()


class _Locked:
    """Another program's transaction; SQLite's is on everything."""

    def __init__(self, store: Store, table: str = "conversations") -> None:
        self._engine = create_engine(store.database.url)
        if store.database.is_sqlite:
            event.listen(self._engine, "connect", lambda one, _: setattr(one, "isolation_level", None))
        self._statement = "BEGIN IMMEDIATE" if store.database.is_sqlite else f"LOCK TABLE {table} IN EXCLUSIVE MODE"

    def __enter__(self) -> None:
        self._connection = self._engine.connect()
        self._connection.execute(text(self._statement))

    def __exit__(self, *_: object) -> None:
        self._connection.invalidate()
        self._connection.close()
        self._engine.dispose()


def test_a_short_lock_is_not_noticed(place: StoreLocation) -> None:
    with place.open(lock_timeout=5) as store:
        id = new_conversation(store).id
        lock = _Locked(store)
        lock.__enter__()
        threading.Timer(0.3, lock.__exit__).start()
        assert add_message(store, id, None, "waited").text == "waited"
        time.sleep(0.1)


def test_an_error_inside_a_transaction_rolls_it_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_conversation(store)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("palaver.store.tree.index", fail)
    with pytest.raises(DiskFull):
        add_message(store, made.id, None, "half")
    monkeypatch.undo()
    assert store.messages.nodes(made.id) == ()
    assert store.conversations.get(made.id) == made


def test_damage_is_reported(tmp_path: Path) -> None:
    tmp_path.joinpath("palaver.db").write_bytes(b"this is no database, " * 100)
    with pytest.raises(Damaged, match="backup"):
        open_store(tmp_path)
    blobs = Blobs(tmp_path / "blobs")
    digest = blobs.put(b"picture")
    blobs.path(digest).write_bytes(b"pixture")
    with pytest.raises(Damaged):
        blobs.get(digest)
    with pytest.raises(NotFound):
        blobs.get("0" * 64)


def test_an_unreachable_server_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        open_store(tmp_path, f"postgresql://nobody@/none?host={tmp_path}")
    with pytest.raises(StoreError):
        open_store(tmp_path, f"sqlite:///{tmp_path}/no/such/folder/x.db")


def test_ids_that_cannot_be_stored_are_refused(store: Store) -> None:
    for odd in ("\x00", "\ud800"):
        with pytest.raises((NotFound, Unstorable)):
            store.messages.get(odd)


def test_other_errors_are_not_translated() -> None:
    with pytest.raises(FileNotFoundError), translate_errors():
        raise FileNotFoundError(2, "not there")
    with pytest.raises(Conflict), translate_errors():
        raise Conflict("ours")


def test_user_messages_are_synced_and_tokens_are_not(tmp_path: Path) -> None:
    """The order of writes and syncs, as the kernel saw it."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    calls = _trace_syscalls(tmp_path)
    message = _between(calls, "MESSAGE")
    assert [name for name in message if name.startswith("sync")] == ["sync blob", "sync folder", "sync wal"]
    assert message.index("sync blob") < message.index("rename") < message.index("sync folder")
    assert message.index("sync folder") < message.index("write wal") < message.index("sync wal")
    assert message[-1] == "sync wal", "acknowledged only when it is on the disk"
    tokens = _between(calls, "TOKENS")
    assert "write wal" in tokens, "what was published is in the file, whatever happens to the program"
    assert not any(name.startswith("sync") for name in tokens)
    ending = _between(calls, "ENDING")
    assert [name for name in ending if name.startswith("sync")] == ["sync wal"]
    assert ending[-1] == "sync wal", "acknowledged only when it is on the disk"


_TRACED_PROGRAM = """
import hashlib, os, sys
from pathlib import Path
from palaver.messages import *
from palaver.store import *
from tests.store.factories import *
store = open_store(Path(sys.argv[1]))
made = new_conversation(store)
lease = store.leases.open()
reply = store.replies.start(lease, made.id, None, SETTINGS)
store.blobs.put(b"warm"), store.replies.append(lease, [TokenFrame(reply.id, 0, steps(0))])
picture = b"picture"
store.blobs.path(hashlib.sha256(picture).hexdigest()).parent.mkdir(parents=True, exist_ok=True)
os.write(2, b"MESSAGE\\n")
store.messages.append(made.id, None, Message(Role.USER, (Text("x"), Image("image/png", picture))))
os.write(2, b"MESSAGE\\n")
os.write(2, b"TOKENS\\n")
for place in range(1, 20):
    store.replies.append(lease, [TokenFrame(reply.id, place, steps(place))])
os.write(2, b"TOKENS\\n")
os.write(2, b"ENDING\\n")
store.replies.end(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("x"),)))
os.write(2, b"ENDING\\n")
"""


def _trace_syscalls(folder: Path) -> list[str]:
    """Writes, renames and syncs of a small program, by what they were done to."""
    log = folder / "trace"
    root = Path(__file__).parents[2]
    subprocess.run(
        ["strace", "-f", "-y", "-o", log, "-e", "trace=write,pwrite64,fsync,fdatasync,rename,renameat,renameat2",
         sys.executable, "-c", _TRACED_PROGRAM, folder / "store"],
        check=True, capture_output=True, env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return [name for line in log.read_text().splitlines() if (name := _classify(line))]


def _classify(line: str) -> str:
    for mark in ("MESSAGE", "TOKENS", "ENDING"):
        if f'"{mark}' in line:
            return mark
    target = "wal" if "-wal>" in line else "blob" if "/blobs/" in line and "/." in line else "folder"
    if "sync(" in line:
        return f"sync {target}"
    if "rename" in line:
        return "rename"
    return f"write {target}"


def _between(calls: list[str], mark: str) -> list[str]:
    first = calls.index(mark)
    return calls[first + 1 : calls.index(mark, first + 1)]


def test_every_commit_has_the_requested_durability(store: Store) -> None:
    if not store.database.is_sqlite:
        with store.database.write_transaction(Durability.NORMAL) as connection:
            assert connection.execute(text("SHOW synchronous_commit")).scalar() == "off"
        for durability in (Durability.FULL, Durability.SYNCED_AFTER, Durability.SERVER):
            with store.database.write_transaction(durability) as connection:
                assert connection.execute(text("SHOW synchronous_commit")).scalar() == "on"
        with store.database.write_statement() as connection:
            assert connection.execute(text("SHOW synchronous_commit")).scalar() == "off"
        return
    levels = {Durability.NORMAL: 1, Durability.FULL: 2, Durability.SYNCED_AFTER: 1, Durability.SERVER: 1}
    for durability, level in (*levels.items(), *levels.items()):
        with store.database.write_transaction(durability) as connection:
            assert connection.execute(text("PRAGMA synchronous")).scalar() == level
            assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
            assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
