"""The weights of a plain decoder as numpy arrays: read from a checkpoint's files, or taken from another framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.checkpoint import Checkpoint, StoredTensor
from palaver.engines.core.decoder_config import QKV, DecoderConfig, layer_prefix
from palaver.errors import BrokenModel

Floats = NDArray[np.float32]
WeightType = Literal["float32", "bfloat16", "float16"]
STORED_TYPES: dict[str, tuple[WeightType, type[np.generic]]] = {
    "F32": ("float32", np.float32),
    "BF16": ("bfloat16", np.uint16),
    "F16": ("float16", np.float16),
}
"""The types of a safetensors file, and how numpy holds them: it has no bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """An array in the type that it was stored in."""

    array: NDArray[Any]
    """bfloat16 as uint16."""
    dtype: WeightType

    def to_float32(self) -> Floats:
        if self.dtype == "bfloat16":
            return (self.array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.ascontiguousarray(self.array, np.float32)

    def narrowed(self, has_float16: bool) -> Weight:
        """In the narrowest type that holds the numbers without loss; bfloat16 where both do."""
        if self.dtype == "bfloat16":
            return self
        wide = self.to_float32()
        bits = wide.view(np.uint32)
        if not (bits & np.uint32(0xFFFF)).any():
            return Weight((bits >> np.uint32(16)).astype(np.uint16), "bfloat16")
        if not has_float16:
            return Weight(wide, "float32")
        if self.dtype == "float16":
            return self
        with np.errstate(over="ignore"):
            half = wide.astype(np.float16)
        return Weight(half, "float16") if np.array_equal(half.astype(np.float32), wide) else Weight(wide, "float32")


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
    qkv: Projection
    qk_norm: NormWeights | None
    """A row of weights for each head, queries first."""
    output: Projection
    post_attention_norm: NormWeights
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    embedding: Floats
    """[tokens, hidden size]."""
    layers: Iterable[LayerWeights]
    """Read once, one after the other: a layer need not stay in memory."""
    norm: NormWeights
    lm_head: Projection


def read_weights(checkpoint: Checkpoint, config: DecoderConfig) -> DecoderWeights:
    """The weights in a checkpoint's files. Raises BrokenModel where a tensor isn't as its header says."""
    reader = _TensorReader(checkpoint, config)
    embedding = reader.weight("model.embed_tokens")
    return DecoderWeights(
        embedding=embedding.to_float32(),
        layers=reader.layers(),
        norm=reader.norm("model.norm"),
        lm_head=Projection(embedding if config.tied else reader.weight("lm_head")),
    )


class _TensorReader:
    def __init__(self, checkpoint: Checkpoint, config: DecoderConfig) -> None:
        self._tensors = checkpoint.tensors
        self._config = config

    def layers(self) -> Iterator[LayerWeights]:
        for layer in range(self._config.num_layers):
            prefix = layer_prefix(layer)
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            yield LayerWeights(
                input_norm=self.norm(f"{prefix}input_layernorm"),
                qkv=concatenate([self._projection(attention, name) for name in QKV]),
                qk_norm=self._qk_norm(attention) if self._config.qk_norm else None,
                output=self._projection(attention, "o_proj"),
                post_attention_norm=self.norm(f"{prefix}post_attention_layernorm"),
                gate=self._projection(mlp, "gate_proj"),
                up=self._projection(mlp, "up_proj"),
                down=self._projection(mlp, "down_proj"),
            )

    def weight(self, module: str) -> Weight:
        return read_tensor(self._tensors[f"{module}.weight"])

    def norm(self, module: str) -> NormWeights:
        return NormWeights(self.weight(module).to_float32(), self._config.epsilon)

    def _projection(self, prefix: str, name: str) -> Projection:
        biased = name in self._config.biases
        bias = read_tensor(self._tensors[f"{prefix}{name}.bias"]).to_float32() if biased else None
        return Projection(self.weight(f"{prefix}{name}"), bias)

    def _qk_norm(self, prefix: str) -> NormWeights:
        query, key = (self.norm(f"{prefix}{name}") for name in ("q_norm", "k_norm"))
        rows = [query.weight] * self._config.num_heads + [key.weight] * self._config.num_kv_heads
        return NormWeights(np.stack(rows), query.epsilon)


def read_tensor(tensor: StoredTensor) -> Weight:
    name, kind = STORED_TYPES[tensor.dtype]
    data = np.fromfile(tensor.path, kind, tensor.elements, offset=tensor.offset)
    if data.nbytes != tensor.nbytes:
        raise BrokenModel(f"A tensor in {str(tensor.path)!r} is not as long as its header says.")
    return Weight(data.reshape(tensor.shape), name)


def concatenate(projections: list[Projection]) -> Projection:
    """Side by side: the outputs of the first come first. All have a bias or none has."""
    kinds = {projection.weight.dtype for projection in projections}
    if len(kinds) == 1:
        array = np.concatenate([projection.weight.array for projection in projections])
        weight = Weight(array, projections[0].weight.dtype)
    else:
        weight = Weight(np.concatenate([projection.weight.to_float32() for projection in projections]), "float32")
    biases = [projection.bias for projection in projections if projection.bias is not None]
    return Projection(weight, np.concatenate(biases) if biases else None)
