"""What a machine has to run models with, found out without asking a framework."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from palaver.memory import control_groups

ONLINE = Path("/sys/devices/system/cpu/online")
"""In which Linux names its cores, such as 0-3,8-11."""
ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")
"""Devices of NVIDIA's and AMD's drivers, and of Windows in a Linux subsystem."""


def has_accelerator() -> bool:
    """Whether the machine seems to have a GPU. If in doubt, yes."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    if sys.platform == "win32":
        return True
    return any(Path(path).exists() for path in ACCELERATOR_FILES)


def has_gpu_memory() -> bool:
    """Whether the machine seems to have a GPU with memory of its own: a Mac's GPU shares that of the processor."""
    return sys.platform != "darwin" and has_accelerator()


def has_llamacpp() -> bool:
    """Whether llama.cpp's library is installed."""
    return find_spec("xllamacpp") is not None


def usable_cores() -> int:
    """Cores by the affinity of the process and the limits of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _group_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def all_cores() -> int:
    """The cores of the machine, also those that the process may not use: with musl `os.cpu_count` leaves them out."""
    try:
        ranges = [one.split("-") for one in ONLINE.read_text("utf-8").strip().split(",")]
        return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)
    except (OSError, ValueError):  # not Linux
        return os.cpu_count() or 1


def _group_limit() -> float | None:
    """Cores by the limits of the control group (cgroup v2) and those above it; None if there is no limit."""
    limits = []
    for folder in control_groups():
        with suppress(OSError, ValueError):  # "max", or no file at the root
            quota, period = (folder / "cpu.max").read_text("utf-8").split()
            limits.append(int(quota) / int(period))
    return min(limits, default=None)
