"""A disk that is watched, fills up, fails and loses power: a layer under SQLite, between it and the operating system.

SQLite reaches its files through a table of functions. Here that table is copied and the functions that open, write,
truncate, sync and delete go through Python, for the files of one folder.
"""

from __future__ import annotations

import _sqlite3
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

FULL, FSYNC_FAILED = 13, 1034
"""SQLite's codes for no room, and for a sync that the disk refused."""
_SECTOR = 512


@dataclass(frozen=True, slots=True)
class Done:
    """Something that happened to a file: write, truncate, sync or delete; or to the folder, which has no name: sync."""

    what: str
    name: str
    at: int = 0
    data: bytes = b""


@dataclass
class Disk:
    folder: Path
    done: list[Done] = field(default_factory=list)
    room: int | None = None
    """How many more writes there is room for; None: no end of it."""
    refuses_to_sync: bool = False

    def write(self, name: str, at: int, data: bytes) -> int:
        if self.room is not None:
            if self.room == 0:
                return FULL
            self.room -= 1
        self.done.append(Done("write", name, at, data))
        return 0

    def sync(self, name: str, folder_too: bool) -> int:
        if self.refuses_to_sync:
            return FSYNC_FAILED
        self.done.append(Done("sync", name))
        if folder_too:
            self.done.append(Done("sync", ""))
        return 0

    def truncate(self, name: str, size: int) -> int:
        self.done.append(Done("truncate", name, size))
        return 0

    def delete(self, name: str) -> int:
        self.done.append(Done("delete", name))
        return 0


def after_power_loss(done: Sequence[Done], chance: Random) -> dict[str, bytes]:
    """The files as they may be found: what was synced is there, of what came later any part.

    A file is gone for good when its folder was synced after it was deleted.
    """
    files: dict[str, bytearray] = {}
    synced = {one.name: place for place, one in enumerate(done) if one.what == "sync"}
    for place, one in enumerate(done):
        target = "" if one.what == "delete" else one.name
        if place <= synced.get(target, -1) or chance.random() < 0.5:
            _apply(files, one)
        elif one.what == "write" and chance.random() < 0.3:
            whole = chance.randrange(0, len(one.data) + 1, _SECTOR)
            _apply(files, Done("write", one.name, one.at, one.data[:whole]))
    return {name: bytes(data) for name, data in files.items()}


def _apply(files: dict[str, bytearray], one: Done) -> None:
    if one.what == "delete":
        files.pop(one.name, None)
    if one.what in ("delete", "sync"):
        return
    data = files.setdefault(one.name, bytearray())
    end = one.at + len(one.data)
    if one.what == "truncate":
        del data[one.at :]
        end = one.at
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    data[one.at : one.at + len(one.data)] = one.data


class _Methods(ctypes.Structure):
    """sqlite3_io_methods, the third edition."""

    _fields_ = [
        ("edition", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("truncate", c_void_p),
        ("sync", c_void_p),
        ("others", c_void_p * 13),
    ]


class _File(ctypes.Structure):
    _fields_ = [("methods", POINTER(_Methods))]


class _System(ctypes.Structure):
    """sqlite3_vfs, the third edition."""

    _fields_ = [
        ("edition", c_int),
        ("file_size", c_int),
        ("longest_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", c_void_p),
        ("delete", c_void_p),
        ("others", c_void_p * 14),
    ]


_CREATE, _LOGS = 0x4, 0x800 | 0x4000 | 0x80000
"""How files are opened. With the first sync of a journal or a write-ahead log SQLite syncs their folder too."""
_WRITE = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_char), c_int, c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)
_OPEN = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, POINTER(_File), c_int, c_void_p)
_DELETE = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)


def reachable() -> bool:
    """Whether the SQLite under Python's module can be reached from here; some builds hide it."""
    return hasattr(ctypes.CDLL(_sqlite3.__file__), "sqlite3_vfs_register")


@contextmanager
def watched(folder: Path) -> Iterator[Disk]:
    """Every database that is opened in this folder meanwhile is on the watched disk; close it within."""
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = POINTER(_System)
    own = library.sqlite3_vfs_find(None)
    disk = Disk(folder)
    layer = _Layer(own.contents, disk)
    assert library.sqlite3_vfs_register(ctypes.byref(layer.system), 1) == 0
    try:
        yield disk
    finally:
        library.sqlite3_vfs_register(own, 1)
        library.sqlite3_vfs_unregister(ctypes.byref(layer.system))


class _Layer:
    def __init__(self, own: _System, disk: Disk) -> None:
        self._disk = disk
        self._names: dict[int, str] = {}
        self._new: set[int] = set()
        self._tables: dict[int, _Methods] = {}
        self._open, self._delete = _OPEN(own.open), _DELETE(own.delete)
        self.system = _System.from_buffer_copy(own)
        self.system.name = b"watched"
        self._kept: list[Any] = []  # what C points to must not be collected
        self.system.open = self._pointer(_OPEN(self._opened))
        self.system.delete = self._pointer(_DELETE(self._deleted))

    def _pointer(self, function: Any) -> int | None:
        self._kept.append(function)
        return ctypes.cast(function, c_void_p).value

    def _opened(self, system: int, name: bytes | None, file: Any, flags: int, out: int) -> int:
        code: int = self._open(system, name, file, flags, out)
        if code == 0 and name is not None and Path(name.decode()).parent == self._disk.folder:
            address = ctypes.addressof(file.contents)
            self._names[address] = Path(name.decode()).name
            if flags & _CREATE and flags & _LOGS:
                self._new.add(address)
            file.contents.methods = ctypes.pointer(self._table(file.contents.methods))
        return code

    def _deleted(self, system: int, name: bytes, sync: int) -> int:
        path = Path(name.decode())
        code: int = self._delete(system, name, sync)
        return self._disk.delete(path.name) if code == 0 and path.parent == self._disk.folder else code

    def _table(self, own: Any) -> _Methods:
        """The watched edition of a kind of file's functions; made once a kind."""
        address = ctypes.addressof(own.contents)
        if address not in self._tables:
            table = _Methods.from_buffer_copy(own.contents)
            write, truncate, sync = _WRITE(table.write), _TRUNCATE(table.truncate), _SYNC(table.sync)

            def written(file: int, data: Any, count: int, at: int) -> int:
                return self._disk.write(self._names[file], at, data[:count]) or write(file, data, count, at)

            def truncated(file: int, size: int) -> int:
                return self._disk.truncate(self._names[file], size) or truncate(file, size)

            def synced(file: int, flags: int) -> int:
                folder_too = file in self._new
                self._new.discard(file)
                return self._disk.sync(self._names[file], folder_too) or sync(file, flags)

            table.write = self._pointer(_WRITE(written))
            table.truncate = self._pointer(_TRUNCATE(truncated))
            table.sync = self._pointer(_SYNC(synced))
            self._tables[address] = table
        return self._tables[address]
