"""Whether a model fits this machine, and how fast it will be: by the size of its weights."""

from __future__ import annotations

import time
from dataclasses import dataclass

from palaver.memory import total_bytes

RUNTIME_FACTOR = 1.05
"""The memory of a running model over that of its weights."""
MEMORY_SHARE = 0.9
_PROBE_BYTES = 64 << 20
_PROBE_PASSES = 3
_EFFICIENCY = 0.6
"""The part of the memory's bandwidth that decoding uses."""


@dataclass(frozen=True, slots=True)
class MachineFit:
    """Whether a model fits this machine's memory, and how fast it will be on its processor."""

    needed_bytes: int
    memory_bytes: int
    """What a model may take of the memory of the machine or container."""
    tokens_per_second: float

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.memory_bytes


def machine_fit(weights: int) -> MachineFit:
    """By the size of the weights. Each token reads all of them, so that the memory's bandwidth bounds the speed; of a
    mixture of experts each token reads less."""
    memory = int((total_bytes() or 0) * MEMORY_SHARE)
    speed = _EFFICIENCY * _memory_bandwidth() / max(1, weights)
    return MachineFit(int(weights * RUNTIME_FACTOR), memory, speed)


def _memory_bandwidth() -> float:
    """Bytes that this machine reads in a second, measured in some milliseconds."""
    import numpy as np

    values = np.ones(_PROBE_BYTES // 8)
    best = float("inf")
    for _ in range(_PROBE_PASSES):
        begun = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - begun)
    return _PROBE_BYTES / best
