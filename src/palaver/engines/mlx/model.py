"""A model of mlx-lm, and the caches of its sequences. Every array is evaluated in the thread that makes it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as caches
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ALLOCATION_TOKENS = caches.KVCache.step
"""mlx-lm allocates keys and values for so many tokens at a time."""


class SequenceStates:
    """mlx-lm's caches for one sequence, one a layer."""

    def __init__(self, layers: list[Any], length: int = 0) -> None:
        self.layers = layers
        self.length = length
        """Tokens that were computed."""

    @property
    def can_truncate(self) -> bool:
        """A sliding window that has moved, or a recurrent state, can't be cut."""
        return bool(caches.can_trim_prompt_cache(self.layers))

    @property
    def nbytes(self) -> int:
        return 0 if self.length == 0 else sum(layer.nbytes for layer in self.layers)

    def truncate(self, length: int) -> None:
        assert length <= self.length
        if length < self.length:
            caches.trim_prompt_cache(self.layers, self.length - length)
            self.length = length

    def copy(self) -> SequenceStates:
        """Shares the arrays until one of the two is written to."""
        return SequenceStates(copy.deepcopy(self.layers), self.length)

    def compact(self) -> None:
        """Frees the memory behind the last token, where keys and values are plain arrays."""
        for layer in _flatten(self.layers):
            if type(layer) is caches.KVCache and layer.keys is not None and layer.offset < layer.keys.shape[2]:
                layer.keys = mx.contiguous(layer.keys[..., : layer.offset, :])
                layer.values = mx.contiguous(layer.values[..., : layer.offset, :])
                mx.eval(layer.keys, layer.values)


class MergedStates:
    """The states of several sequences in one, for passes that compute the next token of each."""

    def __init__(self, states: Sequence[SequenceStates]) -> None:
        self.layers = _merge(states)
        self.lengths = [state.length for state in states]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def add(self, states: Sequence[SequenceStates]) -> None:
        for layer, other in zip(self.layers, _merge(states), strict=True):
            layer.extend(other)
        self._evaluate()
        self.lengths += [state.length for state in states]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops the other rows."""
        for layer in self.layers:
            layer.filter(mx.array(list(rows)))
        self._evaluate()
        self.lengths = [self.lengths[row] for row in rows]

    def extract(self, row: int) -> SequenceStates:
        """A copy of one row."""
        state = SequenceStates([layer.extract(row) for layer in self.layers], self.lengths[row])
        mx.eval([layer.state for layer in state.layers])
        return state

    def _evaluate(self) -> None:
        mx.eval([layer.state for layer in self.layers])


class MLXModel:
    """Computes tokens with mlx-lm's code."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        layers = list(_flatten(self.new_state().layers))
        self.always_truncates = all(type(layer) is caches.KVCache for layer in layers)
        """Whether every state can be cut at every token."""
        self.is_mixture = any("expert" in name or "switch" in name for name, _ in module.named_modules())

    def new_state(self) -> SequenceStates:
        return SequenceStates(caches.make_prompt_cache(self._module))

    def feed(self, state: SequenceStates, ids: Sequence[int]) -> None:
        """Computes these tokens of one sequence, without logits."""
        self._module(mx.array([list(ids)]), cache=state.layers)
        mx.eval([layer.state for layer in state.layers])
        state.length += len(ids)

    def logits(self, state: SequenceStates, ids: Sequence[int]) -> Floats:
        """Computes these tokens; a row of logits after each of them."""
        out = self._evaluate(self._module(mx.array([list(ids)]), cache=state.layers)[0], state.layers)
        state.length += len(ids)
        return out

    def merged_logits(self, states: MergedStates, ids: Sequence[int]) -> Floats:
        """Computes one token of each sequence; a row of logits for each."""
        tokens = mx.array([[token_id] for token_id in ids])
        out = self._evaluate(self._module(tokens, cache=states.layers)[:, -1, :], states.layers)
        states.lengths = [length + 1 for length in states.lengths]
        return out

    def _evaluate(self, logits: mx.array, layers: Sequence[Any]) -> Floats:
        rows = logits.astype(mx.float32)
        mx.eval(rows, [layer.state for layer in layers])
        return np.array(rows, copy=False)

    def token_bytes(self, state: SequenceStates) -> int:
        """The memory of one more token. Windows and recurrent states don't grow."""
        growing = [layer for layer in _flatten(state.layers) if type(layer) is caches.KVCache]
        return sum(layer.nbytes // layer.keys.shape[2] for layer in growing)


def _merge(states: Sequence[SequenceStates]) -> list[Any]:
    merged = [type(layers[0]).merge(list(layers)) for layers in zip(*(state.layers for state in states), strict=True)]
    mx.eval([layer.state for layer in merged])
    return merged


def _flatten(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if isinstance(layer, caches.CacheList):
            yield from _flatten(layer.caches)
        else:
            yield layer
