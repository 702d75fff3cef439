"""The model's own cache of one sequence, for models whose state can't be cut: it can only be carried on or copied."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


class State:
    """What the model has computed of one sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._name = "past_key_values" if "past_key_values" in _parameters(model) else "cache_params"

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Computes these tokens too; the logits after the last."""
        batch = torch.tensor([list(ids)], device=self._model.device)
        out = self._model(input_ids=batch, use_cache=True, logits_to_keep=1, **{self._name: self._cache})
        return last_logits(out)

    def copy(self) -> State:
        twin = copy.copy(self)
        twin._cache = copy.deepcopy(self._cache)
        return twin

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(vars(self._cache)))


class NoState:
    """For a model without any cache: computes everything at each token."""

    nbytes = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> Tensor:
        self._ids.extend(ids)
        return last_logits(self._model(input_ids=torch.tensor([self._ids], device=self._model.device)))

    def copy(self) -> NoState:
        twin = NoState(self._model)
        twin._ids = list(self._ids)
        return twin


def last_logits(out: Any) -> Tensor:
    logits: Tensor = out.logits[0, -1]
    return logits


def _parameters(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a cache, whatever its layers are made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif type(value).__module__.startswith("transformers.cache"):
        yield from _tensors(vars(value))
