"""How far the loading of a model is: what has come into memory, of what its files hold."""

from __future__ import annotations

import os
from pathlib import Path

_ALMOST = 0.99


class Progress:
    def __init__(self) -> None:
        self.note = "starting"
        self._before: int | None = None
        self._whole = 0

    def begin(self, folder: Path) -> None:
        """From here on the weights are read."""
        self.note = "loading the weights"
        self._whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self._before = _resident()

    @property
    def share(self) -> float | None:
        """From 0 to 1; None where it isn't known, as on systems that don't tell a process its memory."""
        now = _resident()
        if self._before is None or now is None or not self._whole:
            return None
        return min(_ALMOST, max(0.0, (now - self._before) / self._whole))


def _resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
