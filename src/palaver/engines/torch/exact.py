"""The exact mode: passes of one shape, in which a token's bits don't depend on what is computed beside it.

How a matrix product rounds depends on its number of rows, and which numbers of rows round alike depends on the
processor and the library. So every pass has the same number of rows, padded where there are fewer tokens, and
attention is computed for aligned blocks of positions: the call for a token has a shape that only its position decides.
What that achieves for a model on a machine is probed when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from palaver.engines.base import BY_CACHE, BY_COMPANY, BY_TEXT
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, plan_block, sequence_chunk
from palaver.engines.torch.kv_cache import KVLayout, Slot, SlotAllocator

ROWS = {"cpu": 16}
"""Rows of every pass, by device. Elsewhere more rows cost next to nothing."""
MOST_ROWS = 128

PROMPT = 20
"""Tokens of the probe's prompt."""
PROBE_BYTES = 1 << 24


class ExactPasses:
    """Computes tokens in passes of one shape.

    `packs`: sequences share a pass, which is right where a row's bits depend neither on its place nor on other rows.
    Otherwise each sequence has a pass of its own, in which a token's row is decided by its position.
    """

    def __init__(self, forward: Callable[[ForwardBatch], Tensor], device: torch.device, packs: bool) -> None:
        self._forward = forward
        self._device = device
        self.packs = packs
        self.rows = ROWS.get(device.type, MOST_ROWS)

    def run(self, runs: Sequence[SequenceChunk], asked: bool) -> Tensor:
        """The logits after the last token of each sequence; anything where they are not asked for."""
        singles = all(len(run.ids) == 1 for run in runs)
        size = self.rows if self.packs and singles else 1
        return torch.cat([self._together(runs[i : i + size], asked) for i in range(0, len(runs), size)])

    def _together(self, runs: Sequence[SequenceChunk], asked: bool) -> Tensor:
        if len(runs) > 1:
            return self._pass(runs, asked)
        blocks = list(_blocks(runs[0], self.rows))
        for block in blocks[:-1]:
            self._pass([block], False)
        return self._pass(blocks[-1:], asked)

    def _pass(self, runs: Sequence[SequenceChunk], asked: bool) -> Tensor:
        before = 0 if self.packs else runs[0].start % self.rows
        logits = self._forward(plan_block(runs, self.rows, before, self._device, asked))
        if not asked:
            return logits[:0]
        end = before + sum(len(run.ids) for run in runs)
        return logits[before:end] if len(runs) > 1 else logits[end - 1 : end]


def _blocks(run: SequenceChunk, size: int) -> list[SequenceChunk]:
    """The same tokens, cut at multiples of the size."""
    stop = run.start + len(run.ids)
    starts = [run.start, *range(run.start - run.start % size + size, stop, size)]
    ends = [*starts[1:], stop]
    return [
        replace(run, start=start, ids=run.ids[start - run.start : end - run.start])
        for start, end in zip(starts, ends, strict=True)
    ]


def probe_exactness(
    forward: Callable[[ForwardBatch], Tensor], layout: KVLayout, ids: Sequence[int], may_pack: bool
) -> tuple[ExactPasses, str]:
    """The quickest passes that keep the most, and what the bits of a reply depend on with them.

    `may_pack`: False for models that treat a row by what the others are, as mixtures of experts do.
    """
    for packs in (True, False) if may_pack else (False,):
        passes = ExactPasses(forward, layout.device, packs)
        if _Trial(passes, layout, ids).depends_on_text_alone():
            return passes, BY_TEXT if may_pack else BY_CACHE
    passes = ExactPasses(forward, layout.device, False)
    return passes, BY_CACHE if _Trial(passes, layout, ids).is_repeatable() else BY_COMPANY


class _Trial:
    """One text, computed alone and in one piece, then in pieces and among others."""

    def __init__(self, passes: ExactPasses, layout: KVLayout, ids: Sequence[int]) -> None:
        self._passes = passes
        self._lanes = SlotAllocator(layout, PROBE_BYTES)
        self._ids = ids
        self._alone = self._step([self._filled([PROMPT])])[0]

    def depends_on_text_alone(self) -> bool:
        pieces = self._filled([7, 11, *[1] * (PROMPT - 18)])
        others = [self._filled([3]), self._filled([1, 17])]
        return torch.equal(self._step([others[0], pieces, others[1]])[1], self._alone)

    def is_repeatable(self) -> bool:
        others = [self._filled([3]), self._filled([1, 17])]
        again = self._filled([PROMPT])
        return torch.equal(self._step([others[0], again, others[1]])[1], self._alone)

    def _filled(self, sizes: Sequence[int]) -> tuple[Slot, int]:
        """A lane with the beginning of the text, computed in pieces of these sizes."""
        lane, at = self._lanes.open(len(self._ids)), 0
        for size in sizes:
            self._passes.run([sequence_chunk(lane, at, self._ids[at : at + size])], False)
            at += size
        return lane, at

    def _step(self, sequences: Sequence[tuple[Slot, int]]) -> Tensor:
        return self._passes.run([sequence_chunk(lane, at, self._ids[at : at + 1]) for lane, at in sequences], True)
