"""The weights of a plain decoder as its CUDA step reads them: what the kernels can compute, and how each product is
divided among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch import step_kernels
from palaver.engines.torch.plain_decoder import DecoderLayer, Linear, PlainDecoder

ROWS = 32
"""Rows of a tile in a decode step."""


class TileShape(NamedTuple):
    """How a product is divided. Only the number of parts of K changes bits, and it follows from the sizes alone."""

    rows: int
    outputs: int
    depth: int
    stages: int
    warps: int = 4
    distance: int = 0
    early: bool = False


class VectorShape(NamedTuple):
    """How the product with a single row is divided."""

    outputs: int
    depth: int
    warps: int
    ahead: int = 0


TILES: dict[tuple[int, int], TileShape] = {
    (6144, 4096): TileShape(ROWS, 64, 128, 5, 4, 8),
    (4096, 4096): TileShape(ROWS, 64, 128, 5),
    (12288, 4096): TileShape(ROWS, 64, 64, 3),
    (4096, 12288): TileShape(ROWS, 64, 128, 5, 4, 1, True),
    (4096, 1024): TileShape(ROWS, 64, 128, 4, 4, 8),
    (1024, 2048): TileShape(ROWS, 64, 128, 4, 4, 8),
    (3072, 1024): TileShape(ROWS, 64, 64, 4, 4, 16),
    (1024, 3072): TileShape(ROWS, 64, 128, 3, 4, 6),
}
"""By the numbers of outputs and inputs: what was quickest on an H200."""
VECTORS: dict[tuple[int, int], VectorShape] = {
    (6144, 4096): VectorShape(4, 4096, 8),
    (4096, 4096): VectorShape(8, 2048, 8),
    (12288, 4096): VectorShape(2, 4096, 4),
    (4096, 12288): VectorShape(8, 1024, 4),
    (151936, 4096): VectorShape(4, 4096, 8, 264),
    (4096, 1024): VectorShape(2, 1024, 2),
    (1024, 2048): VectorShape(4, 2048, 4, 264),
    (3072, 1024): VectorShape(4, 1024, 2, 132),
    (1024, 3072): VectorShape(4, 4096, 8, 264),
    (151936, 1024): VectorShape(4, 1024, 2, 528),
}
"""The same for single rows."""
BUSY_TILES = 128
"""Tiles of outputs from which a product keeps the whole device busy."""
MIN_PART = 768
"""Inputs that a part of a product has at least."""


@dataclass(frozen=True, slots=True)
class TiledProjection:
    """A linear layer and how its products are divided."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None
    outputs: int
    inputs: int
    split: int
    tile: TileShape
    prefill_tile: TileShape
    vector: VectorShape

    @classmethod
    def of(cls, linear: Linear, gated: bool = False) -> TiledProjection:
        """`gated`: its outputs are those of gate and up, one after the other."""
        weight = linear.weight.t().contiguous()
        outputs, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        if outputs % 64 or inputs % 64:
            raise UnsupportedModel("sizes that are no multiples of 64")
        if gated and linear.bias is not None:
            raise UnsupportedModel("a bias in its feed-forward part")
        split = 1 if gated else _split(outputs, inputs)
        depth = 128 if inputs // split % 128 == 0 else 64
        tile = TILES.get((outputs, inputs), TileShape(ROWS, 64, depth, 4))
        vector = VECTORS.get((outputs, inputs)) or VectorShape(
            4, min(2048, step_kernels.next_power(inputs)), 4, 264 if inputs <= 2048 else 0
        )
        prefill = TileShape(128, 128, 64, 3 if split == 1 and not gated else 4, 8)
        prefill = prefill if outputs % 128 == 0 else TileShape(128, 64, 64, 3)
        return cls(weight, linear.bias, outputs, inputs, split, tile, prefill, vector)


def _split(outputs: int, inputs: int) -> int:
    """In how many parts the inputs are summed: more where there are few outputs to keep the device busy."""
    split = 1
    while (
        2 * split * (outputs // 64) <= BUSY_TILES
        and inputs // (2 * split) >= MIN_PART
        and inputs % (2 * split * 64) == 0
    ):
        split *= 2
    return split


@dataclass(frozen=True, slots=True)
class StepLayer:
    input_gain: Tensor
    qkv: TiledProjection
    query_gain: Tensor
    key_gain: Tensor
    output: TiledProjection
    post_attention_gain: Tensor
    gate_up: TiledProjection
    down: TiledProjection

    @classmethod
    def of(cls, layer: DecoderLayer, num_heads: int) -> StepLayer:
        norm = layer.qk_norm
        gains = layer.input_norm.weight if norm is None else norm.weight
        return cls(
            input_gain=layer.input_norm.weight,
            qkv=TiledProjection.of(layer.qkv_proj),
            query_gain=gains if norm is None else gains[0].contiguous(),
            key_gain=gains if norm is None else gains[num_heads].contiguous(),
            output=TiledProjection.of(layer.o_proj),
            post_attention_gain=layer.post_attention_norm.weight,
            gate_up=TiledProjection.of(layer.gate_up_proj, gated=True),
            down=TiledProjection.of(layer.down_proj),
        )


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of an attention layer."""

    heads: int
    kv_heads: int
    size: int
    norm: bool

    @classmethod
    def of(cls, parts: PlainDecoder) -> HeadShape:
        if parts.head_dim not in (32, 64, 128, 256):
            raise UnsupportedModel(f"heads of size {parts.head_dim}")
        norms = {layer.qk_norm is not None for layer in parts.layers}
        if len(norms) > 1:
            raise UnsupportedModel("norms of queries and keys in some layers only")
        return cls(parts.num_heads, parts.num_kv_heads, parts.head_dim, norms.pop())

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        return step_kernels.next_power(self.group)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "H": self.heads,
            "KVH": self.kv_heads,
            "G": self.group,
            "GP": self.padded_group,
            "D": self.size,
            "T": step_kernels.TILE,
        }


def check_norms(parts: PlainDecoder) -> None:
    epsilons = {parts.norm.epsilon, *(layer.input_norm.epsilon for layer in parts.layers)}
    epsilons |= {layer.post_attention_norm.epsilon for layer in parts.layers}
    head_epsilons = {layer.qk_norm.epsilon for layer in parts.layers if layer.qk_norm is not None}
    if len(epsilons) > 1 or len(head_epsilons) > 1:
        raise UnsupportedModel("norms that differ from layer to layer")


def rotary_tables(parts: PlainDecoder) -> tuple[Tensor, Tensor]:
    frequencies = parts.rotary.frequencies
    angles = torch.from_numpy(frequencies.angles).to(parts.embedding.device)
    table = torch.arange(parts.max_position + 1, device=angles.device)[:, None].float() * angles
    return table.cos() * frequencies.scaling, table.sin() * frequencies.scaling
