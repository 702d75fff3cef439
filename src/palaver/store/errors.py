"""The store's errors, and the translation of database and file system errors into them."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)

from palaver.errors import PalaverError, RequestError


class StoreError(PalaverError):
    """The store failed. Nothing was partly written."""


class NotFound(RequestError):
    """The object does not exist, belongs to another user, or was deleted."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"There is no {kind} {id!r}.")
        self.kind = kind
        self.id = id


class Ambiguous(RequestError):
    """An id prefix that matches several objects."""

    def __init__(self, kind: str, prefix: str, ids: Sequence[str]) -> None:
        super().__init__(f"Several {kind} begin with {prefix!r} ({', '.join(ids)}): type more of the ID.")


class Conflict(RequestError):
    """Another client changed the object first, or the idempotency key was used for something else."""


class TokenCountMismatch(Conflict):
    """Running replies have other token counts than their writer expects. `counts` are the stored ones, by reply."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__(f"Replies have other numbers of tokens than expected: {dict(counts)}.")
        self.counts = counts


class NotEmpty(RequestError):
    """The target of a restore or a backup is not empty."""


class BadBackup(RequestError):
    """The file is no backup of Palaver's, or it is damaged."""


class Unstorable(RequestError):
    """A name or an id with characters that databases cannot store."""

    def __init__(self, why: object) -> None:
        super().__init__(f"This value can't be stored: {why}.")


class DiskFull(StoreError):
    def __init__(self) -> None:
        super().__init__("The disk is full. Nothing was changed: free some space and try again.")


class Locked(StoreError):
    def __init__(self) -> None:
        super().__init__("Another program is using the database. Nothing was changed: try again in a moment.")


class Unreachable(StoreError):
    """The database cannot be opened or does not answer.

    The driver's message is only in `__cause__`: it contains the database's address, and this text is shown to clients.
    """


class Disconnected(Unreachable):
    """The connection to the database server was lost or refused, as while it restarts: try again.

    A transaction whose commit was sent may be committed.
    """


class StorageDisconnected(Unreachable):
    """The storage of the media did not answer: try again."""


class StorageNotFound(Unreachable):
    """The bucket of the media does not exist."""

    def __init__(self) -> None:
        super().__init__("The bucket of the media does not exist: create it, or correct PALAVER_BLOBS.")


class Damaged(StoreError):
    """The database file or a blob is corrupt."""


class NewerSchema(StoreError):
    def __init__(self, revision: str) -> None:
        super().__init__(f"A newer version of Palaver wrote the database (schema {revision!r}): update Palaver.")


class LeaseLost(StoreError):
    """Another process claimed the reply, or the whole lease if no reply is named: stop writing."""

    def __init__(self, reply: str | None = None) -> None:
        what = "This process's lease" if reply is None else f"The reply {reply!r}"
        super().__init__(f"{what} was taken over by another process: nothing was changed.")
        self.reply = reply


_POSTGRES_STATES = {
    "53100": DiskFull,
    "55P03": Locked,  # lock_not_available
    "57014": Locked,  # cancelled by a timeout
    "40P01": Locked,  # deadlock
    "40001": Locked,  # serialisation failure
}
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raises database and file system errors of the block as errors of this module."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _translate(error) from error
    except UnicodeEncodeError as error:
        raise Unstorable(error) from error
    except OSError as error:
        if error.errno in _DISK_FULL_ERRNOS:
            raise DiskFull from error
        raise


def _translate(error: SQLAlchemyError) -> PalaverError:
    if not isinstance(error, DBAPIError):
        return StoreError(f"The database failed: {_first_line(error)}")
    origin = error.orig
    if isinstance(origin, sqlite3.Error):
        return _translate_sqlite(error, origin)
    if isinstance(error, DataError):
        return Unstorable(_first_line(origin))
    state = getattr(origin, "sqlstate", None)
    if state in _POSTGRES_STATES:
        return _POSTGRES_STATES[state]()
    if isinstance(error, IntegrityError):
        return Conflict(f"The database refused the change: {_first_line(origin)}")
    if isinstance(error, InterfaceError | OperationalError) and (state is None or state.startswith(("08", "57P"))):
        return Disconnected("The database does not answer.")
    if state is None or state.startswith(("28", "3D")):
        return Unreachable("The database does not answer.")
    return StoreError(f"The database failed: {_first_line(origin)}")


def _translate_sqlite(error: DBAPIError, origin: sqlite3.Error) -> PalaverError:
    code = getattr(origin, "sqlite_errorcode", 0)
    match code & 0xFF:
        case sqlite3.SQLITE_FULL:
            return DiskFull()
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Locked()
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return Damaged(f"The database is damaged ({origin}): restore a backup.")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY:
            return Unreachable(f"The database can't be opened for writing: {origin}.")
        case sqlite3.SQLITE_IOERR if code in _SHORT_WRITE_CODES:
            return DiskFull()
    if isinstance(error, IntegrityError):
        return Conflict(f"The database refused the change: {origin}")
    return StoreError(f"The database failed: {origin}")


_SHORT_WRITE_CODES = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE)
"""SQLite's codes for a disk that fills up while the write-ahead log or its index grows."""


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
