"""The exact mode: passes of one shape, in which a token's bits don't depend on the other rows of the batch.

How a matrix product rounds depends on its number of rows, and which numbers of rows round alike depends on the
processor and the library. So every pass has the same number of rows, padded where there are fewer tokens, and
attention is computed for aligned blocks of positions: the shape of a token's call depends only on its position. What
that achieves for a model on a machine is probed when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT
from palaver.engines.core.kv_cache import Slot, SlotAllocator
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, build_block_batch, sequence_chunk
from palaver.engines.torch.tensors import TensorLayout

EXACT_CHUNK = 128
"""Prompt tokens of a sequence that a scheduler step computes in the exact mode."""
ROWS = {"cpu": 16}
"""Rows of every pass, by device type. On accelerators more rows cost next to nothing."""
DEFAULT_ROWS = 128

PROMPT_TOKENS = 20
"""Tokens of the probe's prompt."""
PROBE_BYTES = 1 << 24


class ExactPasses:
    """Computes tokens in passes of one shape.

    `packs`: sequences share a pass, which is right where a row's bits depend neither on its index nor on other rows.
    Otherwise each sequence has a pass of its own, in which a token's row is decided by its position.
    """

    def __init__(self, forward: Callable[[ForwardBatch], Tensor], device: torch.device, packs: bool) -> None:
        self._forward = forward
        self._device = device
        self.packs = packs
        self.rows = ROWS.get(device.type, DEFAULT_ROWS)

    def run(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        """The logits after the last token of each sequence; undefined without `need_logits`."""
        single_tokens = all(len(chunk.ids) == 1 for chunk in chunks)
        size = self.rows if self.packs and single_tokens else 1
        return torch.cat([self._run_group(chunks[i : i + size], need_logits) for i in range(0, len(chunks), size)])

    def _run_group(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        if len(chunks) > 1:
            return self._run_pass(chunks, need_logits)
        blocks = list(_split_into_blocks(chunks[0], self.rows))
        for block in blocks[:-1]:
            self._run_pass([block], False)
        return self._run_pass(blocks[-1:], need_logits)

    def _run_pass(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        padding = 0 if self.packs else chunks[0].start % self.rows
        logits = self._forward(build_block_batch(chunks, self.rows, padding, self._device, need_logits))
        if not need_logits:
            return logits[:0]
        end = padding + sum(len(chunk.ids) for chunk in chunks)
        return logits[padding:end] if len(chunks) > 1 else logits[end - 1 : end]


def _split_into_blocks(chunk: SequenceChunk, size: int) -> list[SequenceChunk]:
    """The same tokens, split at multiples of the size."""
    stop = chunk.start + len(chunk.ids)
    starts = [chunk.start, *range(chunk.start - chunk.start % size + size, stop, size)]
    ends = [*starts[1:], stop]
    return [
        replace(chunk, start=start, ids=chunk.ids[start - chunk.start : end - chunk.start])
        for start, end in zip(starts, ends, strict=True)
    ]


def probe_exactness(
    forward: Callable[[ForwardBatch], Tensor], layout: TensorLayout, ids: Sequence[int], may_pack: bool
) -> tuple[ExactPasses, str]:
    """The fastest passes with the strongest guarantee, and what the bits of a reply depend on with them.

    `may_pack`: False for models that treat a row depending on the others, such as mixtures of experts.
    """
    for packs in (True, False) if may_pack else (False,):
        passes = ExactPasses(forward, layout.device, packs)
        if _Trial(passes, layout, ids).depends_on_text_alone():
            return passes, BY_TEXT if may_pack else BY_CACHE
    passes = ExactPasses(forward, layout.device, False)
    return passes, BY_CACHE if _Trial(passes, layout, ids).is_repeatable() else BY_BATCH


class _Trial:
    """Compares the logits of one text, computed alone in one chunk, with those in several chunks and in a batch."""

    def __init__(self, passes: ExactPasses, layout: TensorLayout, ids: Sequence[int]) -> None:
        self._passes = passes
        self._slots = SlotAllocator(layout, PROBE_BYTES)
        self._ids = ids
        self._alone = self._decode([self._prefill([PROMPT_TOKENS])])[0]

    def depends_on_text_alone(self) -> bool:
        in_chunks = self._prefill([7, 11, *[1] * (PROMPT_TOKENS - 18)])
        return self._is_same_in_batch(in_chunks)

    def is_repeatable(self) -> bool:
        return self._is_same_in_batch(self._prefill([PROMPT_TOKENS]))

    def _is_same_in_batch(self, sequence: tuple[Slot[Tensor], int]) -> bool:
        others = [self._prefill([3]), self._prefill([1, 17])]
        return torch.equal(self._decode([others[0], sequence, others[1]])[1], self._alone)

    def _prefill(self, chunk_sizes: Sequence[int]) -> tuple[Slot[Tensor], int]:
        """A slot with the start of the text, computed in chunks of these sizes, and its length."""
        slot, at = self._slots.allocate(len(self._ids)), 0
        for size in chunk_sizes:
            self._passes.run([sequence_chunk(slot, at, self._ids[at : at + size])], False)
            at += size
        return slot, at

    def _decode(self, sequences: Sequence[tuple[Slot[Tensor], int]]) -> Tensor:
        return self._passes.run([sequence_chunk(slot, at, self._ids[at : at + 1]) for slot, at in sequences], True)
