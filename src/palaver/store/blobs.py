"""Blobs: images, audio and video as files named by their SHA-256 digest, in a folder or in S3-compatible storage. And
atomic, private file writes.

A blob is synced to disk before a message that references it is committed."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from palaver.errors import BadParameter
from palaver.messages import PartBase
from palaver.store.errors import Damaged, NotFound, Unreachable, translate_errors
from palaver.store.storage_errors import is_bucket_missing, reach_storage


def write_atomic(path: Path, data: bytes) -> None:
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path, private: bool = True) -> Iterator[BinaryIO]:
    """Writes a temporary file, syncs, renames, syncs the folder. If the block raises, nothing is left behind.

    A file that is not `private` gets the permissions of the user's umask.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", opener=private_opener if private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Creates the folder and its missing parents, private and synced, so that they survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def private_opener(path: str, flags: int) -> int:
    """An `opener` for `open`: new files are readable by their owner alone."""
    return os.open(path, flags, 0o600)


def restrict(path: Path) -> bool:
    """Removes the permissions of other users. Returns whether there were any.

    Skips missing files, files of another user, the home folder, and shared folders such as `/tmp` (sticky bit).
    """
    if os.name != "posix":
        return False
    with suppress(FileNotFoundError):
        status = path.stat()
        open_bits = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        shared = status.st_mode & stat.S_ISVTX or path.resolve() == Path.home()
        if open_bits and not shared and status.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(status.st_mode) & stat.S_IRWXU)
            return True
    return False


def restrict_tree(folder: Path) -> None:
    """Restricts a folder and its content. A folder that is restricted already is not searched."""
    if folder.is_dir() and folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        for path in folder.rglob("*"):
            restrict(path)
        restrict(folder)


def sync_folder(folder: Path) -> None:
    if os.name != "posix":  # other systems cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Kind = Literal["image", "audio", "video"]
GRACE_SECONDS = 3600.0
"""Age at which an unreferenced blob may be deleted: blobs are written before their messages."""
_SET_ASIDE = ".sweep"
"""The suffix of a file that a sweep has set aside: it is about to be deleted, or put back."""
_ANNOUNCED = ".put"
"""The suffix of an empty object that says that an object was about to be written."""
_OWN_NAME = re.compile(r"[0-9a-f]{64}(?:\.[^.]+\.(?:sweep|put))?")
"""Names of objects that are written here. A bucket may have others."""


@dataclass(frozen=True, slots=True)
class Blob(PartBase):
    """A media part of a message, by reference."""

    type: Literal["blob"] = field(default="blob", kw_only=True, repr=False)
    kind: Kind
    media_type: str
    digest: str
    size: int
    name: str = ""
    width: int = 0
    height: int = 0
    seconds: float = 0.0


class Blobs:
    """Blobs in a folder, which several servers may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Stores the data once and returns its digest."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        with translate_errors():
            with suppress(FileNotFoundError):
                os.utime(path)  # a message is about to reference it: keep it from sweep()
                if path.stat().st_size == len(data):  # asked after the touch: sweep() may have moved it meanwhile
                    return digest
            for folder in (self.folder, path.parent):
                make_folder(folder)
            write_atomic(path, data)
        return digest

    def get(self, digest: str) -> bytes:
        """The data. Raises Damaged if the file's content changed."""
        try:
            data = self._read(digest)
        except FileNotFoundError:
            raise NotFound("blob", digest) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise Damaged(f"The blob {digest!r} is not what was written: restore it from a backup.")
        return data

    def _read(self, digest: str) -> bytes:
        path = self.path(digest)
        with suppress(FileNotFoundError):
            return path.read_bytes()
        for aside in _set_aside_paths(path):
            with suppress(FileNotFoundError):
                return aside.read_bytes()
        return path.read_bytes()  # sweep() may have put it back meanwhile

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def digests(self) -> Iterator[str]:
        for path in sorted(self.folder.glob("??/*")):
            if len(path.name) == 64:
                yield path.name

    def sweep(self, referenced: set[str], grace: float = GRACE_SECONDS) -> int:
        """Deletes unreferenced blobs and leftovers of interrupted writes. Returns how many."""
        cutoff = time.time() - grace
        removed = 0
        for path in self.folder.glob("??/*"):
            with suppress(FileNotFoundError):  # another server sweeps too
                removed += _sweep_file(path, referenced, cutoff)
        return removed


def _sweep_file(path: Path, referenced: set[str], cutoff: float) -> bool:
    """Deletes a file that is old and not referenced. Returns whether it did.

    The file is set aside before its age decides, by a name of this sweep alone: of two sweeps the second does not find
    it. put() touches files in their place alone: it either touched this one before, which shows here, or does not find
    it and writes it again. A sweep that is interrupted between leaves the file aside, where get() finds it; the next
    sweep deletes it or puts it back.
    """
    name = _original_name(path)
    if path.name == name and (name in referenced or path.stat().st_mtime >= cutoff):
        return False
    aside = path.with_name(f".{name}.{secrets.token_hex(4)}{_SET_ASIDE}")
    path.replace(aside)
    if name in referenced or aside.stat().st_mtime >= cutoff:
        os.utime(aside)  # put() may have written it again: the newer time counts
        aside.replace(path.with_name(name))
        return False
    aside.unlink()
    return True


def _original_name(path: Path) -> str:
    """The name of a file, without what a sweep added that has set it aside."""
    if path.suffix != _SET_ASIDE:
        return path.name
    name = path.stem.removeprefix(".")
    return name.rpartition(".")[0] or name


def _set_aside_paths(path: Path) -> list[Path]:
    return [*path.parent.glob(f".{path.name}.*{_SET_ASIDE}")]


class RemoteBlobs(Blobs):
    """Blobs in S3-compatible storage, or in another object storage that fsspec has a file system for."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        try:
            from fsspec.core import url_to_fs

            # the age of an object decides whether it is deleted: an earlier listing must not say it
            self._files, self._root = url_to_fs(url, use_listings_cache=False)
        except ImportError:
            raise Unreachable("Media at a URL need a library: pip install 'palaver[s3]'.") from None
        except ValueError:
            raise BadParameter("blobs", url.partition(":")[0], "is no storage that fsspec knows") from None

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        with reach_storage():
            if not self._is_fresh(digest, len(data)):
                address = self._address(digest)
                announcement = f"{address}.{time.time_ns():020}-{secrets.token_hex(4)}{_ANNOUNCED}"
                self._files.pipe_file(announcement, b"")
                self._files.pipe_file(address, data)
                self._remove_announcements(address, before=announcement)
        return digest

    def _remove_announcements(self, address: str, before: str) -> None:
        """Removes the announcements of earlier puts, for which a later one stands now. The last one stays: a sweep that
        deletes what was written must find it. One that can't be removed waits for the next put, or for a sweep."""
        with suppress(Exception):
            for path in self._find_beside(address, _ANNOUNCED):
                if _last_part(path) < _last_part(before):
                    self._files.rm_file(path)

    def digests(self) -> Iterator[str]:
        with reach_storage():
            yield from sorted(name for name in map(_last_part, self._files.find(self._root)) if len(name) == 64)

    def sweep(self, referenced: set[str], grace: float = GRACE_SECONDS) -> int:
        """Deletes unreferenced blobs and what other sweeps have left. Returns how many blobs."""
        cutoff = time.time() - grace
        removed = 0
        with reach_storage():
            for path in self._files.find(self._root):
                digest, _, kind = _last_part(path).partition(".")
                if (not kind and digest in referenced) or not _OWN_NAME.fullmatch(_last_part(path)):
                    continue
                with suppress(FileNotFoundError):  # another server sweeps too
                    if self._is_newer(path, cutoff):
                        continue
                    if kind:
                        self._sweep_leftover(path, digest, digest in referenced)
                    else:
                        removed += self._sweep_object(path, cutoff)
        return removed

    def _sweep_object(self, path: str, cutoff: float) -> bool:
        """Deletes an object that was old. Returns whether it is deleted.

        Object storage can't look and delete at once. put() announces what it writes, so an object that it has written
        since is noticed afterwards, and put back. A sweep that is interrupted between leaves a copy, where get() finds
        it; a later sweep puts it back or deletes it.
        """
        aside = f"{path}.{secrets.token_hex(4)}{_SET_ASIDE}"
        self._files.cp_file(path, aside)
        self._files.rm_file(path)
        is_put = any(self._is_newer(one, cutoff) for one in self._find_beside(path, _ANNOUNCED))
        if is_put:
            self._files.cp_file(aside, path)
        self._files.rm_file(aside)
        return not is_put

    def _sweep_leftover(self, path: str, digest: str, is_referenced: bool) -> None:
        """Deletes an old announcement, or the copy that an interrupted sweep has left, which may be the last one."""
        if path.endswith(_SET_ASIDE) and is_referenced and not self._files.exists(self._address(digest)):
            self._files.cp_file(path, self._address(digest))
        self._files.rm_file(path)

    def _find_beside(self, address: str, suffix: str) -> list[str]:
        """The announcements or the copies of an object."""
        return [*self._files.glob(f"{glob.escape(address)}.*{suffix}")]

    def _is_newer(self, path: str, cutoff: float) -> bool:
        """False if another server has deleted it."""
        with suppress(FileNotFoundError):
            return bool(self._files.modified(path).timestamp() >= cutoff)
        return False

    def _read(self, digest: str) -> bytes:
        address = self._address(digest)
        with reach_storage():
            with suppress(FileNotFoundError):
                return bytes(self._files.cat_file(address))
            for aside in self._find_beside(address, _SET_ASIDE):
                with suppress(FileNotFoundError):
                    return bytes(self._files.cat_file(aside))
            try:
                return bytes(self._files.cat_file(address))  # sweep() may have put it back meanwhile
            except FileNotFoundError as error:
                if is_bucket_missing(error):
                    raise
                raise NotFound("blob", digest) from None

    def _is_fresh(self, digest: str, size: int) -> bool:
        """Whether it is stored, and too new to be swept before a message references it."""
        try:
            info = self._files.info(self._address(digest))
            age = time.time() - self._files.modified(self._address(digest)).timestamp()
        except FileNotFoundError:
            return False
        return bool(info["size"] == size and age < GRACE_SECONDS / 2)

    def _address(self, digest: str) -> str:
        return f"{self._root.rstrip('/')}/{digest[:2]}/{digest}"


def open_blobs(folder: Path, place: str | None = None) -> Blobs:
    """The blobs of a store: in its folder, in another one, or at a URL."""
    if not place:
        return Blobs(folder)
    place = place.removeprefix("file://")
    return RemoteBlobs(folder, place) if "://" in place else Blobs(Path(place))


def _last_part(path: str) -> str:
    return path.rpartition("/")[2]
