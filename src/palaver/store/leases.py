"""Leases: which process holds the running replies, and whether it is still alive.

A holder on this machine keeps a file locked while its process lives: the kernel releases the lock when the process
dies. A holder on another machine is alive until its lease expires, by the clock of the database: the clocks of the
machines may differ.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, delete, insert, select, update

from palaver.store.blobs import private_opener
from palaver.store.database import Database
from palaver.store.errors import LeaseLost, translate_errors
from palaver.store.notifications import Notifications
from palaver.store.records import current_time, new_id
from palaver.store.schema import holders, running

try:
    import fcntl
except ImportError:  # Windows: only the expiry time is used
    fcntl = None  # type: ignore[assignment]

LEASE_SECONDS = 30.0
"""Lifetime of a lease without renewal. Renew it three times as often."""


class Lease:
    """The right of a process to write the replies it holds, until the lease is closed or the process dies."""

    def __init__(self, id: str, database: Database, file: IO[bytes] | None, seconds: float) -> None:
        self.id = id
        self._database = database
        self._file = file
        self._seconds = seconds

    def renew(self) -> bool:
        """Returns False if the lease expired and another process claimed its replies."""
        expiry = self._database.now() + _microseconds(self._seconds)
        change = update(holders).where(holders.c.id == self.id).values(expires_at=expiry)
        with self._database.write_statement() as connection:
            return connection.execute(change).rowcount == 1

    def close(self) -> None:
        """Ends the lease: its running replies can be claimed at once."""
        with self._database.write_transaction() as connection:
            connection.execute(update(holders).where(holders.c.id == self.id).values(expires_at=0))
            _delete_idle(connection, [self.id])
        if self._file is not None:
            Path(self._file.name).unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Releases the file lock, as the kernel does when the process dies: the holder counts as dead."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Leases:
    def __init__(self, database: Database, folder: Path, notifications: Notifications) -> None:
        self._database = database
        self._folder = folder
        self._notifications = notifications
        self._leases: list[Lease] = []

    def open(self, seconds: float = LEASE_SECONDS) -> Lease:
        id = new_id()
        with translate_errors():
            file = self._create_lock_file(id)
        lease = Lease(id, self._database, file, seconds)
        values = {
            "id": id,
            "host": _host(),
            "started_at": current_time(),
            "expires_at": self._database.now() + _microseconds(seconds),
            "address": self._notifications.address,
        }
        try:
            with self._database.write_transaction() as connection:
                connection.execute(insert(holders).values(values))
        except BaseException:
            lease.release()
            self._path(id).unlink(missing_ok=True)
            raise
        self._leases.append(lease)
        return lease

    def release(self) -> None:
        """Releases every lease that was not closed, so that its replies can be claimed."""
        while self._leases:
            self._leases.pop().release()

    def dead_holders(self, connection: Connection) -> list[str]:
        """The ids of holders whose process is dead or whose lease expired."""
        query = select(holders, self._database.now().label("now"))
        return [row.id for row in connection.execute(query) if not self._is_alive(row)]

    def delete_holders(self, connection: Connection, ids: list[str]) -> None:
        """Deletes dead holders that hold no replies, and their lock files."""
        _delete_idle(connection, ids)
        left = set(connection.execute(select(holders.c.id).where(holders.c.id.in_(ids))).scalars())
        for id in ids:
            if id not in left:
                self._path(id).unlink(missing_ok=True)

    def _is_alive(self, row: Any) -> bool:
        if row.expires_at == 0:
            return False
        if fcntl is not None and row.host == _host() and self._path(row.id).exists():
            return _is_locked(self._path(row.id))
        return bool(row.expires_at > row.now)

    def _create_lock_file(self, id: str) -> IO[bytes] | None:
        if fcntl is None:
            return None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(self._path(id), "wb", opener=private_opener)  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.lock"


def check_lease(connection: Connection, lease: Lease) -> None:
    """Raises LeaseLost if another process claimed the lease. Locks its row until the transaction ends."""
    query = select(holders.c.id).where(holders.c.id == lease.id).with_for_update(read=True)
    if connection.execute(query).first() is None:
        raise LeaseLost


def running_reply_ids(connection: Connection, holder: str) -> Iterator[str]:
    """The running replies that this holder holds."""
    yield from connection.execute(select(running.c.message_id).where(running.c.holder_id == holder)).scalars()


def _delete_idle(connection: Connection, ids: list[str]) -> None:
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


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
