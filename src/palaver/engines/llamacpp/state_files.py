"""States of sequences in files: after a restart a conversation goes on without computing its text again.

A conversation has one file for each model and its settings. It holds the tokens, their state, and a checksum over both:
llama.cpp ends the process where a state is nonsense, so it only gets bytes that this code has written. A thread of its
own writes the files. They are deleted with their conversation; those used least recently make room for new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaver.engines.llamacpp.context import Bytes

_log = logging.getLogger(__name__)

KEY_TYPE = "q"
"""The type of arrays of tokens: ids, and negative numbers for tokens that stand for media."""
LIMIT_BYTES = 2 << 30
"""Of all files in the folder."""
PENDING_SHARE = 4
"""The part of the limit that may wait to be written, in memory; a larger state is not stored."""
_MAGIC = b"PALAVER STATE 2\n"
_LENGTH = 8
_DIGEST = 32
_MAX_HEADER = 1 << 16
_STALE_S = 600
_SUFFIX = ".state"


@dataclass(frozen=True, slots=True, eq=False)
class StoredState:
    """What the header of a file says. The state itself is not checked yet."""

    path: Path
    space: tuple[str, str]
    """Owner and adapter."""
    conversation: str
    tokens: array[int]
    start: int
    """Where the state begins in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A state that waits to be written."""

    space: tuple[str, str]
    conversation: str
    tokens: array[int]
    state: Bytes


class StateFiles:
    """The files of one model in a folder, which other models and processes may share."""

    def __init__(self, folder: Path, key: str, limit_bytes: int = LIMIT_BYTES) -> None:
        """`key` names everything that a state depends on but its tokens."""
        self._folder = folder
        self._key = _digest(key)
        self._limit_bytes = limit_bytes
        self._jobs: dict[str, _Job] = {}
        self._writing: _Job | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._stored = {entry.conversation: entry for entry in self._scan()}

    def entries(self) -> list[StoredState]:
        with self._changed:
            return list(self._stored.values())

    def read(self, entry: StoredState) -> Bytes | None:
        """The state of an entry. A file that is gone, cut or changed is None, and no entry any more."""
        import numpy as np  # not needed to delete files

        try:
            data = np.fromfile(entry.path, np.uint8)
            if hashlib.blake2b(data[:-_DIGEST].data, digest_size=_DIGEST).digest() == data[-_DIGEST:].tobytes():
                os.utime(entry.path)
                return data[entry.start : -_DIGEST]
            _remove(entry.path)
        except OSError:
            pass
        with self._changed:
            if self._stored.get(entry.conversation) is entry:
                del self._stored[entry.conversation]
        return None

    def write(self, space: tuple[str, str], conversation: str, tokens: Sequence[int], state: Bytes) -> bool:
        """Writes a state soon, instead of the conversation's last one. Returns False where too many wait already."""
        with self._changed:
            waiting = sum(job.state.nbytes for job in self._jobs.values()) + state.nbytes
            if self._closing or waiting * PENDING_SHARE > self._limit_bytes:
                return False
            self._jobs[conversation] = _Job(space, conversation, array(KEY_TYPE, tokens), state)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="palaver-states", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def forget(self, conversation: str) -> None:
        """Deletes the files of a conversation, also those of other models."""
        with self._changed:
            self._jobs.pop(conversation, None)
            self._stored.pop(conversation, None)
            if self._writing is not None and self._writing.conversation == conversation:
                self._writing = None
            remove_states(self._folder, conversation)

    def close(self) -> None:
        """Waits until everything is written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _scan(self) -> Iterator[StoredState]:
        for path in self._folder.glob("*.part"):  # of a process that was killed
            with contextlib.suppress(OSError):  # its process may rename or delete it meanwhile
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
        for path in sorted(self._folder.glob(f"*-{self._key}{_SUFFIX}")):
            entry = _read_header(path)
            if entry is not None and path.name == self._name(entry.conversation):
                yield entry
            else:
                _remove(path)

    def _name(self, conversation: str) -> str:
        return f"{_digest(conversation)}-{self._key}{_SUFFIX}"

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Waits for a job and writes its state, which is not referenced after that. Returns False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return False
            job = self._writing = self._jobs.pop(next(iter(self._jobs)))
        try:
            self._write(job)
        except OSError as error:
            _log.warning("Could not store the state of a conversation: %s", error)
        finally:
            with self._changed:
                self._writing = None
        return True

    def _write(self, job: _Job) -> None:
        header = json.dumps({"space": job.space, "conversation": job.conversation, "tokens": len(job.tokens)}).encode()
        parts: list[bytes | memoryview] = [
            _MAGIC,
            len(header).to_bytes(_LENGTH, "little"),
            header,
            job.tokens.tobytes(),
        ]
        start = sum(map(len, parts))
        path = self._folder / self._name(job.conversation)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._make_room(start + job.state.nbytes + _DIGEST, path):
            return
        part = path.with_suffix(f".{os.getpid()}.part")
        digest = hashlib.blake2b(digest_size=_DIGEST)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in (b"".join(parts), job.state.data):
                    digest.update(piece)
                    file.write(piece)
                file.write(digest.digest())
            with self._changed:
                if self._writing is job:  # it may be forgotten by now
                    part.replace(path)
                    entry = StoredState(path, job.space, job.conversation, job.tokens, start)
                    self._stored[job.conversation] = entry
        finally:
            _remove(part)

    def _make_room(self, size: int, path: Path) -> bool:
        """Deletes the files that were not used for the longest time. Returns False for a file that has no room."""
        if size > self._limit_bytes or size * 2 > shutil.disk_usage(self._folder).free:
            return False
        others = [(other.stat(), other) for other in self._folder.glob(f"*{_SUFFIX}") if other != path]
        total = size + sum(status.st_size for status, _ in others)
        for status, other in sorted(others, key=lambda pair: pair[0].st_mtime_ns):
            if total <= self._limit_bytes:
                break
            _remove(other)
            total -= status.st_size
        return True


def remove_states(folder: Path, conversation: str) -> None:
    """Deletes the states of a conversation, of all models."""
    for path in folder.glob(f"{_digest(conversation)}-*"):
        _remove(path)


def file_identity(path: Path) -> str:
    """Changes when a file is replaced or written to."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def _read_header(path: Path) -> StoredState | None:
    """None for a file that is no whole state."""
    try:
        with path.open("rb") as file:
            magic, length = file.read(len(_MAGIC)), int.from_bytes(file.read(_LENGTH), "little")
            if magic != _MAGIC or length > _MAX_HEADER:
                return None
            header = json.loads(file.read(length))
            owner, adapter = map(str, header["space"])
            count, tokens = int(header["tokens"]), array(KEY_TYPE)
            start = len(_MAGIC) + _LENGTH + length + count * tokens.itemsize
            if count <= 0 or start + _DIGEST >= path.stat().st_size:
                return None
            tokens.fromfile(file, count)
            return StoredState(path, (owner, adapter), str(header["conversation"]), tokens, start)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
