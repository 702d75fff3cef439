"""The database: how it is opened, and the two ways to touch it, reading and writing.

The store is synchronous and safe to call from any thread; async layers call it in a thread. Every call takes a
connection from the pool for one transaction. SQLite has one writer at a time: the writers of this process queue at
a lock of their own, so that only another process's transaction is ever waited for in the database."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

from sqlalchemy import URL, BigInteger, Connection, Dialect, Engine, Integer, Text, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.types import TypeDecorator

from palaver.errors import BadParameter
from palaver.store.blobs import restrict
from palaver.store.errors import Unreachable, translated


class Durability(Enum):
    """What a commit survives. Both survive the death of the program."""

    FULL = "full"
    """A power cut too: what was acknowledged to a person."""
    NORMAL = "normal"
    """A power cut may take the last moments: tokens of a running reply."""


_SQLITE_LEVEL = {Durability.FULL: "FULL", Durability.NORMAL: "NORMAL"}
_POSTGRES_LEVEL = {Durability.FULL: "on", Durability.NORMAL: "off"}


class _Writers:
    """SQLite's writers in this process, one at a time.

    While one of them waits for another program's lock, so do all behind it: that time counts for each of them.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._waited = 0.0
        self._since: float | None = None

    @property
    def waited(self) -> float:
        """For how many seconds in all another program was waited for."""
        since = self._since
        return self._waited + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what may wait for another program; only the writer whose turn it is."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            waited, self._since = self.waited, None
            self._waited = waited


class Database:
    def __init__(self, url: str | URL, wait: float = 5.0) -> None:
        """`wait`: for how many seconds another program's lock is waited for."""
        self.url = _checked(url)
        self._wait = wait
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._writers = _Writers()
        self.engine = self._sqlite() if self.is_sqlite else self._postgres()

    @property
    def path(self) -> Path:
        """SQLite's file."""
        assert self.url.database is not None
        return Path(self.url.database)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view."""
        with translated(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self, durability: Durability = Durability.FULL) -> Iterator[Connection]:
        """One transaction: committed as a whole when the block ends, rolled back when it raises."""
        with self._writing_sqlite(durability) if self.is_sqlite else self._writing_postgres(durability) as connection:
            yield connection

    @contextmanager
    def _writing_sqlite(self, durability: Durability) -> Iterator[Connection]:
        before = self._writers.waited
        with translated(), self._writers.turn, self.engine.connect() as connection:
            _set_level(connection, durability)
            left = max(0.0, self._wait - (self._writers.waited - before))
            connection = connection.execution_options(palaver_wait=left)
            with connection.begin():
                yield connection

    @contextmanager
    def _writing_postgres(self, durability: Durability) -> Iterator[Connection]:
        with translated(), self.engine.connect() as connection, connection.begin():
            connection.execute(text(f"SET LOCAL synchronous_commit = {_POSTGRES_LEVEL[durability]}"))
            yield connection

    def close(self) -> None:
        self.engine.dispose()

    def _sqlite(self) -> Engine:
        engine = create_engine(self.url, connect_args={"timeout": self._wait, "check_same_thread": False})
        event.listen(engine, "do_connect", lambda *_: _restrict_sqlite(self.path))
        event.listen(engine, "connect", lambda connection, _: _prepare_sqlite(connection, self._wait))
        event.listen(engine, "begin", self._begin_sqlite)
        return engine

    def _begin_sqlite(self, connection: Connection) -> None:
        """A writer waits for another program's lock, for as long as it has not waited for it in the queue."""
        left = connection.get_execution_options().get("palaver_wait")
        if left is None:
            connection.exec_driver_sql("BEGIN")
            return
        shorter = left < self._wait - 0.01
        with self._writers.waiting():
            if shorter:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(left * 1000)}")
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            finally:
                if shorter:
                    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(self._wait * 1000)}")

    def _postgres(self) -> Engine:
        milliseconds = int(self._wait * 1000)
        options = f"-c lock_timeout={milliseconds} -c timezone=UTC"
        try:
            return create_engine(self.url, connect_args={"options": options}, pool_pre_ping=True)
        except ModuleNotFoundError:
            raise Unreachable("PostgreSQL needs its driver: pip install 'palaver[postgres]'.") from None


def _checked(url: str | URL) -> URL:
    try:
        made = make_url(url)
    except ArgumentError:
        raise BadParameter("database", "...", "is no URL: write postgresql://user@host/name") from None
    shown = made.render_as_string()  # without the password
    if made.get_backend_name() == "postgresql":
        return made.set(drivername="postgresql+psycopg")
    if made.get_backend_name() == "sqlite":
        if not made.database or made.database == ":memory:":
            raise BadParameter("database", shown, "must name a file")
        return made
    raise BadParameter("database", shown, "must begin with sqlite:/// or postgresql://")


def _restrict_sqlite(path: Path) -> None:
    """SQLite gives its log and index the permissions of the file."""
    with suppress(OSError):  # SQLite says better what is wrong with the place
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        for suffix in ("", "-wal", "-shm"):
            restrict(path.with_name(path.name + suffix))


def _prepare_sqlite(connection: sqlite3.Connection, wait: float) -> None:
    connection.isolation_level = None  # the driver would begin and commit on its own
    _turn_to_wal(connection, wait)
    for pragma in ("foreign_keys = ON", "synchronous = FULL", "cache_size = -16000"):
        connection.execute(f"PRAGMA {pragma}").close()


def _turn_to_wal(connection: sqlite3.Connection, wait: float) -> None:
    """SQLite itself doesn't wait where two programs do this to a new file at once, but says that it is locked."""
    until = time.monotonic() + wait
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() >= until:
                raise
        time.sleep(0.01)


def _set_level(connection: Connection, durability: Durability) -> None:
    """Outside a transaction, where SQLite takes it; each connection remembers what it was set to."""
    level = _SQLITE_LEVEL[durability]
    if connection.info.get("synchronous", "FULL") == level:
        return
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute(f"PRAGMA synchronous = {level}").close()
    connection.info["synchronous"] = level


Number = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit whole number; SQLite counts a key up only when it is called INTEGER."""


class JsonColumn(TypeDecorator[Any]):
    """A value as JSON text. Any string survives, NUL and lone surrogates too."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def json_text(value: Any) -> str:
    """Readable where it can be, escaped where a database could not hold it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text
