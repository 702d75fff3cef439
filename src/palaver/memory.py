"""The memory of this machine: how much there is and how much is available, also by the limits of control groups,
returning what a process no longer uses, and when Python looks for garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LARGE_BLOCK_BYTES = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's mallopt parameter numbers."""


def available_bytes() -> int | None:
    """Host memory that is available without swapping, within the limits of the control groups; None if psutil is not
    installed."""
    try:
        import psutil
    except ImportError:
        return None
    return min((psutil.virtual_memory().available, *_group_available()))


def total_bytes() -> int | None:
    """The memory of the machine, or the smallest limit of its control groups; None if psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    return min((psutil.virtual_memory().total, *_group_limits()))


def control_groups() -> Iterator[Path]:
    """The folders of the control group (cgroup v2) of this process and of those above it; none where there are none."""
    try:
        paths = [line.partition("::")[2] for line in MEMBERSHIP.read_text("utf-8").splitlines() if "::" in line]
    except (OSError, ValueError):
        return
    for path in paths:
        group = CONTROL_GROUPS / path.strip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == CONTROL_GROUPS:
                break


def _group_limits() -> Iterator[int]:
    for folder in control_groups():
        with suppress(OSError, ValueError):  # "max", or no file at the root
            yield int((folder / "memory.max").read_text("utf-8"))


def _group_available() -> Iterator[int]:
    """What each control group with a limit has available. Its cache of files counts as available, as that of the
    machine does: the kernel drops it before memory is short. Weights that were mapped are in the active part of it."""
    for folder in control_groups():
        with suppress(OSError, ValueError):  # "max", or no file at the root
            limit, used = (int((folder / name).read_text("utf-8")) for name in ("memory.max", "memory.current"))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
            cached = sum(int(statistics.get(name, 0)) for name in ("active_file", "inactive_file"))
            yield max(0, limit - used + cached)


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
