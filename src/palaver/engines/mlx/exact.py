"""The exact mode: each sequence alone, in passes over aligned blocks of positions.

How a matrix product or an attention kernel rounds depends on its shape. So the block of a token is computed as a whole:
the tokens before it again, and padding after it. Then the shape of a token's pass depends only on its position, however
the sequence was cut into prompt and reply. A probe compares what that gives when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT
from palaver.engines.mlx.model import Floats, MLXModel, SequenceStates

EXACT_CHUNK = 128
"""Prompt tokens of a sequence that a scheduler step computes in the exact mode."""
ROWS = 16
"""Tokens of every pass."""
PROBE_TOKENS = 40


class MlxExactPasses:
    def __init__(self, model: MLXModel) -> None:
        self._model = model

    def run(self, state: SequenceStates, tokens: Sequence[int], need_logits: bool) -> Floats | None:
        """Computes the tokens that the state lacks; the logits after the last. `tokens` are all of the sequence's."""
        if not self._model.always_truncates:
            return self._run_plain(state, tokens, need_logits)
        logits: Floats | None = None
        while state.length < len(tokens):
            start = state.length - state.length % ROWS
            end = min(start + ROWS, len(tokens))
            state.truncate(start)
            block = [*tokens[start:end], *[0] * (start + ROWS - end)]
            if need_logits and end == len(tokens):
                logits = self._model.logits(state, block)[end - start - 1 : end - start]
            else:
                self._model.feed(state, block)
            state.truncate(end)
        return logits

    def _run_plain(self, state: SequenceStates, tokens: Sequence[int], need_logits: bool) -> Floats | None:
        """States that can't be cut can't be padded: the same chunks of the same sequence give the same bits."""
        ids = tokens[state.length :]
        if len(ids) > need_logits:
            self._model.feed(state, ids[: len(ids) - need_logits])
        return self._model.logits(state, ids[-1:]) if need_logits else None


def probe_exactness(model: MLXModel, passes: MlxExactPasses, vocabulary_size: int) -> str:
    """What the bits of a reply depend on in the exact mode. Rows of a mixture of experts depend on each other."""
    tokens = [(7 * place + 3) % vocabulary_size for place in range(PROBE_TOKENS)]
    whole = _logits_in_chunks(model, passes, tokens, [PROBE_TOKENS])
    if not np.array_equal(whole, _logits_in_chunks(model, passes, tokens, [PROBE_TOKENS])):
        return BY_BATCH
    if model.is_mixture or not model.always_truncates:
        return BY_CACHE
    others = ([1] * PROBE_TOKENS, [7, 22, 11], [33, 1, 6])
    alike = all(np.array_equal(whole, _logits_in_chunks(model, passes, tokens, sizes)) for sizes in others)
    return BY_TEXT if alike else BY_CACHE


def _logits_in_chunks(model: MLXModel, passes: MlxExactPasses, tokens: Sequence[int], sizes: Sequence[int]) -> Floats:
    state, end = model.new_state(), 0
    for size in sizes:
        end += size
        logits = passes.run(state, tokens[:end], need_logits=end == len(tokens))
    assert logits is not None
    return logits
