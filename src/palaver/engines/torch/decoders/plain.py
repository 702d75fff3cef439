"""The plain decoder: what Llama, Qwen and their many kin have in common, found in a model.

A model is recognised by its parts, not its name."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_kernels import AttentionHead, ScoreWorkspace, pair_bytes
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.decoders.library import UnsupportedModel

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""

Turns: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Complex numbers, or cosines and sines where there are no complex numbers of that type."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, or several side by side, stored so that a product with few rows is fast."""

    weight: Tensor
    """[in, out]."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        out = torch.addmm(residual, x, self.weight)
        return out if self.bias is None else out.add_(self.bias)


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
    """Turns queries and keys by their positions, looked up in tables."""

    def __init__(self, rotary: Any, like: Tensor, size: int, most: int) -> None:
        self._rotary = rotary
        self._like = like
        self._size = size
        self._most = most
        self._complex = like.dtype == torch.float32
        self._cos = self._sin = like.new_empty(0)
        self._turns = torch.empty(0, dtype=torch.complex64)

    def all_to(self, last: int) -> Tensor:
        """The complex numbers to turn by at each position, up to `last` at least."""
        if last >= self._cos.shape[0]:
            self._extend(last)
        return self._turns

    def at(self, positions: Tensor, last: int) -> Turns:
        """What to turn by, a row for each position; none is beyond `last`."""
        self.all_to(last)
        if self._complex:
            return self._turns[positions][:, None]
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def tables(self, last: int) -> tuple[Tensor, ...]:
        """What `at` takes its rows from, up to `last` at least; a longer text may put others in their place."""
        self.all_to(last)
        return self._cos, self._sin, self._turns

    def turn(self, x: Tensor, turns: Turns) -> Tensor:
        """[rows, heads, size]. The order within a head changes, for queries and keys alike."""
        if isinstance(turns, tuple):
            cos, sin = turns
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin
        return self.turn_pairs(in_pairs(x).contiguous(), turns)

    def turn_pairs(self, pairs: Tensor, turns: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2)

    @property
    def pairs(self) -> bool:
        """Whether turning wants the two halves of each head paired."""
        return self._complex

    def _extend(self, last: int) -> None:
        self._fill(torch.arange(min(self._most, max(2 * last, 1024)) + 1, device=self._like.device))

    def _fill(self, positions: Tensor) -> None:
        cos, sin = self._rotary(self._like, positions[None])
        if cos.shape[-1] != self._size:
            raise UnsupportedModel("it turns a part of each head only")
        self._cos, self._sin = cos[0], sin[0]
        if self._complex:
            half = self._size // 2
            self._turns = torch.complex(self._cos[:, :half].contiguous(), self._sin[:, :half].contiguous())


class RotationWithoutTables(RotaryEmbedding):
    """The same for a few positions anywhere in a long context."""

    def at(self, positions: Tensor, last: int) -> Turns:
        self._fill(positions)
        return self._turns[:, None] if self._complex else (self._cos[:, None], self._sin[:, None])


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    before: RMSNorm
    project: Linear
    queries_keys: RMSNorm | None
    paired_weight: Tensor | None
    output: Linear
    after: RMSNorm
    gate_up: Linear
    down: Linear


class PlainDecoder:
    """The parts of a model that has no others. Raises NotUnderstood for any other kind of model."""

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        """`most`: tokens in a sequence."""
        _check_shape(model)
        base = model.model
        attention = base.layers[0].self_attn
        self.size: int = attention.head_dim
        self.heads: int = attention.q_proj.out_features // self.size
        self.shared: int = attention.k_proj.out_features // self.size
        self.inner: int = base.layers[0].mlp.gate_proj.out_features
        self.scale: float = attention.scaling
        self.most = most
        self.embedding: Tensor = base.embed_tokens.weight
        self.rotation = RotaryEmbedding(base.rotary_emb, self.embedding.new_empty(1), self.size, most)
        self.layers = [self._layer(layer) for layer in base.layers]
        self.norm = _norm(base.norm)
        self.logits = _side_by_side(model.lm_head, share=model.lm_head.weight is not self.embedding)

    def without_tables(self) -> PlainDecoder:
        """The same parts, for a few passes at late positions."""
        other = copy.copy(self)
        rotation = self.rotation
        other.rotation = RotationWithoutTables(rotation._rotary, rotation._like, rotation._size, rotation._most)
        return other

    def _layer(self, layer: Any) -> DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        norm = self._queries_keys(attention)
        return DecoderLayer(
            before=_norm(layer.input_layernorm),
            project=_side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
            queries_keys=norm,
            paired_weight=None if norm is None or not self.rotation.pairs else in_pairs(norm.scaled).contiguous(),
            output=_side_by_side(attention.o_proj),
            after=_norm(layer.post_attention_layernorm),
            gate_up=_side_by_side(mlp.gate_proj, mlp.up_proj),
            down=_side_by_side(mlp.down_proj),
        )

    def _queries_keys(self, attention: Any) -> RMSNorm | None:
        """One norm for both, with a row of weights for each head."""
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm, attention.k_norm
        rows = [query.weight.expand(self.heads, -1), key.weight.expand(self.shared, -1)]
        if query.variance_epsilon != key.variance_epsilon:
            raise UnsupportedModel("its queries and keys are normed differently")
        return RMSNorm(torch.cat(rows), query.variance_epsilon)


def in_pairs(x: Tensor) -> Tensor:
    """[..., size] to [..., size / 2, 2]: each number of the first half beside its partner of the second."""
    return x.view(*x.shape[:-1], 2, -1).transpose(-1, -2)


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight, module.variance_epsilon)


def _side_by_side(*modules: nn.Linear, share: bool = True) -> Linear:
    """One matrix for all of them; the modules' own weights become views of it, so nothing is held twice."""
    weight = torch.cat([module.weight for module in modules]).t().contiguous()
    biases = [module.bias for module in modules]
    if any(b is None for b in biases) and not all(b is None for b in biases):
        raise UnsupportedModel("some of its projections have a bias and some have none")
    start = 0
    for module in modules if share else ():
        module.weight = nn.Parameter(weight[:, start : start + module.out_features].t(), requires_grad=False)
        start += module.out_features
    return Linear(weight, None if biases[0] is None else torch.cat([b for b in biases if b is not None]))


def _check_shape(model: PreTrainedModel) -> None:
    """Raises unless the model is made of exactly the parts that are run here."""
    config = model.config
    windows = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    _require(not windows and getattr(config, "sliding_window", None) in (None, 0), "a window of attention")
    _require(getattr(config, "hidden_act", "") == "silu", "another activation")
    rope = getattr(config, "rope_parameters", None) or {}
    _require(rope.get("rope_type", "default") in STEADY_ROPE, "angles that depend on the length")
    _require("llama_4_scaling_beta" not in rope, "queries that are scaled by their position")
    base = model.model
    _require(_children(model) == {"model", "lm_head"}, "other parts")
    _require(_children(base) == {"embed_tokens", "layers", "norm", "rotary_emb"}, "other parts")
    for layer in base.layers:
        _require(_children(layer) == LAYER, "other parts in its layers")
        _require(_children(layer.self_attn) - {"q_norm", "k_norm"} == ATTENTION, "another attention")
        _require(_children(layer.mlp) - {"act_fn"} == FEED_FORWARD, "another feed-forward part")
        for linear in [*layer.self_attn.children(), *layer.mlp.children()]:
            plain = not isinstance(linear, nn.Linear) or type(linear) is nn.Linear
            _require(plain and all(p.is_floating_point() for p in linear.parameters()), "quantised weights")


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UnsupportedModel(f"it has {what}")


class FusedDecoder:
    """Runs a plan in about 25 operations a layer."""

    def __init__(self, parts: PlainDecoder) -> None:
        self._parts = parts
        self._head = AttentionHead(parts.scale, room=ScoreWorkspace() if parts.embedding.device.type == "cpu" else None)
        kind = parts.embedding.dtype, parts.embedding.device
        self.pair_bytes = pair_bytes(parts.heads, parts.shared, *kind, self._head)

    def __call__(self, plan: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where they are not asked for."""
        parts = self._parts
        x = F.embedding(plan.ids, parts.embedding)
        turns = parts.rotation.at(plan.positions, plan.furthest)
        rule = MaskRule()
        for index, layer in enumerate(parts.layers):
            queries, keys, values = self._projected(layer, x, turns)
            plan.write(index, keys, values)
            if index == len(parts.layers) - 1:  # from here on all leads to logits, and to nothing else
                if not plan.asked:
                    return x[:0]
                if plan.ends is not None:
                    rows = plan.last[list(plan.ends.order)]
                    x, queries, plan = x[rows], queries[rows], plan.ends
            seen = plan.attend(index, queries, rule, self._head)
            x = layer.output.onto(x, seen.reshape(x.shape[0], -1))
            both = layer.gate_up(layer.after(x))
            x = layer.down.onto(x, F.silu(both[:, : parts.inner]).mul_(both[:, parts.inner :]))
        if plan.picks:
            x = x[plan.last]
        return parts.logits(parts.norm(x))

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        """Makes all that passes over so many tokens will look up, and gives what of it may be replaced later."""
        return self._parts.rotation.tables(min(length - 1, self._parts.most))

    def _projected(self, layer: DecoderLayer, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
        heads, turning = self._parts.heads, self._parts.heads + self._parts.shared
        mixed = layer.project(layer.before(x)).view(x.shape[0], -1, self._parts.size)
        turned = self._turned(layer, mixed[:, :turning], turns)
        return turned[:, :heads], turned[:, heads:], mixed[:, turning:]

    def _turned(self, layer: DecoderLayer, mixed: Tensor, turns: Turns) -> Tensor:
        norm, rotation = layer.queries_keys, self._parts.rotation
        if norm is None:
            return rotation.turn(mixed, turns)
        if isinstance(turns, tuple):
            return rotation.turn(norm(mixed), turns)
        # the weight goes first: the product takes its layout, in which pairs lie side by side
        scaled = torch.mul(layer.paired_weight, in_pairs(norm.unscaled(mixed)))
        return rotation.turn_pairs(scaled, turns)
