"""A simulated disk that records operations, fills up, fails to sync and loses power: a VFS layer under SQLite.

SQLite accesses files through a table of functions (VFS). The layer copies the table and routes open, write, truncate,
sync and delete of one folder's files through Python.
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
"""SQLite's codes for a full disk and for a failed sync."""
_SECTOR = 512


@dataclass(frozen=True, slots=True)
class DiskOperation:
    """An operation on a file: write, truncate, sync or delete. A sync without a name is one of the folder."""

    kind: str
    name: str
    offset: int = 0
    data: bytes = b""


@dataclass
class Disk:
    folder: Path
    operations: list[DiskOperation] = field(default_factory=list)
    writes_left: int | None = None
    """Writes until the disk is full; None: unlimited."""
    fail_sync: bool = False

    def write(self, name: str, offset: int, data: bytes) -> int:
        if self.writes_left is not None:
            if self.writes_left == 0:
                return FULL
            self.writes_left -= 1
        self.operations.append(DiskOperation("write", name, offset, data))
        return 0

    def sync(self, name: str, sync_folder: bool) -> int:
        if self.fail_sync:
            return FSYNC_FAILED
        self.operations.append(DiskOperation("sync", name))
        if sync_folder:
            self.operations.append(DiskOperation("sync", ""))
        return 0

    def truncate(self, name: str, size: int) -> int:
        self.operations.append(DiskOperation("truncate", name, size))
        return 0

    def delete(self, name: str) -> int:
        self.operations.append(DiskOperation("delete", name))
        return 0


def after_power_loss(operations: Sequence[DiskOperation], rng: Random) -> dict[str, bytes]:
    """A possible state of the files after power loss: synced operations are kept, any part of later ones.

    A deleted file is gone for good once its folder was synced.
    """
    files: dict[str, bytearray] = {}
    on_sync = {operation.name: place for place, operation in enumerate(operations) if operation.kind == "sync"}
    for place, operation in enumerate(operations):
        target = "" if operation.kind == "delete" else operation.name
        if place <= on_sync.get(target, -1) or rng.random() < 0.5:
            _apply(files, operation)
        elif operation.kind == "write" and rng.random() < 0.3:
            length = rng.randrange(0, len(operation.data) + 1, _SECTOR)
            _apply(files, DiskOperation("write", operation.name, operation.offset, operation.data[:length]))
    return {name: bytes(data) for name, data in files.items()}


def _apply(files: dict[str, bytearray], operation: DiskOperation) -> None:
    if operation.kind == "delete":
        files.pop(operation.name, None)
    if operation.kind in ("delete", "sync"):
        return
    data = files.setdefault(operation.name, bytearray())
    end = operation.offset + len(operation.data)
    if operation.kind == "truncate":
        del data[operation.offset :]
        end = operation.offset
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    data[operation.offset : operation.offset + len(operation.data)] = operation.data


class _IoMethods(ctypes.Structure):
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
    _fields_ = [("methods", POINTER(_IoMethods))]


class _Vfs(ctypes.Structure):
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
"""Open flags. With the first sync of a journal or a write-ahead log SQLite syncs the folder too."""
_WRITE = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_char), c_int, c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)
_OPEN = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(_File), c_int, c_void_p)
"""The name is a pointer: SQLite keeps it for as long as the file is open, and derives other names from it later."""
_DELETE = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)


def can_intercept() -> bool:
    """Whether the symbols of Python's SQLite are accessible; some builds hide them."""
    return hasattr(ctypes.CDLL(_sqlite3.__file__), "sqlite3_vfs_register")


@contextmanager
def intercept(folder: Path) -> Iterator[Disk]:
    """Databases opened in this folder inside the block use the simulated disk. Close them inside the block."""
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    original = library.sqlite3_vfs_find(None)
    disk = Disk(folder)
    layer = _VfsLayer(original.contents, disk)
    assert library.sqlite3_vfs_register(ctypes.byref(layer.system), 1) == 0
    try:
        yield disk
    finally:
        library.sqlite3_vfs_register(original, 1)
        library.sqlite3_vfs_unregister(ctypes.byref(layer.system))


class _VfsLayer:
    def __init__(self, original: _Vfs, disk: Disk) -> None:
        self._disk = disk
        self._names: dict[int, str] = {}
        self._new: set[int] = set()
        self._tables: dict[int, _IoMethods] = {}
        self._open, self._delete = _OPEN(original.open), _DELETE(original.delete)
        self.system = _Vfs.from_buffer_copy(original)
        self.system.name = b"watched"
        self._references: list[Any] = []  # C holds pointers to these: keep them alive
        self.system.open = self._pointer(_OPEN(self._on_open))
        self.system.delete = self._pointer(_DELETE(self._on_delete))

    def _pointer(self, function: Any) -> int | None:
        self._references.append(function)
        return ctypes.cast(function, c_void_p).value

    def _on_open(self, system: int, name: int | None, file: Any, flags: int, out: int) -> int:
        code: int = self._open(system, name, file, flags, out)
        path = None if name is None else Path(ctypes.string_at(name).decode())
        if code == 0 and path is not None and path.parent == self._disk.folder:
            address = ctypes.addressof(file.contents)
            self._names[address] = path.name
            if flags & _CREATE and flags & _LOGS:
                self._new.add(address)
            file.contents.methods = ctypes.pointer(self._table(file.contents.methods))
        return code

    def _on_delete(self, system: int, name: bytes, sync: int) -> int:
        path = Path(name.decode())
        code: int = self._delete(system, name, sync)
        return self._disk.delete(path.name) if code == 0 and path.parent == self._disk.folder else code

    def _table(self, original: Any) -> _IoMethods:
        """The intercepting copy of a function table; created once per table."""
        address = ctypes.addressof(original.contents)
        if address not in self._tables:
            table = _IoMethods.from_buffer_copy(original.contents)
            write, truncate, sync = _WRITE(table.write), _TRUNCATE(table.truncate), _SYNC(table.sync)

            def on_write(file: int, data: Any, count: int, offset: int) -> int:
                return self._disk.write(self._names[file], offset, data[:count]) or write(file, data, count, offset)

            def on_truncate(file: int, size: int) -> int:
                return self._disk.truncate(self._names[file], size) or truncate(file, size)

            def on_sync(file: int, flags: int) -> int:
                sync_folder = file in self._new
                self._new.discard(file)
                return self._disk.sync(self._names[file], sync_folder) or sync(file, flags)

            table.write = self._pointer(_WRITE(on_write))
            table.truncate = self._pointer(_TRUNCATE(on_truncate))
            table.sync = self._pointer(_SYNC(on_sync))
            self._tables[address] = table
        return self._tables[address]
