"""The plain decoder: the architecture that Llama, Qwen and many others share, and its weights for compiled steps.

A model is recognised by its modules, not by its name."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palaver.engines.compiled.build import Library
from palaver.engines.compiled.decoder import CompiledDecoder, DecoderSizes, RotaryTable
from palaver.engines.compiled.weights import DecoderWeights, LayerWeights, NormWeights, Projection, Weight
from palaver.engines.core.decoder_config import Frequencies
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_functions import AttentionParams, ScoreWorkspace, pair_bytes
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.quantized_weights import QuantizedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from palaver.engines.torch.step_weights import StepModel


ATTENTION_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP_MODULES = {"gate_proj", "up_proj", "down_proj"}
LAYER_MODULES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""

Rotations: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Complex numbers, or cosines and sines where the dtype has no complex numbers."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, or several side by side, stored so that a product with few rows is fast."""

    weight: Tensor
    """[in, out]."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        out = torch.addmm(residual, x, self.weight)
        return out if self.bias is None else out.add_(self.bias)


LinearLayer: TypeAlias = Linear | QuantizedLinear


class RMSNorm:
    """Root mean square norm over the last dimension."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon
        self._size = weight.shape[-1]
        self._plain = weight.device.type != "cpu" or weight.dtype != torch.float32
        self.scaled = weight * math.sqrt(self._size)
        self._floor = torch.tensor(math.sqrt(epsilon * self._size), dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._fused(x) if self._plain else self.unscaled(x).mul_(self.scaled)

    def unscaled(self, x: Tensor) -> Tensor:
        """By the length of the vector: on the CPU half the operations of the library's own."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)

    def _fused(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self._size,), self.weight, self.epsilon)
        return F.rms_norm(x, (self._size,), None, self.epsilon) * self.weight


class RotaryEmbedding:
    """Rotates queries and keys by their positions, with tables of cosines and sines."""

    def __init__(self, rotary: Any, like: Tensor, head_dim: int, max_position: int) -> None:
        self._rotary = rotary
        self._like = like
        self._head_dim = head_dim
        self._max_position = max_position
        self._complex = like.dtype == torch.float32
        self._cos = self._sin = like.new_empty(0)
        self._rotations = torch.empty(0, dtype=torch.complex64)

    def complex_table(self, max_position: int) -> Tensor:
        """The rotation at each position, up to `max_position` at least, as complex numbers."""
        if max_position >= self._cos.shape[0]:
            self._extend(max_position)
        return self._rotations

    def at(self, positions: Tensor, max_position: int) -> Rotations:
        """A rotation for each position; none is beyond `max_position`."""
        self.complex_table(max_position)
        if self._complex:
            return self._rotations[positions][:, None]
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def tables(self, max_position: int) -> tuple[Tensor, ...]:
        """The tables behind `at`, up to `max_position` at least; a longer text may replace them."""
        self.complex_table(max_position)
        return self._cos, self._sin, self._rotations

    def rotate(self, x: Tensor, rotations: Rotations) -> Tensor:
        """[rows, heads, size]. The order within a head may change, for queries and keys alike."""
        if isinstance(rotations, tuple):
            cos, sin = rotations
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin
        return self.rotate_pairs(interleave_halves(x).contiguous(), rotations)

    def rotate_pairs(self, pairs: Tensor, rotations: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(pairs) * rotations).flatten(-2)

    @property
    def frequencies(self) -> Frequencies:
        return Frequencies(self._rotary.inv_freq.float().cpu().numpy(), float(self._rotary.attention_scaling))

    @property
    def uses_pairs(self) -> bool:
        """Whether `rotate_pairs` is used, which takes the two halves of each head interleaved."""
        return self._complex

    def _extend(self, max_position: int) -> None:
        length = min(self._max_position, max(2 * max_position, 1024)) + 1
        self._fill(torch.arange(length, device=self._like.device))

    def _fill(self, positions: Tensor) -> None:
        cos, sin = self._rotary(self._like, positions[None])
        if cos.shape[-1] != self._head_dim:
            raise UnsupportedModel("its rotary embedding covers only a part of each head")
        self._cos, self._sin = cos[0], sin[0]
        if self._complex:
            half = self._head_dim // 2
            self._rotations = torch.complex(self._cos[:, :half].contiguous(), self._sin[:, :half].contiguous())


class RotaryWithoutTables(RotaryEmbedding):
    """The same for a few positions anywhere in a long context."""

    def at(self, positions: Tensor, max_position: int) -> Rotations:
        self._fill(positions)
        return self._rotations[:, None] if self._complex else (self._cos[:, None], self._sin[:, None])


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: RMSNorm
    qkv_proj: LinearLayer
    qk_norm: RMSNorm | None
    paired_qk_weight: Tensor | None
    """The weight of `qk_norm` with the halves of each head interleaved."""
    o_proj: LinearLayer
    post_attention_norm: RMSNorm
    gate_up_proj: LinearLayer
    down_proj: LinearLayer

    @property
    def linears(self) -> tuple[LinearLayer, ...]:
        return self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj


class StaticRotary:
    """The cosines and sines of a configuration's frequencies, as the library computes them."""

    def __init__(self, frequencies: Frequencies, device: torch.device) -> None:
        self.inv_freq = torch.from_numpy(frequencies.angles).to(device)
        self.attention_scaling = frequencies.scaling

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos() * self.attention_scaling, both.sin() * self.attention_scaling
        return cos.to(like.dtype), sin.to(like.dtype)


@dataclass(slots=True)
class PlainDecoder:
    """The weights and sizes of a plain decoder."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scale: float
    max_position: int
    embedding: Tensor
    rotary: RotaryEmbedding
    layers: list[DecoderLayer]
    norm: RMSNorm
    lm_head: Linear

    @classmethod
    def from_model(cls, model: PreTrainedModel, max_position: int, decoder: Any = None) -> PlainDecoder:
        """The parts of a model that the library loaded, which shares their memory. `decoder`: the text decoder inside
        of a model that takes media. Raises UnsupportedModel for another kind of model."""
        _require(decoder is not None or children(model) == {"model", "lm_head"}, "other parts")
        base: Any = model.model if decoder is None else decoder
        _check_shape(base)
        attention = base.layers[0].self_attn
        head_dim: int = attention.head_dim
        num_heads: int = attention.q_proj.out_features // head_dim
        num_kv_heads: int = attention.k_proj.out_features // head_dim
        embedding: Tensor = base.embed_tokens.weight
        angles: Any = base.rotary_emb
        if decoder is not None:  # positions may have several dimensions, which are the same for text
            frequencies = Frequencies(angles.inv_freq.float().cpu().numpy(), float(angles.attention_scaling))
            angles = StaticRotary(frequencies, embedding.device)
        rotary = RotaryEmbedding(angles, embedding.new_empty(1), head_dim, max_position)
        lm_head: Any = model.get_output_embeddings()

        def qk_norm(attention: Any) -> RMSNorm | None:
            if not hasattr(attention, "q_norm"):
                return None
            query, key = attention.q_norm, attention.k_norm
            if query.variance_epsilon != key.variance_epsilon:
                raise UnsupportedModel("its queries and keys are normed differently")
            return norm_heads(query.weight, key.weight, num_heads, num_kv_heads, query.variance_epsilon)

        def decoder_layer(layer: Any) -> DecoderLayer:
            attention, mlp = layer.self_attn, layer.mlp
            return build_layer(
                input_norm=_norm(layer.input_layernorm),
                qkv_proj=concatenate(attention.q_proj, attention.k_proj, attention.v_proj),
                qk_norm=qk_norm(attention),
                o_proj=concatenate(attention.o_proj),
                post_attention_norm=_norm(layer.post_attention_layernorm),
                gate_up_proj=concatenate(mlp.gate_proj, mlp.up_proj),
                down_proj=concatenate(mlp.down_proj),
                rotary=rotary,
            )

        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=base.layers[0].mlp.gate_proj.out_features,
            scale=attention.scaling,
            max_position=max_position,
            embedding=embedding,
            rotary=rotary,
            layers=[decoder_layer(layer) for layer in base.layers],
            norm=_norm(base.norm),
            lm_head=concatenate(lm_head, share=lm_head.weight is not embedding),
        )

    def step_model(self) -> StepModel:
        """The weights as the CUDA kernels read them. Raises UnsupportedModel where they can't compute the model."""
        from palaver.engines.torch.step_weights import StepModel  # needs Triton

        return StepModel.of(self)

    @property
    def quantized(self) -> list[QuantizedLinear]:
        return [one for layer in self.layers for one in layer.linears if isinstance(one, QuantizedLinear)]

    def dequantize(self) -> None:
        """Turns quantised weights into floats, layer by layer."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = replace(
                layer,
                qkv_proj=_as_floats(layer.qkv_proj),
                o_proj=_as_floats(layer.o_proj),
                gate_up_proj=_as_floats(layer.gate_up_proj),
                down_proj=_as_floats(layer.down_proj),
            )

    def without_tables(self) -> PlainDecoder:
        """The same parts, for a few passes at late positions."""
        other = copy.copy(self)
        rotary = self.rotary
        other.rotary = RotaryWithoutTables(rotary._rotary, rotary._like, rotary._head_dim, rotary._max_position)
        return other


def _as_floats(linear: LinearLayer) -> Linear:
    return linear if isinstance(linear, Linear) else Linear(linear.weight, linear.bias)


def build_layer(*, qk_norm: RMSNorm | None, rotary: RotaryEmbedding, **parts: Any) -> DecoderLayer:
    paired_norm = qk_norm if rotary.uses_pairs else None
    paired = None if paired_norm is None else interleave_halves(paired_norm.scaled).contiguous()
    return DecoderLayer(qk_norm=qk_norm, paired_qk_weight=paired, **parts)


def norm_heads(query: Tensor, key: Tensor, num_heads: int, num_kv_heads: int, epsilon: float) -> RMSNorm:
    """One norm for queries and keys, with a row of weights for each head."""
    return RMSNorm(torch.cat([query.expand(num_heads, -1), key.expand(num_kv_heads, -1)]), epsilon)


def interleave_halves(x: Tensor) -> Tensor:
    """[..., size] to [..., size / 2, 2]: each number of the first half next to its partner in the second."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2)


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight, module.variance_epsilon)


def transpose_weights(weight: Tensor) -> Tensor:
    """[out, in] to [in, out]: on the CPU a copy; on accelerators a view, as their kernels read weights as they are."""
    return weight.t().contiguous() if weight.device.type == "cpu" else weight.t()


def concatenate(*modules: nn.Linear, share: bool = True) -> Linear:
    """One matrix for all modules, whose own weights become views of it: the memory is not doubled."""
    weight = transpose_weights(torch.cat([module.weight for module in modules]))
    biases = [module.bias for module in modules]
    if any(b is None for b in biases) and not all(b is None for b in biases):
        raise UnsupportedModel("some of its projections have a bias and some have none")
    start = 0
    for module in modules if share else ():
        module.weight = nn.Parameter(weight[:, start : start + module.out_features].t(), requires_grad=False)
        start += module.out_features
    return Linear(weight, None if biases[0] is None else torch.cat([b for b in biases if b is not None]))


def _check_shape(base: Any) -> None:
    """Raises unless the decoder is made of exactly the modules that FusedDecoder runs."""
    config = base.config
    windows = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    _require(not windows and getattr(config, "sliding_window", None) in (None, 0), "a window of attention")
    _require(getattr(config, "hidden_act", "") == "silu", "another activation")
    rope = getattr(config, "rope_parameters", None) or {}
    _require(rope.get("rope_type", "default") in STATIC_ROPE, "angles that depend on the length")
    _require("llama_4_scaling_beta" not in rope, "queries that are scaled by their position")
    _require(children(base) == {"embed_tokens", "layers", "norm", "rotary_emb"}, "other parts")
    for layer in base.layers:
        _require(children(layer) == LAYER_MODULES, "other parts in its layers")
        others = {"q_norm", "k_norm", "rotary_emb"}
        _require(children(layer.self_attn) - others == ATTENTION_MODULES, "another attention")
        _require(children(layer.mlp) - {"act_fn"} == MLP_MODULES, "another feed-forward part")
        for linear in [*layer.self_attn.children(), *layer.mlp.children()]:
            plain = not isinstance(linear, nn.Linear) or type(linear) is nn.Linear
            _require(plain and all(p.is_floating_point() for p in linear.parameters()), "quantised weights")


def children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UnsupportedModel(f"it has {what}")


class FusedDecoder:
    """Runs a batch in about 25 operations a layer."""

    def __init__(self, parts: PlainDecoder) -> None:
        self._parts = parts
        dtype, device = parts.embedding.dtype, parts.embedding.device
        self._params = AttentionParams(parts.scale, workspace=ScoreWorkspace() if device.type == "cpu" else None)
        self.pair_bytes = pair_bytes(parts.num_heads, parts.num_kv_heads, dtype, device, self._params)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where the batch needs none."""
        parts = self._parts
        x = F.embedding(batch.ids, parts.embedding)
        rotations = parts.rotary.at(batch.inputs.rotary_positions, batch.max_position)
        rule = MaskRule()
        for index, layer in enumerate(parts.layers):
            queries, keys, values = self._project(layer, x, rotations)
            batch.write(index, keys, values)
            if index == len(parts.layers) - 1:  # the rest is needed for logits only
                if not batch.needs_logits:
                    return x[:0]
                if batch.last_tokens is not None:
                    rows = batch.last_rows[list(batch.last_tokens.order)]
                    x, queries, batch = x[rows], queries[rows], batch.last_tokens
            attended = batch.attend(index, queries, rule, self._params)
            x = layer.o_proj.add_to(x, attended.reshape(x.shape[0], -1))
            gate, up = layer.gate_up_proj(layer.post_attention_norm(x)).split(parts.intermediate_size, -1)
            x = layer.down_proj.add_to(x, F.silu(gate).mul_(up))
        if batch.needs_gather:
            x = x[batch.last_rows]
        return parts.lm_head(parts.norm(x))

    @property
    def interleaves(self) -> bool:
        """Whether the two halves of each head of queries and keys are interleaved."""
        return self._parts.rotary.uses_pairs

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        """Builds the tables for passes over so many tokens; returns those that a longer text may replace."""
        return self._parts.rotary.tables(min(length - 1, self._parts.max_position))

    def _project(self, layer: DecoderLayer, x: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        num_heads = self._parts.num_heads
        first_value = num_heads + self._parts.num_kv_heads
        qkv = layer.qkv_proj(layer.input_norm(x)).view(x.shape[0], -1, self._parts.head_dim)
        rotated = self._rotate(layer, qkv[:, :first_value], rotations)
        return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, first_value:]

    def _rotate(self, layer: DecoderLayer, queries_keys: Tensor, rotations: Rotations) -> Tensor:
        norm, rotary = layer.qk_norm, self._parts.rotary
        if norm is None:
            return rotary.rotate(queries_keys, rotations)
        if isinstance(rotations, tuple):
            return rotary.rotate(norm(queries_keys), rotations)
        # the weight goes first: the product takes its layout, in which pairs lie side by side
        scaled = torch.mul(layer.paired_qk_weight, interleave_halves(norm.unscaled(queries_keys)))
        return rotary.rotate_pairs(scaled, rotations)


def compile_decoder(parts: PlainDecoder, library: Library, max_threads: int) -> CompiledDecoder:
    """The decoder in compiled code. Raises UnsupportedModel for models that compiled steps can't compute."""
    if parts.embedding.device.type != "cpu" or not parts.embedding.is_contiguous():
        raise UnsupportedModel("compiled steps need float32 on the CPU")
    weights = DecoderWeights(
        embedding=Weight(parts.embedding.numpy(), "F32"),
        layers=(_layer_weights(layer, parts.intermediate_size) for layer in parts.layers),
        norm=_norm_weights(parts.norm),
        lm_head=_projection_weights(parts.lm_head),
    )
    rotary = RotaryTable(parts.rotary.frequencies, parts.max_position)
    sizes = DecoderSizes(parts.num_heads, parts.num_kv_heads, parts.head_dim, parts.intermediate_size, parts.scale)
    return CompiledDecoder(weights, sizes, rotary, library, max_threads)


def _layer_weights(layer: DecoderLayer, intermediate_size: int) -> LayerWeights:
    return LayerWeights(
        input_norm=_norm_weights(layer.input_norm),
        qkv=(_projection_weights(layer.qkv_proj),),
        qk_norm=None if layer.qk_norm is None else _norm_weights(layer.qk_norm),
        output=_projection_weights(layer.o_proj),
        post_attention_norm=_norm_weights(layer.post_attention_norm),
        gate=_projection_weights(layer.gate_up_proj, 0, intermediate_size),
        up=_projection_weights(layer.gate_up_proj, intermediate_size, 2 * intermediate_size),
        down=_projection_weights(layer.down_proj),
    )


def _norm_weights(norm: RMSNorm) -> NormWeights:
    return NormWeights(norm.weight.numpy(), norm.epsilon)


def _projection_weights(linear: LinearLayer, start: int = 0, stop: int | None = None) -> Projection:
    """The outputs from `start` to `stop`."""
    bias = None if linear.bias is None else linear.bias[start:stop].numpy()
    return Projection(Weight(linear.weight[:, start:stop].t().numpy(), "F32"), bias)
