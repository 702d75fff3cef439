"""A model of mlx-lm or mlx-vlm, and the caches of its sequences. Arrays are evaluated in the thread that makes them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as caches
from numpy.typing import NDArray

if TYPE_CHECKING:
    from palaver.engines.mlx.media import MlxSequenceMedia, VisionDecoder

Floats = NDArray[np.float32]
ALLOCATION_TOKENS = caches.KVCache.step
"""mlx-lm allocates keys and values for so many tokens at a time."""


class SequenceStates:
    """The caches for one sequence, one a layer."""

    def __init__(self, layers: list[Any], length: int = 0) -> None:
        self.layers = layers
        self.length = length
        """Tokens that were computed."""
        self.media: MlxSequenceMedia | None = None
        """The media of the sequence while it runs. A copy of the state has none."""

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
            if _is_plain(layer) and layer.keys is not None and layer.offset < layer.keys.shape[2]:
                layer.keys = mx.contiguous(layer.keys[..., : layer.offset, :])
                layer.values = mx.contiguous(layer.values[..., : layer.offset, :])
                mx.eval(layer.keys, layer.values)


class MergedStates:
    """The states of several sequences in one, for passes that compute the next token of each."""

    def __init__(self, states: Sequence[SequenceStates]) -> None:
        self.layers = _merge(states)
        self.lengths = [state.length for state in states]
        self.media = [state.media for state in states]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def add(self, states: Sequence[SequenceStates]) -> None:
        for layer, other in zip(self.layers, _merge(states), strict=True):
            layer.extend(other)
        self._evaluate()
        self.lengths += [state.length for state in states]
        self.media += [state.media for state in states]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops the other rows."""
        for layer in self.layers:
            layer.filter(mx.array(list(rows)))
        self._evaluate()
        self.lengths = [self.lengths[row] for row in rows]
        self.media = [self.media[row] for row in rows]

    def extract(self, row: int) -> SequenceStates:
        """A copy of one row."""
        state = SequenceStates([layer.extract(row) for layer in self.layers], self.lengths[row])
        state.media = self.media[row]
        mx.eval([layer.state for layer in state.layers])
        return state

    def _evaluate(self) -> None:
        mx.eval([layer.state for layer in self.layers])


class MLXModel:
    """Computes tokens with mlx-lm's code, or with the decoder of a model of mlx-vlm."""

    def __init__(self, module: nn.Module, decoder: VisionDecoder | None = None) -> None:
        """`decoder`: of a model that sees."""
        self._module = module
        self._decoder = decoder
        layers = list(_flatten(self.new_state().layers))
        self.always_truncates = all(map(_is_plain, layers))
        """Whether every state can be cut at every token."""
        self.is_mixture = any("expert" in name or "switch" in name for name, _ in module.named_modules())

    def new_state(self) -> SequenceStates:
        layers = caches.make_prompt_cache(self._module) if self._decoder is None else self._decoder.new_cache()
        return SequenceStates(layers)

    def feed(self, state: SequenceStates, ids: Sequence[int]) -> None:
        """Computes these tokens of one sequence, without logits."""
        self._forward([list(ids)], state.layers, [(state.length, state.media)])
        mx.eval([layer.state for layer in state.layers])
        state.length += len(ids)

    def logits(self, state: SequenceStates, ids: Sequence[int]) -> Floats:
        """Computes these tokens; a row of logits after each of them."""
        logits = self._forward([list(ids)], state.layers, [(state.length, state.media)])
        out = self._evaluate(logits[0], state.layers)
        state.length += len(ids)
        return out

    def merged_logits(self, states: MergedStates, ids: Sequence[int]) -> Floats:
        """Computes one token of each sequence; a row of logits for each."""
        places = list(zip(states.lengths, states.media, strict=True))
        logits = self._forward([[token_id] for token_id in ids], states.layers, places)
        out = self._evaluate(logits[:, -1, :], states.layers)
        states.lengths = [length + 1 for length in states.lengths]
        return out

    def _forward(
        self, ids: list[list[int]], layers: list[Any], places: Sequence[tuple[int, MlxSequenceMedia | None]]
    ) -> mx.array:
        """The logits of each token of each row. `places`: where the tokens of a row begin, and the row's media."""
        if self._decoder is None:
            return self._module(mx.array(ids), cache=layers)
        return self._decoder(mx.array(ids), layers, places)

    def _evaluate(self, logits: mx.array, layers: Sequence[Any]) -> Floats:
        rows = logits.astype(mx.float32)
        mx.eval(rows, [layer.state for layer in layers])
        return np.array(rows, copy=False)

    def token_bytes(self, state: SequenceStates) -> int:
        """The memory of one more token. Windows and recurrent states don't grow."""
        growing = filter(_is_plain, _flatten(state.layers))
        return sum(layer.nbytes // layer.keys.shape[2] for layer in growing)


def _merge(states: Sequence[SequenceStates]) -> list[Any]:
    merged = [type(layers[0]).merge(list(layers)) for layers in zip(*(state.layers for state in states), strict=True)]
    mx.eval([layer.state for layer in merged])
    return merged


def _is_plain(layer: Any) -> bool:
    """Whether the cache holds every token. By name: mlx-vlm has classes of its own with the names of mlx-lm's."""
    return type(layer).__name__ == caches.KVCache.__name__


def _flatten(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if type(layer).__name__ == caches.CacheList.__name__:
            yield from _flatten(layer.caches)
        else:
            yield layer
