"""Who holds the replies that run, and how one knows that a holder is dead.

A holder on this machine keeps a file locked for as long as its process lives: the kernel lets go of it at the very
moment of death, however it came. A holder elsewhere is known by the time until which it has renewed its lease.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, delete, insert, select, update

from palaver.store.blobs import private_opener
from palaver.store.database import Database, Durability
from palaver.store.errors import LeaseLost, translated
from palaver.store.records import current_time, new_id
from palaver.store.schema import holders, running

try:
    import fcntl
except ImportError:  # not on Windows: there a lease's time alone tells
    fcntl = None  # type: ignore[assignment]

SECONDS = 30.0
"""For how long a lease holds without being renewed. Renew it three times as often."""


class Lease:
    """A process's right to write the replies it holds, until it is closed or the process dies."""

    def __init__(self, id: str, database: Database, file: IO[bytes] | None, seconds: float) -> None:
        self.id = id
        self._database = database
        self._file = file
        self._seconds = seconds

    def renew(self) -> bool:
        """False: it ran out, and another process has taken over everything."""
        change = update(holders).where(holders.c.id == self.id).values(expires_at=_until(self._seconds))
        with self._database.writing(Durability.NORMAL) as connection:
            return connection.execute(change).rowcount == 1

    def close(self) -> None:
        """Lets go; replies that still run can be taken over at once."""
        with self._database.writing() as connection:
            connection.execute(update(holders).where(holders.c.id == self.id).values(expires_at=0))
            _drop_idle(connection, [self.id])
        if self._file is not None:
            Path(self._file.name).unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """What the kernel does when the process dies: from now on the holder counts as dead."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Leases:
    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._opened: list[Lease] = []

    def open(self, seconds: float = SECONDS) -> Lease:
        id = new_id()
        with translated():
            file = self._locked(id)
        lease = Lease(id, self._database, file, seconds)
        values = {"id": id, "host": _host(), "started_at": current_time(), "expires_at": _until(seconds)}
        try:
            with self._database.writing() as connection:
                connection.execute(insert(holders).values(values))
        except BaseException:
            lease.let_go()
            self._path(id).unlink(missing_ok=True)
            raise
        self._opened.append(lease)
        return lease

    def let_go(self) -> None:
        """Leases that nobody has closed are left to be taken over."""
        while self._opened:
            self._opened.pop().let_go()

    def dead(self, connection: Connection) -> list[str]:
        """The holders that will never write again."""
        return [row.id for row in connection.execute(select(holders)) if not self._alive(row)]

    def bury(self, connection: Connection, ids: list[str]) -> None:
        """Forgets dead holders that hold nothing any more."""
        _drop_idle(connection, ids)
        for id in ids:
            self._path(id).unlink(missing_ok=True)

    def _alive(self, row: Any) -> bool:
        if row.expires_at == 0:
            return False
        if fcntl is not None and row.host == _host() and self._path(row.id).exists():
            return _is_locked(self._path(row.id))
        return bool(row.expires_at > current_time())

    def _locked(self, id: str) -> IO[bytes] | None:
        if fcntl is None:
            return None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(self._path(id), "wb", opener=private_opener)  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.lock"


def check_lease(connection: Connection, lease: Lease) -> None:
    """LeaseLost where another process has taken it over; nobody does so until the transaction ends."""
    query = select(holders.c.id).where(holders.c.id == lease.id).with_for_update(read=True)
    if connection.execute(query).first() is None:
        raise LeaseLost


def hold_lease(connection: Connection, holder: str) -> Iterator[str]:
    yield from connection.execute(select(running.c.message_id).where(running.c.holder_id == holder)).scalars()


def _drop_idle(connection: Connection, ids: list[str]) -> None:
    busy = select(running.c.holder_id)
    connection.execute(delete(holders).where(holders.c.id.in_(ids), holders.c.id.not_in(busy)))


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _host() -> str:
    return socket.gethostname()


def _until(seconds: float) -> int:
    return current_time() + int(seconds * 1e6)
