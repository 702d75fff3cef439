"""Helpers for child processes."""

from __future__ import annotations

import ctypes
import signal
import sys

_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the Linux kernel to kill this process when its parent dies. Elsewhere the closed connection ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
