"""How many threads a pass on the CPU uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

SMALL_MODEL = 256 << 20
"""Bytes of float32 weights up to which more threads cost more than they gain."""
LARGE_PASS_PAIRS = 40_000
"""Pairs of a query and a key from which more threads gain more than their synchronisation costs."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Thread counts of small and of large passes."""

    small_pass: int
    large_pass: int

    @classmethod
    def choose(cls, requested: int | None, small_model: bool) -> Self:
        """All cores for a big model; half of them for small passes of a small one, whose threads mostly wait."""
        if requested is not None:
            return cls(requested, requested)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(max(1, cores // 2) if small_model else cores, cores)

    def for_pairs(self, pairs: int) -> int:
        """The count for a pass with so many pairs of a query and a key."""
        return self.small_pass if pairs < LARGE_PASS_PAIRS else self.large_pass
