"""The exact mode: every pass has one sequence and the same number of rows.

How a matrix product rounds depends on its number of rows. A pass with fewer tokens is filled up with tokens after the
last one, which can't change earlier ones and are removed again. Attention is computed without flash attention and over
keys and values in f32. What that achieves on a machine is probed when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT
from palaver.engines.llamacpp.context import Context, Floats
from palaver.engines.llamacpp.passes import Chunk

ROWS = 16
"""Tokens of every pass."""
EXACT_CHUNK = 128
"""Prompt tokens of a sequence that a scheduler step computes."""
PROBE_TOKENS = 40


class LlamaExactPasses:
    max_chunk = EXACT_CHUNK
    """The chunk size must not depend on other sequences."""
    prefills_last_token = False
    max_replayed = 0

    def __init__(self, context: Context, pads: bool = True) -> None:
        """`pads`: False for states that can't be cut: their passes have as many rows as tokens."""
        self._context = context
        self._pads = pads
        self.padding = ROWS if pads else 0
        """Cells that a sequence needs beyond its tokens."""

    def run(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        """A row of logits for each chunk; no rows without `need_logits`."""
        rows = [self._run_chunk(chunk, need_logits) for chunk in chunks]
        return np.concatenate(rows)

    def _run_chunk(self, chunk: Chunk, need_logits: bool) -> Floats:
        number, start, ids, _ = chunk
        for place in range(0, len(ids), ROWS):
            piece = ids[place : place + ROWS]
            logits = self._run_pass(number, start + place, piece, need_logits and place + ROWS >= len(ids))
        return logits

    def _run_pass(self, number: int, start: int, ids: Sequence[int], need_logits: bool) -> Floats:
        missing = ROWS - len(ids) if self._pads else 0
        if not missing:
            return self._context.decode([(number, start, ids)], need_logits)
        end = start + len(ids)
        parts = [(number, start, ids), (number, end, [ids[-1]] * missing)]
        logits = self._context.decode(parts, need_logits, outputs=1)
        self._context.truncate(number, end)
        return logits


def probe_exactness(context: Context, passes: LlamaExactPasses) -> str:
    """What the bits of a reply depend on. Uses the first two sequences, which must be empty, and empties them."""
    ids = [token % context.vocabulary_size for token in range(3, 3 + 7 * PROBE_TOKENS, 7)]
    try:
        whole = passes.run([Chunk(0, 0, ids)], True)
        if context.settings.sequences > 1:
            passes.run([Chunk(1, 0, ids[:9])], True)
        if not _is_repeated(context, passes, ids, [len(ids)], whole):
            return BY_BATCH
        return BY_TEXT if _is_repeated(context, passes, ids, [5, 20, *[1] * 15], whole) else BY_CACHE
    finally:
        for number in range(min(2, context.settings.sequences)):
            context.truncate(number, 0)


def _is_repeated(
    context: Context, passes: LlamaExactPasses, ids: Sequence[int], sizes: Sequence[int], expected: Floats
) -> bool:
    """Whether the tokens give the same bits when they are computed in chunks of these sizes."""
    context.truncate(0, 0)
    at = 0
    for size in sizes:
        logits = passes.run([Chunk(0, at, ids[at : at + size])], True)
        at += size
    return bool(np.array_equal(logits, expected))
