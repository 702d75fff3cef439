"""How much memory there is, and what a model and its cache may take of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from palaver.engines.torch.checkpoint import Checkpoint
from palaver.engines.torch.loader import UNPACKED, is_dequantized, quantisation_method
from palaver.errors import DoesNotFit

GIB = 1 << 30
CACHE_ON_CPU = 2 * GIB
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""How much of what the model leaves free the cache may take."""
BESIDE_WEIGHTS = 1.05
"""What a model takes for each byte of its weights, with what it needs while it runs."""
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
FLOATS = ("F64", "F32", "F16", "BF16")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits, with figures."""

    weights_bytes: int
    needed_bytes: int
    free_bytes: int | None
    """None where the system doesn't say."""
    device: str

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else f"{self.free_bytes / 1e9:.2f} GB"
        return f"needs about {self.needed_bytes / 1e9:.2f} GB on {self.device}, free: {free}"


def fit(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> Fit:
    weights = weights_bytes(checkpoint, dtype, device)
    if compiled and device.type == "cpu":
        weights += sum(elements * SIZES.get(kind, 1) for kind, elements in checkpoint.tensors.values())
    return Fit(weights, int(weights * BESIDE_WEIGHTS), free_bytes(device), str(device))


def check_fit(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> None:
    """Raises DoesNotFit, before anything is loaded. Compiled steps have the weights once more, as they are stored."""
    found = fit(checkpoint, device, dtype, compiled)
    if not found.fits and found.free_bytes is not None:
        raise DoesNotFit(checkpoint.name, found.needed_bytes, found.free_bytes, found.device)


def weights_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = CPU) -> int:
    """What the weights take once loaded: floats are converted, unless the checkpoint is quantised and stays so."""
    form = quantisation_method(checkpoint.config)
    unpacked = is_dequantized(checkpoint.config, device)
    total = 0
    for kind, elements in checkpoint.tensors.values():
        if unpacked and kind not in SIZES:
            total += elements * UNPACKED[str(form)] * dtype.itemsize
        else:
            converted = kind in FLOATS and (form is None or unpacked)
            total += elements * (dtype.itemsize if converted else SIZES.get(kind, 1))
    return total


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available()


def cache_bytes(device: torch.device) -> int:
    """The bound on the KV cache of a model that is loaded: a share of what is free, on the CPU no more than 2 GiB."""
    free = free_bytes(device)
    if free is None:
        return GIB
    share = int(free * CACHE_SHARE.get(device.type, 0.5))
    return share if device.type == "cuda" else min(CACHE_ON_CPU, share)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is what torch raises where memory is short, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _available() -> int | None:
    """Memory that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


CROWDED = 40_000
"""From so many pairs of a new token and a token it looks at on, more threads help more than they wait."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    few: int
    many: int

    @classmethod
    def picked(cls, wanted: int | None, small: bool) -> ThreadCounts:
        """All cores for a big model; half of them for a small one, which waits for memory and for the other threads."""
        if wanted is not None:
            return cls(wanted, wanted)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(max(1, cores // 2) if small else cores, cores)

    def settle(self) -> None:
        """Counts for the thread that says it."""
        torch.set_num_threads(self.few)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Few threads meanwhile, as the engine's own thread has them."""
        before = torch.get_num_threads()
        self.settle()
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def enough(self, pairs: int) -> Iterator[None]:
        if pairs < CROWDED or self.many == self.few:
            yield
            return
        torch.set_num_threads(self.many)
        try:
            yield
        finally:
            self.settle()
