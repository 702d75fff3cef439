"""The logits that a runner returns: a batch of rows in the memory where the runner computed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from palaver.engines.core.generation import PendingStep
from palaver.engines.core.logits_changes import Scores
from palaver.engines.core.processor import LogitsProcessor
from palaver.engines.core.sampler import sample_rows
from palaver.errors import PalaverError
from palaver.generation import Step

SampledStep = Step | PendingStep | PalaverError


class Logits(Protocol):
    """The logits after the last token of each sequence of a batch."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Logits:
        """A batch of this row alone, in the same memory."""
        ...

    def copy(self) -> Logits:
        """The same logits in memory of their own: a runner may overwrite its own in its next pass."""
        ...

    @property
    def nbytes(self) -> int: ...

    def sample(self, processors: Sequence[LogitsProcessor]) -> Sequence[SampledStep]:
        """The next token of each row, or the error that prevents one. Rows are independent of each other."""
        ...


class HostLogits:
    """Logits in the host's memory: a float32 array, a row for each sequence."""

    def __init__(self, array: Scores) -> None:
        assert array.ndim == 2
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def row(self, index: int) -> HostLogits:
        return HostLogits(self.array[index : index + 1])

    def copy(self) -> HostLogits:
        return HostLogits(self.array.copy())

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def sample(self, processors: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
        return sample_rows(self.array, processors)
