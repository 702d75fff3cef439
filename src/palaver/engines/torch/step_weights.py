"""The weights of a decoder as its CUDA step reads them: what the kernels can compute, and how each product is divided
among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch import attention_kernels, kernel_functions, mxfp4
from palaver.engines.torch.plain_decoder import DecoderLayer, Linear, LinearLayer, PlainDecoder
from palaver.engines.torch.quantized_weights import BLOCK_OUTPUTS, Kind, PackedWeight, QuantizedLinear
from palaver.engines.torch.tile_shapes import (
    FEW_ROWS,
    FEW_TILES,
    HEAD_SIZES,
    PACKED_ROWS,
    ROWS,
    SCALED_TILES,
    TILES,
    VECTORS,
    PrefillTiles,
    TileShape,
    VectorShape,
    prefill_tiles,
)

PREFILL_ROWS = 64
"""Queries of all heads that one program of a prefill attends for."""
PREFILL_WEIGHT_BYTES = 16 << 10
"""Of shared memory, for what such a program keeps beside keys and values."""
EXPERT_ROWS = 16
"""Rows of a tile of one expert."""
NO_WINDOW = 1 << 30
"""The window of a layer that sees all tokens."""
BUSY_TILES = 128
"""Tiles of outputs from which a product keeps the whole device busy."""
MIN_PART = 768
"""Inputs that a part of a product has at least."""
MAX_ROUTER_PARTS = 16
"""In how many parts the inputs of a router are summed at most."""


@dataclass(frozen=True, slots=True)
class TiledProjection:
    """A linear layer and how its products are divided."""

    weight: Tensor
    """[out, in]; the words of quantised weights."""
    bias: Tensor | None
    outputs: int
    inputs: int
    split: int
    tile: TileShape
    few_tile: TileShape
    """Of decode steps with at most FEW_ROWS rows; for as many outputs as `tile`."""
    prefill_tiles: PrefillTiles
    vector: VectorShape
    packed: PackedWeight | None = None
    """Of quantised weights, which only tiles read."""

    @classmethod
    def of(cls, linear: LinearLayer, gated: bool = False, router: bool = False) -> TiledProjection:
        """`gated`: its outputs are those of gate and up, one after the other. `router`: it has very few outputs."""
        if isinstance(linear, QuantizedLinear):
            return cls._of_packed(linear.packed, linear.bias, gated)
        weight = linear.weight.t().contiguous()
        outputs, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        if outputs % 64 or inputs % 64:
            raise UnsupportedModel("sizes that are no multiples of 64")
        split = 1 if gated else _router_split(inputs) if router else _split(outputs, inputs)
        depth = 128 if inputs // split % 128 == 0 else 64
        tile = TILES.get((outputs, inputs), TileShape(ROWS, 64, depth, 4))
        vector = VECTORS.get((outputs, inputs)) or VectorShape(
            4, min(2048, kernel_functions.next_power(inputs)), 4, 264 if inputs <= 2048 else 0
        )
        tiles = prefill_tiles(outputs, inputs, split, gated)
        few = FEW_TILES.get((outputs, inputs), tile)
        return cls(weight, linear.bias, outputs, inputs, split, tile, few, tiles, vector)

    @classmethod
    def _of_packed(cls, packed: PackedWeight, bias: Tensor | None, gated: bool) -> TiledProjection:
        outputs, inputs, width = packed.outputs // (2 if gated else 1), packed.inputs, packed.width
        if outputs % BLOCK_OUTPUTS:
            raise UnsupportedModel("sizes that are no multiples of 64")
        split = 1 if gated else _split(outputs, inputs, 2 * BUSY_TILES, width)
        tile = TileShape(ROWS, BLOCK_OUTPUTS, width, 3 if packed.kind is Kind.INT4 else 4)
        prefill = TileShape(64, BLOCK_OUTPUTS, width, 2) if gated else TileShape(128, BLOCK_OUTPUTS, width, 2, 8)
        if packed.period:
            scaled = SCALED_TILES[gated]
            deep = packed.period > scaled.depth
            tiles: PrefillTiles = ((0, scaled._replace(stages=scaled.stages - 1) if deep else scaled),)
        else:
            tiles = prefill_tiles(outputs, inputs, split, gated)
        tiles = ((PACKED_ROWS, prefill), *(entry for entry in tiles if not entry[1].has_blocks))
        return cls(packed.words, bias, outputs, inputs, split, tile, tile, tiles, VectorShape(4, 64, 4), packed)

    def unpacks(self, rows: int) -> bool:
        """Whether a pass over so many rows with prompts turns packed weights into floats first."""
        return self.packed is not None and rows > PACKED_ROWS

    def decode_tile(self, rows: int) -> TileShape:
        """For a decode step of so many rows."""
        return self.few_tile if rows <= FEW_ROWS else self.tile

    def prefill_tile(self, rows: int) -> TileShape:
        """For a pass over so many rows with prompts."""
        return next(tile for most, tile in self.prefill_tiles if rows <= most or not most)


def _split(outputs: int, inputs: int, busy: int = BUSY_TILES, depth: int = 64) -> int:
    """In how many parts the inputs are summed: more where there are few outputs to keep the device busy."""
    split = 1
    while (
        2 * split * (outputs // 64) <= busy and inputs // (2 * split) >= MIN_PART and inputs % (2 * split * depth) == 0
    ):
        split *= 2
    return split


def _router_split(inputs: int) -> int:
    parts = range(1, MAX_ROUTER_PARTS + 1)
    return max(split for split in parts if inputs // 64 % split == 0)


def pad_outputs(linear: Linear, value: float) -> Linear:
    """The layer with outputs of this value for all inputs behind its own, up to a multiple of 64."""
    weight = linear.weight
    missing = -weight.shape[1] % 64
    if missing == 0:
        return linear
    bias = weight.new_zeros(weight.shape[1]) if linear.bias is None else linear.bias
    return Linear(F.pad(weight.t(), (0, 0, 0, missing)).t(), F.pad(bias, (0, missing), value=value))


@dataclass(frozen=True, slots=True)
class ExpertProjection:
    """The linear layers of all experts of a layer."""

    weight: Tensor
    """[experts, out, in]; blocks of `mxfp4.py` where there are exponents."""
    exponents: Tensor | None
    bias: Tensor | None
    outputs: int
    inputs: int
    interleaved: bool
    """Whether outputs of gate and up take turns, and don't follow each other."""
    tile: TileShape
    prefill_tile: TileShape
    vector: VectorShape

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, gated: bool = False, interleaved: bool = False
    ) -> ExpertProjection:
        outputs, inputs = weight.shape[1] // (2 if gated else 1), weight.shape[2]
        if outputs % 64 or inputs % 64:
            raise UnsupportedModel("sizes that are no multiples of 64")
        assert weight.is_contiguous()
        depth = 128 if inputs % 128 == 0 else 64
        wide = outputs % 128 == 0 and not gated
        prefill = TileShape(64, 128, 64, 3, 8) if wide else TileShape(64, 64, 64, 3)
        vector = VectorShape(4, min(1024, kernel_functions.next_power(inputs)), 4)
        tile, exponents = TileShape(EXPERT_ROWS, 64, depth, 3), None
        narrow = _encode(weight, interleaved)
        if narrow is not None:
            weight, exponents = narrow
            tile, prefill = (
                TileShape(EXPERT_ROWS, mxfp4.BLOCK, mxfp4.BLOCK, 4),
                TileShape(64, mxfp4.BLOCK, mxfp4.BLOCK, 3),
            )
        return cls(weight, exponents, bias, outputs, inputs, interleaved, tile, prefill, vector)


def _encode(weight: Tensor, interleaved: bool) -> tuple[Tensor, Tensor] | None:
    """The weights in mxfp4 if that loses nothing, and if there is memory for it."""
    if weight.is_cuda and torch.cuda.mem_get_info(weight.device)[0] < weight.nbytes:
        return None
    return mxfp4.encode_experts(weight, interleaved)


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate_up: TiledProjection
    down: TiledProjection


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward part in which each row takes a few of many experts."""

    router: TiledProjection
    """Its outputs are padded."""
    count: int
    top_k: int
    normalised: bool
    """Whether the weights of the chosen experts sum to 1."""
    gate_up: ExpertProjection
    down: ExpertProjection

    @property
    def narrow(self) -> bool:
        """Whether weights are in mxfp4, which only tiles read."""
        return self.gate_up.exponents is not None or self.down.exponents is not None


@dataclass(frozen=True, slots=True)
class Attention:
    """How the heads of a layer attend."""

    scale: float
    rotary: int
    """The number of the layer's rotary table."""
    window: int = NO_WINDOW
    """How many tokens a token sees, itself included."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """A score of each head that takes a share of the weights."""


@dataclass(frozen=True, slots=True)
class StepLayer:
    input_gain: Tensor
    qkv: TiledProjection
    query_gain: Tensor
    key_gain: Tensor
    attention: Attention
    output: TiledProjection
    output_gain: Tensor | None
    """Of the norm of the attention's result before it is added; None: there is no such norm."""
    feed_forward_gain: Tensor
    feed_forward: FeedForward | Experts
    result_gain: Tensor | None
    """Of the norm of the feed-forward part's result before it is added."""

    @property
    def linears(self) -> tuple[TiledProjection, ...]:
        """All but those of experts."""
        feed_forward = self.feed_forward
        more = (
            (feed_forward.router,) if isinstance(feed_forward, Experts) else (feed_forward.gate_up, feed_forward.down)
        )
        return self.qkv, self.output, *more

    @property
    def projections(self) -> tuple[TiledProjection, ...]:
        """Those whose inputs may be summed in parts."""
        return self.qkv, self.output, self.linears[-1]

    @classmethod
    def of(cls, layer: DecoderLayer, parts: PlainDecoder) -> StepLayer:
        norm = layer.qk_norm
        gains = layer.input_norm.weight if norm is None else norm.weight
        return cls(
            input_gain=layer.input_norm.weight,
            qkv=TiledProjection.of(layer.qkv_proj),
            query_gain=gains if norm is None else gains[0].contiguous(),
            key_gain=gains if norm is None else gains[parts.num_heads].contiguous(),
            attention=Attention(parts.scale, 0),
            output=TiledProjection.of(layer.o_proj),
            output_gain=None,
            feed_forward_gain=layer.post_attention_norm.weight,
            feed_forward=FeedForward(
                TiledProjection.of(layer.gate_up_proj, gated=True), TiledProjection.of(layer.down_proj)
            ),
            result_gain=None,
        )


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of the attention layers."""

    heads: int
    kv_heads: int
    size: int
    norm: bool

    def __post_init__(self) -> None:
        if self.size not in HEAD_SIZES:
            raise UnsupportedModel(f"heads of size {self.size}")

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        return kernel_functions.next_power(self.group)

    @property
    def prefill_queries(self) -> int:
        """Tokens of a prompt that one program attends for."""
        return max(1, PREFILL_ROWS // self.padded_group)

    @property
    def prefill_bytes(self) -> int:
        """Of shared memory, about: for keys and values of a tile, for the next ones, and for the weights of values."""
        return 3 * 2 * self.size * attention_kernels.TILE + PREFILL_WEIGHT_BYTES

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "H": self.heads,
            "KVH": self.kv_heads,
            "G": self.group,
            "GP": self.padded_group,
            "D": self.size,
            "T": attention_kernels.TILE,
        }


@dataclass(frozen=True, slots=True)
class StepModel:
    """A decoder that the kernels can compute."""

    heads: HeadShape
    embedding: Tensor
    layers: Sequence[StepLayer]
    final_gain: Tensor
    head: TiledProjection
    """Its outputs are padded with logits that are never sampled."""
    vocabulary_size: int
    epsilon: float
    qk_epsilon: float
    rotary: Sequence[tuple[Tensor, Tensor]]
    """Tables of cosines and sines, [positions, size / 2]."""
    embedding_scale: float = 1.0
    activation: str = "silu"
    """As `linear_kernels._activate` names it."""
    logit_softcap: float = 0.0
    """0: none."""

    @property
    def quantized(self) -> bool:
        """Whether some linear layers are quantised."""
        return any(one.packed is not None for layer in self.layers for one in layer.linears)

    @property
    def partial_sums(self) -> int:
        """Sums of a row of the largest product whose inputs are summed in parts: outputs times parts."""
        projections = [self.head, *(one for layer in self.layers for one in layer.projections)]
        return max((one.outputs * one.split for one in projections if one.split > 1), default=64)

    @property
    def experts(self) -> Experts | None:
        """Those of the first layer that has any; all such layers have the same sizes."""
        return next((layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, Experts)), None)

    @classmethod
    def of(cls, parts: PlainDecoder) -> StepModel:
        norms = {layer.qk_norm is not None for layer in parts.layers}
        if len(norms) > 1:
            raise UnsupportedModel("norms of queries and keys in some layers only")
        frequencies = parts.rotary.frequencies
        angles = torch.from_numpy(frequencies.angles).to(parts.embedding.device)
        norm_epsilons = [n.epsilon for layer in parts.layers for n in (layer.input_norm, layer.post_attention_norm)]
        head_epsilons = [layer.qk_norm.epsilon for layer in parts.layers if layer.qk_norm is not None]
        return cls(
            heads=HeadShape(parts.num_heads, parts.num_kv_heads, parts.head_dim, norms.pop()),
            embedding=parts.embedding.contiguous(),
            layers=[StepLayer.of(layer, parts) for layer in parts.layers],
            final_gain=parts.norm.weight,
            head=TiledProjection.of(pad_outputs(parts.lm_head, -torch.inf)),
            vocabulary_size=parts.lm_head.weight.shape[1],
            epsilon=one_epsilon([parts.norm.epsilon, *norm_epsilons]),
            qk_epsilon=one_epsilon(head_epsilons),
            rotary=[rotary_table(angles, frequencies.scaling, parts.max_position)],
        )


def one_epsilon(epsilons: Sequence[float]) -> float:
    if len(set(epsilons)) > 1:
        raise UnsupportedModel("norms that differ from layer to layer")
    return epsilons[0] if epsilons else 0.0


def rotary_table(angles: Tensor, scaling: float, max_position: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines at each position. `angles`: at position 1."""
    table = torch.arange(max_position + 1, device=angles.device)[:, None].float() * angles
    return table.cos() * scaling, table.sin() * scaling
