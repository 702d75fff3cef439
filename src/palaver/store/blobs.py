"""Pictures, sound and video: files named by their own digest.

A blob is on the disk, whole and synced, before any message that names it is committed."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from palaver.store.errors import Damaged, NotFound, translated


def write_whole(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path, private: bool = True) -> Iterator[BinaryIO]:
    """Writes beside, syncs, renames, syncs the folder; when the block raises, nothing has happened.

    Unless it is `private`, the file has the permissions that the user's umask leaves.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "xb", opener=private_opener if private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Makes the folder, and those above it that are missing; they too survive a power cut. It is its owner's alone."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def private_opener(path: str, flags: int) -> int:
    """For `open`: a file that is made is readable by its owner alone."""
    return os.open(path, flags, 0o600)


def restrict(path: Path) -> bool:
    """Takes a file or a folder out of reach of other users; whether that had to be done.

    Left as they are: what is not there, what belongs to another user, the home folder, and folders that are meant to be
    shared (`/tmp`).
    """
    if os.name != "posix":
        return False
    with suppress(FileNotFoundError):
        found = path.stat()
        loose = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        shared = found.st_mode & stat.S_ISVTX or path.resolve() == Path.home()
        if loose and not shared and found.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(found.st_mode) & stat.S_IRWXU)
            return True
    return False


def restrict_tree(folder: Path) -> None:
    """The same for a folder and all that is in it. A folder that is out of reach already is not looked through."""
    if folder.is_dir() and folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        for path in folder.rglob("*"):
            restrict(path)
        restrict(folder)


def sync_folder(folder: Path) -> None:
    if os.name != "posix":  # other systems can't open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Kind = Literal["image", "audio", "video"]
GRACE = 3600.0
"""For how many seconds a blob may be without a message: it is written before the message is."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A media part of a message, by reference."""

    kind: Kind
    media_type: str
    digest: str
    size: int


class Blobs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Stores the data and gives its digest; the same data is stored once."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        with translated():
            if path.exists() and path.stat().st_size == len(data):
                os.utime(path)  # somebody is about to name it: sweep() must leave it
                return digest
            for folder in (self.folder, path.parent):
                make_folder(folder)
            write_whole(path, data)
        return digest

    def get(self, digest: str) -> bytes:
        """The data, or Damaged where the file no longer holds what was written."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise NotFound("blob", digest) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise Damaged(f"The blob {digest!r} is not what was written: restore it from a backup.")
        return data

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def digests(self) -> Iterator[str]:
        for path in sorted(self.folder.glob("??/*")):
            if len(path.name) == 64:
                yield path.name

    def sweep(self, named: set[str], grace: float = GRACE) -> int:
        """Removes blobs that no message names, and what an interrupted write left; says how many."""
        before = time.time() - grace
        swept = 0
        for path in self.folder.glob("??/*"):
            if path.name not in named and path.stat().st_mtime < before:
                path.unlink(missing_ok=True)
                swept += 1
        return swept
