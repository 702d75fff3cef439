"""The memory of this machine: how much is available, and returning what a process no longer uses."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def available_bytes() -> int | None:
    """Host memory that is available without swapping; None without psutil, which the engine runs without."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.virtual_memory().available


def give_back_unused() -> None:
    """Collects what is unreachable and returns free memory to the system, where the allocator can be asked to."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)
