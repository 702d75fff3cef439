"""What was typed, kept across runs in a file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

KEPT = 2_000_000
"""Bytes of the file that are kept when it is opened; older lines go."""


def opened(path: Path) -> History:
    """The history in that file, which is made where it is not there; one in memory where it can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _shorten(path: Path) -> None:
    """An entry begins with a blank line and a comment: the file is cut before one."""
    if path.stat().st_size <= 2 * KEPT:
        return
    tail = path.read_bytes()[-KEPT:]
    place = tail.find(b"\n\n# ")
    path.write_bytes(tail[place + 1 :] if place >= 0 else b"")
