"""Finds out by trying what a model's caches can do. A trial that raises is a no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from palaver.engines.base import BY_BATCH
from palaver.engines.core.options import EngineOptions
from palaver.engines.mlx.exact import MlxExactPasses, probe_exactness
from palaver.engines.mlx.model import Floats, MergedStates, MLXModel, SequenceStates
from palaver.engines.mlx.runner import MLXRunner

LENGTH = 24
"""Tokens of the probe's text."""
TOLERANCE = 0.02
"""Relative to the largest logit. What differs more is not rounding."""


class MlxProbe:
    def __init__(self, module: Any) -> None:
        self._model = MLXModel(module)
        state = self._model.new_state()
        self.vocabulary_size = self._model.logits(state, [0]).shape[-1]
        self._token_bytes = self._model.token_bytes(state)
        self._ids = [(7 * place + 3) % self.vocabulary_size for place in range(LENGTH + 1)]
        self._expected = self._model.logits(self._fed(LENGTH), self._ids[LENGTH:])

    def make_runner(self, limit_bytes: int, options: EngineOptions) -> tuple[MLXRunner, str]:
        """The runner, and what the bits of a reply depend on."""
        if self._model.always_truncates:
            self._model.always_truncates = _succeeds(self._truncates)
        passes = MlxExactPasses(self._model) if options.exact else None
        exactness = BY_BATCH if passes is None else probe_exactness(self._model, passes, self.vocabulary_size)
        merges = passes is None and _succeeds(self._merges)
        return MLXRunner(self._model, limit_bytes, self._token_bytes, merges, passes), exactness

    def _fed(self, tokens: int) -> SequenceStates:
        state = self._model.new_state()
        self._model.feed(state, self._ids[:tokens])
        return state

    def _truncates(self) -> bool:
        """Whether a copy that is cut goes on as if the rest had never been, and leaves the original alone."""
        original = self._fed(LENGTH)
        copy = original.copy()
        copy.truncate(LENGTH // 2)
        self._model.feed(copy, [1, 2, 3])
        copy.truncate(LENGTH // 2)
        self._model.feed(copy, self._ids[LENGTH // 2 : LENGTH])
        return all(self._is_expected(self._model.logits(state, self._ids[LENGTH:])) for state in (copy, original))

    def _merges(self) -> bool:
        """Whether a sequence has the logits it has alone if it is merged with shorter ones, joined and left by others,
        and taken out again."""
        short, joining = self._fed(3), self._fed(LENGTH // 2)
        merged = MergedStates([self._fed(LENGTH - 2), short])
        self._model.merged_logits(merged, [self._ids[LENGTH - 2], 1])
        merged.add([joining])
        self._model.merged_logits(merged, [self._ids[LENGTH - 1], 2, 3])
        merged.keep([0, 2])
        alone = merged.extract(0)
        rows = self._model.merged_logits(merged, [self._ids[LENGTH], 4])
        return self._is_expected(rows[:1]) and self._is_expected(self._model.logits(alone, self._ids[LENGTH:]))

    def _is_expected(self, logits: Floats) -> bool:
        return bool(np.abs(logits - self._expected).max() <= TOLERANCE * max(1.0, float(np.abs(self._expected).max())))


def _succeeds(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except Exception:
        return False
