"""How the model is run: tokens of sequences in, logits after the last of each out."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from palaver.engines.torch.sequence import Sequence


class Runner(Protocol):
    def begin(self, sequence: Sequence) -> None:
        """Makes room for the sequence and sets how many of its tokens are computed already."""
        ...

    def run(self, sequences: Many[Sequence], counts: Many[int]) -> Tensor:
        """Computes the next `count` tokens of each; one row of logits for each, after the last of them."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence leaves; what was computed may be kept for others."""
        ...


class PlainRunner:
    """The model's own cache, a sequence at a time: right for every model, and nothing is reused."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._caches: dict[Sequence, Any] = {}

    def begin(self, sequence: Sequence) -> None:
        self._caches[sequence] = DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def run(self, sequences: Many[Sequence], counts: Many[int]) -> Tensor:
        rows = [self._run_one(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        return torch.stack(rows)

    def end(self, sequence: Sequence) -> None:
        self._caches.pop(sequence, None)

    def _run_one(self, sequence: Sequence, count: int) -> Tensor:
        start = sequence.computed
        ids = torch.tensor([sequence.tokens[start : start + count]], device=self._model.device)
        out = self._model(input_ids=ids, past_key_values=self._caches[sequence], use_cache=True, logits_to_keep=1)
        sequence.computed += count
        logits: Tensor = out.logits[0, -1]
        return logits
