"""What the store refuses or fails at, and the one place where a database's own errors become ours."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from palaver.errors import PalaverError, RequestError


class StoreError(PalaverError):
    """The store could not do what it should have done; nothing was half-written."""


class NotFound(RequestError):
    """There is no such thing, or it is not yours, or it was deleted."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"There is no {kind} {id!r}.")
        self.kind = kind
        self.id = id


class Ambiguous(RequestError):
    """The beginning of an id that is the beginning of several."""

    def __init__(self, kind: str, beginning: str, ids: Sequence[str]) -> None:
        super().__init__(f"Several {kind} begin with {beginning!r} ({', '.join(ids)}): write more of the id.")


class Conflict(RequestError):
    """Somebody else changed it first, or the same key was used for something different."""


class NotEmpty(RequestError):
    """A place that must be empty before something is restored into it."""


class BadBackup(RequestError):
    """A file that is no backup of ours, or one that was damaged."""


class Unstorable(RequestError):
    """A name or an id with characters that no database holds."""

    def __init__(self, why: object) -> None:
        super().__init__(f"A value can't be stored or looked for: {why}.")


class DiskFull(StoreError):
    def __init__(self) -> None:
        super().__init__("There is no room left on the disk: nothing was changed. Make room and do it again.")


class Locked(StoreError):
    def __init__(self) -> None:
        super().__init__("Another program is holding the database: nothing was changed. Try again in a moment.")


class Unreachable(StoreError):
    """The database can't be opened or does not answer.

    The driver's own words are in `__cause__` alone: they tell its address, and this text is shown to clients.
    """


class Damaged(StoreError):
    """The database's file, or a blob, is not what was written."""


class NewerSchema(StoreError):
    def __init__(self, revision: str) -> None:
        super().__init__(f"The database was written by a newer Palaver (its schema is {revision!r}): update Palaver.")


class LeaseLost(StoreError):
    """The reply, or the whole lease where none is named, belongs to somebody else now: stop writing."""

    def __init__(self, reply: str | None = None) -> None:
        what = "This process's lease" if reply is None else f"The reply {reply!r}"
        super().__init__(f"{what} was taken over by another process: nothing was changed.")
        self.reply = reply


_POSTGRES = {
    "53100": DiskFull,
    "55P03": Locked,  # lock_not_available
    "57014": Locked,  # cancelled by a timeout
    "40P01": Locked,  # deadlock
    "40001": Locked,  # serialisation failure
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def translated() -> Iterator[None]:
    """Inside, an error of the database or of the file system is raised as one of the above."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _of_database(error) from error
    except UnicodeEncodeError as error:
        raise Unstorable(error) from error
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull from error
        raise


def _of_database(error: SQLAlchemyError) -> PalaverError:
    if not isinstance(error, DBAPIError):
        return StoreError(f"The database failed: {_first_line(error)}")
    origin = error.orig
    if isinstance(origin, sqlite3.Error):
        return _of_sqlite(error, origin)
    if isinstance(error, DataError):
        return Unstorable(_first_line(origin))
    state = getattr(origin, "sqlstate", None)
    if state in _POSTGRES:
        return _POSTGRES[state]()
    if isinstance(error, IntegrityError):
        return Conflict(f"The database refused the change: {_first_line(origin)}")
    if state is None or state.startswith(("08", "57P", "28", "3D")):
        return Unreachable("The database does not answer.")
    return StoreError(f"The database failed: {_first_line(origin)}")


def _of_sqlite(error: DBAPIError, origin: sqlite3.Error) -> PalaverError:
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
        case sqlite3.SQLITE_IOERR if code in _SHORT_WRITES:
            return DiskFull()
    if isinstance(error, IntegrityError):
        return Conflict(f"The database refused the change: {origin}")
    return StoreError(f"The database failed: {origin}")


_SHORT_WRITES = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE)
"""What SQLite says of a disk that fills up while the write-ahead log or its index grows."""


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
