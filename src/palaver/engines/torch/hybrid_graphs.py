"""Decode passes of hybrid models as CUDA graphs: one for each number of sequences, whichever they are.

The states of the sequences are in the first rows of one batch. Their keys and values are found by addresses in tables
on the device, so that a graph stays right when sequences join, leave or grow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_functions import AttentionParams
from palaver.engines.torch.batch import SequenceChunk
from palaver.engines.torch.cuda_graphs import Capture, Pass, watch_synchronization

_log = logging.getLogger(__name__)

WATCHED_PASS = 2
"""The pass that shows whether passes wait for the device, which can't be captured. The first one may do so to build
what is built only once."""


class RowAttention(Protocol):
    """Attention of one new token of each sequence over slots that the device knows."""

    positions: Tensor
    """Of the new tokens; set before the first pass."""

    def load(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Sets the slots: those of these chunks, a row each. Returns whether memory that a graph uses has moved."""
        ...

    def make_room(self, tokens: int) -> bool:
        """For sequences of so many tokens. Returns the same."""
        ...

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes the keys and values of the new tokens, [rows, heads, size] each."""
        ...

    def attend(self, layer: int, queries: Tensor, rule: MaskRule, params: AttentionParams) -> Tensor:
        """The results for the queries of the new tokens, whose keys are written: both are [rows, heads, size]."""
        ...


class NoAttention:
    """For models without attention."""

    positions: Tensor

    def load(self, chunks: Sequence[SequenceChunk]) -> bool:
        return False

    def make_room(self, tokens: int) -> bool:
        return False

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        raise UnsupportedModel("it has attention")

    def attend(self, layer: int, queries: Tensor, rule: MaskRule, params: AttentionParams) -> Tensor:
        raise UnsupportedModel("it has attention")


class RowPasses:
    """Runs the decode passes of a hybrid model: the first one of so many rows is computed, the second captured."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], attention: RowAttention, capture: Capture) -> None:
        """`compute`: the logits of the first rows, from their tokens and rotary positions."""
        self._compute = compute
        self.attention = attention
        self._capture: Capture | None = capture
        self._passes: dict[int, Pass | None] = {}
        """By the number of rows; None where it is not captured."""
        self._inputs: Tensor | None = None
        """The tokens, positions and rotary positions that graphs read."""
        self._computed = 0
        """Passes that were not replayed."""
        self.captured = 0
        """Passes that were captured so far."""

    def clear(self) -> None:
        """Call when memory has moved that graphs use."""
        self._passes.clear()

    def load(self, chunks: Sequence[SequenceChunk]) -> None:
        """Sets the sequences, in the order of their rows."""
        if self.attention.load(chunks):
            self.clear()

    def run(self, inputs: Tensor, max_position: int) -> Tensor:
        """The logits after the next token of each sequence, a row each: the next pass overwrites them. `inputs`:
        tokens, positions and rotary positions."""
        rows = inputs.shape[1]
        if self.attention.make_room(max_position + 1):
            self.clear()
        if self._inputs is None or self._inputs.shape[1] < rows:
            self._inputs = inputs.new_zeros(3, 2 * rows)
            self.attention.positions = self._inputs[1]
            self.clear()
        mine = self._inputs[:, :rows]
        mine.copy_(inputs)
        return self._run(rows, lambda: self._compute(mine[0], mine[2]))

    def _run(self, rows: int, compute: Pass) -> Tensor:
        known = rows in self._passes
        replay = self._passes.setdefault(rows, None)
        if known and replay is None and self._capture is not None:
            replay = self._passes[rows] = self._try_to_capture(compute)
        if replay is not None:
            return replay()
        self._computed += 1
        if self._capture is None or self._computed != WATCHED_PASS:
            return compute()
        logits, waits = watch_synchronization(compute)
        if waits:
            self._capture = None
        return logits

    def _try_to_capture(self, run: Pass) -> Pass | None:
        """None where it can't be, as for lack of memory: then no other pass is captured either."""
        assert self._capture is not None
        try:
            replay = self._capture(run)
            self.captured += 1
            return replay
        except RuntimeError as error:
            _log.info("Decodes without CUDA graphs: %s", error)
            self._capture = None
            return None
