"""The database connection: read and write transactions on SQLite or PostgreSQL.

The store is synchronous and thread-safe; async layers call it in a thread. Every call takes a connection from the pool
for one transaction. SQLite has one writer at a time: the writers of this process queue at a lock of their own, so that
SQLite's own lock is only ever contended by other processes."""

from __future__ import annotations

import json
import logging
import os
import selectors
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import (
    URL,
    BigInteger,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Integer,
    Table,
    Text,
    cast,
    create_engine,
    event,
    extract,
    func,
    literal,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DisconnectionError, OperationalError, SQLAlchemyError
from sqlalchemy.types import TypeDecorator

from palaver.errors import BadParameter
from palaver.store.blobs import restrict
from palaver.store.errors import StoreError, Unreachable, translate_errors

_log = logging.getLogger(__name__)


class Durability(Enum):
    """What a commit survives. All levels survive the death of the process."""

    FULL = "full"
    """Survives a power cut: everything that was acknowledged to a user."""
    SYNCED_AFTER = "synced after"
    """Survives a power cut too. SQLite waits for the disk after the commit, while others write; if that fails, the call
    raises and the write stays: for writes that may be repeated."""
    SERVER = "server"
    """Survives the death of the database server. A power cut may lose the last moments: that a reply goes on. Nothing
    waits for the disk on SQLite, which has no server."""
    NORMAL = "normal"
    """A power cut may lose the last moments: tokens of a running reply."""


_SQLITE_SYNCHRONOUS = {
    Durability.FULL: "FULL",
    Durability.SYNCED_AFTER: "NORMAL",
    Durability.SERVER: "NORMAL",
    Durability.NORMAL: "NORMAL",
}

CONNECT_SECONDS = 10
"""How long PostgreSQL may take to accept a connection."""
SILENCE_SECONDS = 20
"""How long the machine of PostgreSQL may leave data unacknowledged before its connections count as lost."""
_ASYNCHRONOUS = text("SET LOCAL synchronous_commit = off")
LOCK_POLL_SECONDS = 0.001
"""How often a writer looks whether another process has released SQLite's lock."""
CHECKPOINT_COMMITS = 200
"""After so many commits SQLite's log is copied into its file."""
MAX_LOG_PAGES = 20_000
"""SQLite copies its log itself, during a commit, if it has as many pages."""
POOL_SIZE = 10
"""Connections to PostgreSQL that stay open, of each of the two kinds. The one that was used last is used next: it has
tables and statements ready at the server."""


class _WriterQueue:
    """Serialises SQLite's writers in this process.

    While the writer at the front waits for another process's lock, all writers behind it wait too. That time counts
    towards the lock timeout of each of them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._blocked_seconds = 0.0
        self._blocked_since: float | None = None

    @property
    def blocked_seconds(self) -> float:
        """The total time spent waiting for other processes."""
        since = self._blocked_since
        return self._blocked_seconds + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Measures a statement that may wait for another process. Only the writer that holds the lock may enter."""
        self._blocked_since = time.monotonic()
        try:
            yield
        finally:
            total, self._blocked_since = self.blocked_seconds, None
            self._blocked_seconds = total


class _Checkpointer:
    """Copies SQLite's log into its file, in a thread: during a commit it would hold up all writers for a while."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commits = 0
        self._thread: threading.Thread | None = None

    def count_commit(self) -> None:
        """Call with the lock of the writers."""
        self._commits += 1
        if self._commits >= CHECKPOINT_COMMITS and (self._thread is None or not self._thread.is_alive()):
            self._commits = 0
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        """A full disk or a reader in its way leaves the log as it is, for the next time."""
        with suppress(SQLAlchemyError, sqlite3.Error), self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.execute("PRAGMA wal_checkpoint(PASSIVE)").close()


class Database:
    def __init__(self, url: str | URL, lock_timeout: float = 5.0) -> None:
        """`lock_timeout`: seconds to wait for a lock of another process."""
        self.url = _parse_url(url)
        self._lock_timeout = lock_timeout
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._writers = _WriterQueue()
        self._closed = False
        self.deliver: Callable[[list[str]], None] | None = None
        """Delivers notifications of committed transactions to other processes. See `notifications.py`."""
        self.engine = self._sqlite_engine() if self.is_sqlite else self._postgres_engine("on")
        self._checkpointer = _Checkpointer(self.engine) if self.is_sqlite else None
        self._statements = self.engine if self.is_sqlite else self._postgres_engine("off", "AUTOCOMMIT")
        """Runs statements that are a transaction each: on PostgreSQL they cost one message instead of three."""
        for engine in {self.engine, self._statements}:
            event.listen(engine, "checkin", self._close_late)

    @property
    def path(self) -> Path:
        """SQLite's file."""
        assert self.url.database is not None
        return Path(self.url.database)

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Reads only. On SQLite its statements see one state; on PostgreSQL each sees what is committed before it."""
        with translate_errors(), self._statements.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A read-only transaction whose statements see one state, also on PostgreSQL."""
        with translate_errors(), self.engine.connect() as connection, connection.begin():
            if not self.is_sqlite:
                connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            yield connection

    @contextmanager
    def write_transaction(self, durability: Durability = Durability.FULL) -> Iterator[Connection]:
        """A transaction that commits when the block ends and rolls back when it raises."""
        notifications: list[str] = []
        begin = self._write_sqlite if self.is_sqlite else self._write_postgres
        with begin(durability) as connection:
            connection.info["notifications"] = notifications
            yield connection
        self._deliver(notifications)

    @contextmanager
    def write_statement(self) -> Iterator[Connection]:
        """Commits every statement by itself, with `Durability.NORMAL`: for a block that writes with one statement."""
        if self.is_sqlite:
            with self.write_transaction(Durability.NORMAL) as connection:
                yield connection
            return
        notifications: list[str] = []
        with translate_errors(), self._statements.connect() as connection, connection.begin():
            connection.info["notifications"] = notifications
            yield connection
        self._deliver(notifications)

    @contextmanager
    def _write_sqlite(self, durability: Durability) -> Iterator[Connection]:
        if durability is Durability.SYNCED_AFTER and os.name == "nt":  # SQLite's log can't be opened beside it
            durability = Durability.FULL
        before = self._writers.blocked_seconds
        with translate_errors():
            with self._writers.lock, self.engine.connect() as connection:
                _set_synchronous(connection, durability)
                remaining = max(0.0, self._lock_timeout - (self._writers.blocked_seconds - before))
                connection = connection.execution_options(palaver_wait=remaining)
                with connection.begin():
                    yield connection
                assert self._checkpointer is not None
                self._checkpointer.count_commit()
            if durability is Durability.SYNCED_AFTER:
                _sync_log(self.path.with_name(f"{self.path.name}-wal"))

    @contextmanager
    def _write_postgres(self, durability: Durability) -> Iterator[Connection]:
        with translate_errors(), self.engine.connect() as connection, connection.begin():
            if durability is Durability.NORMAL:
                connection.execute(_ASYNCHRONOUS)
            yield connection

    def now(self) -> ColumnElement[int]:
        """Microseconds since 1970 by the database's clock, which all processes share. SQLite's is this machine's."""
        if self.is_sqlite:
            return literal(time.time_ns() // 1000, BigInteger)
        return cast(extract("epoch", func.clock_timestamp()) * 1_000_000, BigInteger)

    def contains(self, column: ColumnElement[str], part: str) -> ColumnElement[bool]:
        """Whether a column's text has this part, in upper or lower case. SQLite's own `lower` knows ASCII alone."""
        if self.is_sqlite:
            return func.casefold(column).contains(part.casefold(), autoescape=True)
        return column.icontains(part, autoescape=True)

    def insert_new(self, connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
        """Inserts a row unless there is one with the same key."""
        insert = sqlite.insert if self.is_sqlite else postgresql.insert
        connection.execute(insert(table).values(values).on_conflict_do_nothing())

    def notify(self, connection: Connection, payload: str) -> None:
        """Notifies all processes once the write of this connection is committed."""
        connection.info["notifications"].append(payload)

    def _deliver(self, payloads: list[str]) -> None:
        if not payloads or self.deliver is None:
            return
        try:
            self.deliver(payloads)
        except StoreError as error:  # what they tell of is committed
            _log.warning("other processes were not notified: %s", error)

    def close(self) -> None:
        self._closed = True
        if self._checkpointer is not None:
            self._checkpointer.close()
        self.engine.dispose()
        self._statements.dispose()

    def _sqlite_engine(self) -> Engine:
        engine = create_engine(self.url, connect_args={"timeout": self._lock_timeout, "check_same_thread": False})
        event.listen(engine, "do_connect", lambda *_: _restrict_sqlite(self.path))
        event.listen(engine, "connect", lambda connection, _: _prepare_sqlite(connection, self._lock_timeout))
        event.listen(engine, "begin", self._begin_sqlite)
        return engine

    def _begin_sqlite(self, connection: Connection) -> None:
        """Writers wait for another process's lock for the rest of their lock timeout after queueing."""
        remaining = connection.get_execution_options().get("palaver_wait")
        if remaining is None:
            connection.exec_driver_sql("BEGIN")
            return
        connection.exec_driver_sql("PRAGMA busy_timeout = 0")
        try:
            with self._writers.blocked():
                _begin_immediate(connection, remaining)
        finally:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(self._lock_timeout * 1000)}")

    def _postgres_engine(self, synchronous_commit: str, isolation: Literal["AUTOCOMMIT"] | None = None) -> Engine:
        milliseconds = int(self._lock_timeout * 1000)
        settings = f"-c lock_timeout={milliseconds} -c timezone=UTC -c synchronous_commit={synchronous_commit}"
        options = {
            "options": settings,
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": SILENCE_SECONDS * 1000,
        }
        more = {} if isolation is None else {"isolation_level": isolation}
        try:
            engine = create_engine(self.url, connect_args=options, pool_size=POOL_SIZE, pool_use_lifo=True, **more)
        except ModuleNotFoundError:
            raise Unreachable("PostgreSQL needs its driver: pip install 'palaver[postgres]'.") from None
        event.listen(engine, "checkout", _check_connected)
        return engine

    def _close_late(self, connection: Any, *_: object) -> None:
        """A connection that another thread gives back after `close` stays open in the old pool, which nothing closes
        again. `connection`: None where it failed."""
        if self._closed and connection is not None:
            connection.close()


def _check_connected(connection: Any, *_: object) -> None:
    """Raises DisconnectionError, upon which the pool connects again, if the server has closed the connection meanwhile.

    An idle connection has nothing to read but the server's farewell: that costs no message to the server.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        if selector.select(0):
            raise DisconnectionError


def _parse_url(url: str | URL) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise BadParameter("database", "...", "is no URL: write postgresql://user@host/name") from None
    redacted = parsed.render_as_string()  # without the password
    if parsed.get_backend_name() == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise BadParameter("database", redacted, "must name a file")
        return parsed
    raise BadParameter("database", redacted, "must begin with sqlite:/// or postgresql://")


def _restrict_sqlite(path: Path) -> None:
    """SQLite gives its log and index the permissions of the file.

    A file that exists is never opened here: closing it would drop the locks of all connections of this process, and
    another process would then remove the log under them.
    """
    with suppress(OSError):  # SQLite's own error is clearer
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        for suffix in ("", "-wal", "-shm"):
            restrict(path.with_name(path.name + suffix))


def _prepare_sqlite(connection: sqlite3.Connection, lock_timeout: float) -> None:
    connection.isolation_level = None  # the driver would begin and commit on its own
    connection.create_function("casefold", 1, str.casefold, deterministic=True)
    _enable_wal(connection, lock_timeout)
    log = f"wal_autocheckpoint = {MAX_LOG_PAGES}"
    for pragma in ("foreign_keys = ON", "synchronous = FULL", "cache_size = -16000", log):
        connection.execute(f"PRAGMA {pragma}").close()


def _enable_wal(connection: sqlite3.Connection, lock_timeout: float) -> None:
    """SQLite does not wait here when two processes open a new file at once: it fails with SQLITE_BUSY."""
    deadline = time.monotonic() + lock_timeout
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() >= deadline:
                raise
        time.sleep(0.01)


def _begin_immediate(connection: Connection, seconds: float) -> None:
    """Waits that long for the lock of another process. SQLite itself would look for it more and more seldom, up to ten
    times a second, and find it taken again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            return
        except OperationalError as error:
            if not _is_busy(error.orig) or time.monotonic() >= deadline:
                raise
        time.sleep(LOCK_POLL_SECONDS)


def _sync_log(path: Path) -> None:
    """Waits until what was written to SQLite's log is on the disk. SQLite has no lock on it that closing would drop."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # it was copied into the database's file, and that synced
        return
    try:
        getattr(os, "fdatasync", os.fsync)(handle)
    except OSError as error:
        raise StoreError(f"The database failed: {error}") from error
    finally:
        os.close(handle)


def _is_busy(error: object) -> bool:
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _set_synchronous(connection: Connection, durability: Durability) -> None:
    """Must run outside a transaction. The level is cached per connection."""
    level = _SQLITE_SYNCHRONOUS[durability]
    if connection.info.get("synchronous", "FULL") == level:
        return
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute(f"PRAGMA synchronous = {level}").close()
    connection.info["synchronous"] = level


Number = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit integer. SQLite autoincrements only columns of the type INTEGER."""


class JsonColumn(TypeDecorator[Any]):
    """A value as JSON text. Any string round-trips, including NUL and lone surrogates."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def json_text(value: Any) -> str:
    """Unescaped where the database can store it, else ASCII with escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text
