"""Memory and threads: whether a model fits, how much the KV cache may take, how many threads a pass uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from palaver.engines.torch.checkpoint import Checkpoint
from palaver.engines.torch.loader import VALUES_PER_BYTE, is_dequantized, quantization_method
from palaver.errors import DoesNotFit
from palaver.memory import available_bytes

GIB = 1 << 30
MAX_CPU_CACHE_BYTES = 2 * GIB
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""The share of the free memory, after loading the model, that the cache may take."""
RUNTIME_FACTOR = 1.05
"""The memory of a running model over that of its weights."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits, with figures."""

    weights_bytes: int
    needed_bytes: int
    free_bytes: int | None
    """None if it is not known."""
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
        weights += sum(elements * DTYPE_BYTES.get(kind, 1) for kind, elements in checkpoint.tensors.values())
    return Fit(weights, int(weights * RUNTIME_FACTOR), free_bytes(device), str(device))


def check_fit(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> None:
    """Raises DoesNotFit, before anything is loaded. Compiled steps hold a second copy of the weights, as stored."""
    needed = fit(checkpoint, device, dtype, compiled)
    if not needed.fits and needed.free_bytes is not None:
        raise DoesNotFit(checkpoint.name, needed.needed_bytes, needed.free_bytes, needed.device)


def weights_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = CPU) -> int:
    """The memory of the loaded weights: floats are converted to the dtype, unless the checkpoint stays quantised."""
    method = quantization_method(checkpoint.config)
    dequantized = is_dequantized(checkpoint.config, device)
    total = 0
    for kind, elements in checkpoint.tensors.values():
        if dequantized and kind not in DTYPE_BYTES:
            total += elements * VALUES_PER_BYTE[str(method)] * dtype.itemsize
        else:
            converted = kind in FLOAT_DTYPES and (method is None or dequantized)
            total += elements * (dtype.itemsize if converted else DTYPE_BYTES.get(kind, 1))
    return total


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def cache_bytes(device: torch.device) -> int:
    """The default bound on the KV cache of a loaded model: a share of the free memory, on the CPU at most 2 GiB."""
    free = free_bytes(device)
    if free is None:
        return GIB
    share = int(free * CACHE_SHARE.get(device.type, 0.5))
    return share if device.type == "cuda" else min(MAX_CPU_CACHE_BYTES, share)


LARGE_PASS_PAIRS = 40_000
"""Pairs of a query and a key from which more threads gain more than their synchronisation costs."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Intra-op thread counts of small and of large passes."""

    small_pass: int
    large_pass: int

    @classmethod
    def choose(cls, requested: int | None, small_model: bool) -> ThreadCounts:
        """All cores for a big model; half of them for small passes of a small one, whose threads mostly wait."""
        if requested is not None:
            return cls(requested, requested)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(max(1, cores // 2) if small_model else cores, cores)

    def apply(self) -> None:
        """Sets the intra-op thread count of the calling thread to that of small passes."""
        torch.set_num_threads(self.small_pass)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The thread count of the engine's thread, for a while."""
        before = torch.get_num_threads()
        self.apply()
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def scaled_for(self, pairs: int) -> Iterator[None]:
        """The thread count for a pass with so many pairs of a query and a key."""
        if pairs < LARGE_PASS_PAIRS or self.large_pass == self.small_pass:
            yield
            return
        torch.set_num_threads(self.large_pass)
        try:
            yield
        finally:
            self.apply()
