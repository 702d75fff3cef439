"""How many threads compute a pass: few for the next tokens of replies, all cores for a long prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CROWDED = 40_000
"""From so many pairs of a new token and a token it looks at on, more threads help more than they wait."""


@dataclass(frozen=True, slots=True)
class Threads:
    few: int
    many: int

    @classmethod
    def picked(cls, wanted: int | None, small: bool) -> Threads:
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
