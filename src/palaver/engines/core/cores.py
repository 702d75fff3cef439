"""The processor cores that this process may use, and how many of them are idle now."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path

CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LOAD = Path("/proc/loadavg")


def usable_cores() -> int:
    """Cores by the affinity of the process and the limits of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _group_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def _group_limit() -> float | None:
    """Cores by the limits of the control group (cgroup v2) and those above it; None if there is no limit."""
    try:
        paths = [line.partition("::")[2] for line in MEMBERSHIP.read_text("utf-8").splitlines() if "::" in line]
    except (OSError, ValueError):
        return None
    limits = []
    for path in paths:
        group = CONTROL_GROUPS / path.strip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max", or no file at the root
                quota, period = (folder / "cpu.max").read_text("utf-8").split()
                limits.append(int(quota) / int(period))
            if folder == CONTROL_GROUPS:
                break
    return min(limits, default=None)


class IdleCores:
    """Counts the cores that run nothing at this moment, from the number of tasks that Linux wants to run."""

    def __init__(self, load: Path = LOAD) -> None:
        self._usable = usable_cores()
        self._all = os.cpu_count() or 1
        self._descriptor: int | None = None
        if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == self._all:
            with suppress(OSError):  # not Linux
                self._descriptor = os.open(load, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._descriptor)

    def count(self) -> int | None:
        """At most the usable cores but the one of this thread. None where it is unknown: on other systems, and where
        other processes run on cores that this one may not use. Takes a microsecond."""
        if self._descriptor is None:
            return None
        try:
            running = int(os.pread(self._descriptor, 64, 0).split()[3].partition(b"/")[0])
        except (OSError, ValueError, IndexError):
            return None
        if running < 1:  # at least this thread runs: some sandboxes count nothing
            return None
        return max(0, min(self._all - running, self._usable - 1))
