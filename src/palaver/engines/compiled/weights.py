"""The weights of a decoder as numpy arrays: read from a checkpoint's files, or taken from another framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.checkpoint import Checkpoint, StoredTensor
from palaver.engines.core.decoder_config import (
    LAYER_NORMS,
    MLP,
    QKV,
    ROUTER,
    SINKS,
    DecoderConfig,
    expert_projection,
    layer_prefix,
)
from palaver.errors import BrokenModel
from palaver.gguf import TENSOR_TYPES

Floats = NDArray[np.float32]
FLOAT_ARRAYS: dict[str, type[np.generic]] = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
"""How numpy holds each type of floats: it has no bfloat16."""
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""The other types of weights, as GGUF files have them."""
_PANEL_BYTES = {"Q4_K": 148, "Q5_K": 180, "MXFP4": 22}
"""Of a block in memory, where it is larger than in a file."""
_BLOCKS = {kind.name: kind for kind in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """An array in the type that it was stored in."""

    array: NDArray[Any]
    """bfloat16 as uint16; quantised rows as bytes."""
    dtype: str
    """The name of the type in safetensors and GGUF files, such as BF16 or Q4_K."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[outputs, inputs] of a matrix."""
        if self.dtype in FLOAT_ARRAYS:
            return self.array.shape
        kind = _BLOCKS[self.dtype]
        *outputs, row_bytes = self.array.shape
        return (*outputs, row_bytes // kind.nbytes * kind.block)

    def to_float32(self) -> Floats:
        """A copy, of floats only."""
        if self.dtype == "BF16":
            return (self.array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.array(self.array, np.float32, order="C")

    def narrowed(self) -> Weight:
        """In the narrowest type that holds the numbers without loss; bfloat16 where both types of 16 bits do."""
        if self.dtype != "F32":
            return self
        bits = np.ascontiguousarray(self.array).view(np.uint32)
        if not (bits & np.uint32(0xFFFF)).any():
            return Weight((bits >> np.uint32(16)).astype(np.uint16), "BF16")
        with np.errstate(over="ignore"):
            half = self.array.astype(np.float16)
        return Weight(half, "F16") if np.array_equal(half.astype(np.float32), self.array) else self


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear layer, or several side by side."""

    weight: Weight
    """[outputs, inputs]."""
    bias: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    weight: Floats
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    input_norm: NormWeights
    qkv: tuple[Projection, ...]
    """Queries, keys and values, one after the other or in one projection."""
    qk_norm: NormWeights | None
    """A row of weights for each head, queries first."""
    output: Projection
    post_attention_norm: NormWeights
    """Before the feed-forward part."""
    gate: Projection
    up: Projection
    down: Projection
    """The experts one after the other, if there are several."""
    router: Projection | None = None
    """What chooses the experts."""
    output_norm: NormWeights | None = None
    result_norm: NormWeights | None = None
    """Of what attention and the feed-forward part add."""
    window: int = 0
    """How many keys a query sees; 0 for all."""
    sinks: Floats | None = None
    """Of each head, a score that no key has."""
    rotary: int = 0
    """The number of the table by which queries and keys rotate."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    embedding: Weight
    """[tokens, hidden size]."""
    layers: Iterable[LayerWeights]
    """Read once, one after the other: a layer need not stay in memory."""
    norm: NormWeights
    lm_head: Projection
    """Its weight is that of the embedding where they are tied."""


def read_weights(checkpoint: Checkpoint, config: DecoderConfig) -> DecoderWeights:
    """The weights in a checkpoint's files. Raises BrokenModel where a tensor isn't as its header says."""
    reader = _TensorReader(checkpoint, config)
    embedding = reader.weight("model.embed_tokens")
    return DecoderWeights(
        embedding=embedding,
        layers=reader.layers(),
        norm=reader.norm("model.norm"),
        lm_head=Projection(embedding if config.tied else reader.weight("lm_head")),
    )


def held_bytes(tensor: StoredTensor) -> int:
    """How much memory its weights take, but for what fills up the last panel."""
    if tensor.dtype not in _PANEL_BYTES:
        return tensor.nbytes
    return tensor.nbytes // _BLOCKS[tensor.dtype].nbytes * _PANEL_BYTES[tensor.dtype]


class _TensorReader:
    def __init__(self, checkpoint: Checkpoint, config: DecoderConfig) -> None:
        self._tensors = checkpoint.tensors
        self._config = config

    def layers(self) -> Iterator[LayerWeights]:
        config = self._config
        for layer in range(config.num_layers):
            prefix = layer_prefix(layer)
            attention = f"{prefix}self_attn."
            norms = [self.norm(prefix + name) for name in (LAYER_NORMS if config.norms_results else LAYER_NORMS[:2])]
            gate, up, down = (self._feed_forward(layer, name) for name in MLP)
            window = config.windows[layer] if config.windows else 0
            yield LayerWeights(
                input_norm=norms[0],
                qkv=tuple(self._projection(attention, name) for name in QKV),
                qk_norm=self._qk_norm(attention) if config.qk_norm else None,
                output=self._projection(attention, "o_proj"),
                post_attention_norm=norms[2] if config.norms_results else norms[1],
                gate=gate,
                up=up,
                down=down,
                router=self._router(prefix) if config.experts is not None else None,
                output_norm=norms[1] if config.norms_results else None,
                result_norm=norms[3] if config.norms_results else None,
                window=window,
                sinks=self.weight(f"{prefix}{SINKS}").to_float32() if config.sinks else None,
                rotary=int(window > 0 and config.local_frequencies is not None),
            )

    def weight(self, module: str) -> Weight:
        return read_tensor(self._tensors[f"{module}.weight"])

    def norm(self, module: str) -> NormWeights:
        weight = self.weight(module).to_float32() + np.float32(self._config.norm_offset)
        return NormWeights(weight, self._config.epsilon)

    def _feed_forward(self, layer: int, name: str) -> Projection:
        experts = self._config.experts
        if experts is None:
            return self._projection(f"{layer_prefix(layer)}mlp.", name)
        stacked = expert_projection(layer, name)
        if f"{stacked}.weight" in self._tensors:
            weight = self.weight(stacked)
            bias = self._bias(stacked).reshape(-1) if experts.biases else None
            return Projection(Weight(weight.array.reshape(-1, weight.array.shape[-1]), weight.dtype), bias)
        modules = [expert_projection(layer, name, expert) for expert in range(experts.count)]
        each = [self.weight(module) for module in modules]
        bias = np.concatenate([self._bias(module) for module in modules]) if experts.biases else None
        if len({weight.dtype for weight in each}) > 1:
            return Projection(Weight(np.concatenate([weight.to_float32() for weight in each]), "F32"), bias)
        return Projection(Weight(np.concatenate([weight.array for weight in each]), each[0].dtype), bias)

    def _router(self, prefix: str) -> Projection:
        experts = self._config.experts
        assert experts is not None
        module = f"{prefix}{ROUTER}"
        return Projection(self.weight(module), self._bias(module) if experts.biases else None)

    def _projection(self, prefix: str, name: str) -> Projection:
        module = f"{prefix}{name}"
        return Projection(self.weight(module), self._bias(module) if name in self._config.biases else None)

    def _bias(self, module: str) -> Floats:
        return read_tensor(self._tensors[f"{module}.bias"]).to_float32()

    def _qk_norm(self, prefix: str) -> NormWeights:
        query, key = (self.norm(f"{prefix}{name}") for name in ("q_norm", "k_norm"))
        rows = [query.weight] * self._config.num_heads + [key.weight] * self._config.num_kv_heads
        return NormWeights(np.stack(rows), query.epsilon)


def read_tensor(tensor: StoredTensor) -> Weight:
    """The tensor in its file, which is mapped and not read."""
    kind = FLOAT_ARRAYS.get(tensor.dtype)
    try:
        data = np.memmap(tensor.path, np.uint8, "r", tensor.offset, tensor.nbytes)
        array = data.reshape(*tensor.shape[:-1], -1) if kind is None else data.view(kind).reshape(tensor.shape)
    except (OSError, ValueError) as error:
        raise BrokenModel(f"A tensor in {str(tensor.path)!r} is not as long as its header says.") from error
    return Weight(_unpair(array, tensor.paired_heads) if tensor.paired_heads else array, tensor.dtype)


def _unpair(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """The rows of each head, of which each two that turn together lie side by side: first all first ones of a pair."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
