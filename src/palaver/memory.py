"""Memory that a process no longer uses, back to the system."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def give_back_unused() -> None:
    """Collects what is unreachable and returns free memory to the system, where the allocator can be asked to."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)
