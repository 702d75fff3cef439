"""The memory of this machine: how much is available, returning what a process no longer uses, and when Python looks for
garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LARGE_BLOCK_BYTES = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's options."""


def available_bytes() -> int | None:
    """Host memory that is available without swapping; None without psutil, which the engine runs without."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.virtual_memory().available


def return_large_blocks() -> None:
    """From now on a large block goes back to the system as soon as it is freed, where the C library is glibc.

    By default glibc keeps blocks of up to 32 MB, in a heap for each thread, and even `malloc_trim` leaves the last free
    block of such a heap: a few large requests would cost some 25 MB a thread for as long as the process lives.
    """
    with suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        set_option(_M_TRIM_THRESHOLD, LARGE_BLOCK_BYTES)


@contextmanager
def no_collections() -> Iterator[None]:
    """For imports: they allocate much that stays, and looking through it again and again takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def give_back_unused() -> None:
    """Collects what is unreachable and returns free memory to the system, where the allocator can be asked to."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


COLLECTIONS = (5_000, 5, 20)
"""New objects after which Python looks for garbage in cycles among them; how many such collections until one looks
through what they left, too; and how many of those until one looks through everything."""


def collect_seldom() -> None:
    """Keeps Python's garbage collector from delaying tokens. Call once everything is loaded.

    A full collection over all that was imported takes 0.2 s. And tokens on their way are many objects, but no cycles:
    with Python's default, 700 objects, 32 quick replies of 256 tokens caused 50 collections. But the events of running
    replies stay, and a collection that looks through those of 200,000 new objects takes 0.16 s.
    """
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
