"""Pictures, sound and video: files named by their own digest.

A blob is on the disk, whole and synced, before any message that names it is committed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palaver.store.errors import Damaged, NotFound, translated
from palaver.store.files import make_folder, write_whole

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
