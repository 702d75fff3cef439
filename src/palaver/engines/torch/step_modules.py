"""Reads the models of the transformers library as the CUDA step computes them: layers with windows, sinks, soft caps,
norms before and after their parts, and experts.

A model is recognised by its modules, and by what one pass shows: what each layer attends with, and by which angles it
rotates. What is read wrongly shows in the logits, which are compared with the library's before the step is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palaver.engines.core.kv_cache import SlotAllocator
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_functions import AttentionParams
from palaver.engines.torch.batch import build_batch, sequence_chunk
from palaver.engines.torch.devices import TensorLayout
from palaver.engines.torch.library_decoder import LibraryDecoder
from palaver.engines.torch.plain_decoder import STATIC_ROPE, Linear, children, concatenate
from palaver.engines.torch.step_weights import (
    NO_WINDOW,
    Attention,
    ExpertProjection,
    Experts,
    FeedForward,
    HeadShape,
    StepLayer,
    StepModel,
    TiledProjection,
    one_epsilon,
    pad_outputs,
    rotary_table,
)

PROBE_BYTES = 1 << 24
PLAIN_NORMS = {"input_layernorm", "post_attention_layernorm"}
SANDWICH_NORMS = PLAIN_NORMS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""Where the results of a layer's parts are normed, too, before they are added: Gemma 2 and 3."""
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
MAX_EXPERTS = 1024


class Norm(NamedTuple):
    gain: Tensor
    epsilon: float


@torch.inference_mode()
def read_step_model(
    model: Any, base: Any, library: LibraryDecoder, layout: TensorLayout, ids: Sequence[int], max_position: int
) -> StepModel:
    """`base`: the text decoder. `ids`: a short text. Raises UnsupportedModel for models that the kernels don't know."""
    return _Reader(model, base, library, layout, ids, max_position).read()


class _Reader:
    def __init__(
        self,
        model: Any,
        base: Any,
        library: LibraryDecoder,
        layout: TensorLayout,
        ids: Sequence[int],
        max_position: int,
    ) -> None:
        _require({"embed_tokens", "layers", "norm"} <= children(base), "other parts")
        self._model = model
        self._base = base
        self._config = base.config
        self._device: torch.device = base.embed_tokens.weight.device
        self._max_position = max_position
        self._angles = dict(_angles(base))
        self._rotations: list[tuple[Tensor, Tensor]] = []
        shape = set(layout.layer_shapes)
        _require(len(shape) == 1 and len(layout.layer_shapes) == len(base.layers), "layers that differ")
        (self._kv_heads, self._head_size), values = shape.pop()
        _require(values == (self._kv_heads, self._head_size), "values of another size than keys")
        slots = SlotAllocator(layout, PROBE_BYTES)
        self._attention: dict[int, tuple[MaskRule, AttentionParams]] = {}
        with self._recorded(library):
            chunk = sequence_chunk(slots.allocate(len(ids) + 1), 0, ids)
            library(build_batch([chunk], self._device))
        self._positions = torch.arange(len(ids), device=self._device)
        self._epsilons: list[float] = []
        self._head_epsilons: list[float] = []
        self._activations: set[str] = set()

    def read(self) -> StepModel:
        base, lm_head = self._base, self._model.get_output_embeddings()
        softcap = float(getattr(self._config, "final_logit_softcapping", None) or 0)
        _require(not (softcap and lm_head.out_features % 64), "a vocabulary whose size is no multiple of 64")
        head = concatenate(lm_head, share=lm_head.weight is not base.embed_tokens.weight)
        embedding, scale = self._embedding()
        layers = [self._layer(index, layer) for index, layer in enumerate(base.layers)]
        norms = {hasattr(layer.self_attn, "q_norm") for layer in base.layers}
        _require(len(norms) == 1, "norms of queries and keys in some layers only")
        experts = {
            (part.count, part.top_k, part.router.outputs, part.gate_up.outputs)
            for layer in layers
            if isinstance(part := layer.feed_forward, Experts)
        }
        _require(len(experts) <= 1 and len(self._activations) == 1, "layers that differ")
        final = self._norm(base.norm)
        return StepModel(
            heads=HeadShape(layers[0].output.inputs // self._head_size, self._kv_heads, self._head_size, norms.pop()),
            embedding=embedding,
            layers=layers,
            final_gain=final.gain,
            head=TiledProjection.of(pad_outputs(head, -torch.inf)),
            vocabulary_size=lm_head.out_features,
            epsilon=one_epsilon(self._epsilons),
            qk_epsilon=one_epsilon(self._head_epsilons),
            rotary=[rotary_table(angles, scaling, self._max_position) for angles, scaling in self._angles.values()],
            embedding_scale=scale,
            activation=self._activations.pop(),
            logit_softcap=softcap,
        )

    @contextmanager
    def _recorded(self, library: LibraryDecoder) -> Iterator[None]:
        """Keeps what the layers attend with, and the cosines and sines that they are called with."""

        def record(_: Any, __: Any, named: dict[str, Any]) -> None:
            embeddings = named.get("position_embeddings")
            _require(isinstance(embeddings, tuple) and len(embeddings) == 2, "an unknown rotary embedding")
            assert embeddings is not None
            self._rotations.append(embeddings)

        hooks = [
            layer.self_attn.register_forward_pre_hook(record, with_kwargs=True)
            for layer in self._base.layers
            if "self_attn" in children(layer)
        ]
        library.recorded_attention = self._attention
        try:
            yield
        finally:
            library.recorded_attention = None
            for hook in hooks:
                hook.remove()
        _require(len(self._rotations) == len(self._base.layers), "other parts in its layers")

    def _embedding(self) -> tuple[Tensor, float]:
        module = self._base.embed_tokens
        scale = getattr(module, "embed_scale", 1.0)
        scale = float(torch.as_tensor(scale).to(module.weight.dtype))
        return module.weight.contiguous(), scale

    def _layer(self, index: int, layer: Any) -> StepLayer:
        attention = layer.self_attn
        found = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
        sandwich = found >= SANDWICH_NORMS
        _require(found == {"self_attn", "mlp"} | (SANDWICH_NORMS if sandwich else PLAIN_NORMS), "other parts")
        queries = self._head_norm(attention, "q_norm")
        keys = self._head_norm(attention, "k_norm")
        before = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        input_gain = self._norm(layer.input_layernorm).gain
        return StepLayer(
            input_gain=input_gain,
            qkv=TiledProjection.of(self._qkv(attention)),
            query_gain=input_gain if queries is None else queries,
            key_gain=input_gain if keys is None else keys,
            attention=self._attends(index),
            output=TiledProjection.of(_linear(attention.o_proj)),
            output_gain=self._norm(layer.post_attention_layernorm).gain if sandwich else None,
            feed_forward_gain=self._norm(before).gain,
            feed_forward=self._feed_forward(layer.mlp),
            result_gain=self._norm(layer.post_feedforward_layernorm).gain if sandwich else None,
        )

    def _qkv(self, attention: Any) -> Linear:
        found = children(attention) - {"q_norm", "k_norm", "rotary_emb", "o_proj"}
        if found == {"qkv_proj"}:
            return _linear(attention.qkv_proj)
        _require(found == {"q_proj", "k_proj", "v_proj"}, "another attention")
        return _linear(attention.q_proj, attention.k_proj, attention.v_proj)

    def _attends(self, index: int) -> Attention:
        rule, params = self._attention[index]
        try:
            window = rule.window(self._max_position, self._device)
        except ValueError as error:
            raise UnsupportedModel("it masks attention in its own way") from error
        sinks = params.sinks
        return Attention(
            scale=params.scale,
            rotary=self._rotary_table_of(index),
            window=NO_WINDOW if window is None else window,
            softcap=params.softcap,
            sinks=None if sinks is None else sinks.detach().contiguous(),
        )

    def _rotary_table_of(self, index: int) -> int:
        """Which of the model's angles give the cosines and sines that this layer was called with."""
        half = self._head_size // 2
        for number, (angles, scaling) in enumerate(self._angles.values()):
            expected = self._positions[:, None].float() * angles
            pairs = zip(self._rotations[index], (expected.cos(), expected.sin()), strict=True)
            if angles.shape == (half,) and all(_near(found[0, :, :half], own * scaling) for found, own in pairs):
                return number
        raise UnsupportedModel("it has an unknown rotary embedding")

    def _feed_forward(self, mlp: Any) -> FeedForward | Experts:
        found = children(mlp)
        if "experts" in found:
            return self._experts(mlp)
        activation = mlp.act_fn if hasattr(mlp, "act_fn") else getattr(mlp, "activation_fn", None)
        self._activations.add(_activation_name(activation))
        found -= {"act_fn", "activation_fn"}
        if found == {"gate_up_proj", "down_proj"}:
            gate_up = _linear(mlp.gate_up_proj)
        else:
            _require(found == {"gate_proj", "up_proj", "down_proj"}, "another feed-forward part")
            gate_up = _linear(mlp.gate_proj, mlp.up_proj)
        return FeedForward(TiledProjection.of(gate_up, gated=True), TiledProjection.of(_linear(mlp.down_proj)))

    def _experts(self, mlp: Any) -> Experts:
        found = children(mlp)
        _require(found in ({"gate", "experts"}, {"router", "experts"}), "other parts beside its experts")
        router, experts = mlp.gate if "gate" in found else mlp.router, mlp.experts
        names = {name for name, _ in experts.named_parameters()}
        biased = {"gate_up_proj_bias", "down_proj_bias"} <= names
        expected = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if biased else set())
        _require(names == expected, "experts of another kind")
        count, size = router.weight.shape
        top_k = int(router.top_k)
        clamped = hasattr(experts, "limit")
        if clamped:
            _require((experts.alpha, experts.limit) == (1.702, 7.0), "another activation")
        self._activations.add("clamped_swiglu" if clamped else _activation_name(getattr(experts, "act_fn", None)))
        by_input = experts.gate_up_proj.shape[1] == size and experts.down_proj.shape[2] == size and clamped
        if by_input:  # stored as [in, out]: the library keeps a view of the other order
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(experts, name).data.transpose(1, 2).contiguous()
                setattr(experts, name, nn.Parameter(weight.transpose(1, 2), requires_grad=False))
        _require(all(p.is_floating_point() for p in experts.parameters()), "quantised weights")
        gate_up, down = (
            getattr(experts, name).data.transpose(1, 2) if by_input else getattr(experts, name).data.contiguous()
            for name in ("gate_up_proj", "down_proj")
        )
        _require(
            count <= MAX_EXPERTS and gate_up.shape[0] == count and gate_up.shape[2] == size, "experts of another kind"
        )
        route_bias = getattr(router, "bias", None)
        routes = Linear(router.weight.data.t(), None if route_bias is None else route_bias.data)
        biases = [getattr(experts, name).data if biased else None for name in ("gate_up_proj_bias", "down_proj_bias")]
        return Experts(
            router=TiledProjection.of(pad_outputs(routes, 0.0), router=True),
            count=count,
            top_k=top_k,
            normalised=_is_normalised(router),
            gate_up=ExpertProjection.of(gate_up, biases[0], gated=True, interleaved=clamped),
            down=ExpertProjection.of(down, biases[1]),
        )

    def _norm(self, module: Any) -> Norm:
        norm = _read_norm(module)
        self._epsilons.append(norm.epsilon)
        return norm

    def _head_norm(self, attention: Any, name: str) -> Tensor | None:
        if not hasattr(attention, name):
            return None
        norm = _read_norm(getattr(attention, name))
        _require(norm.gain.shape == (self._head_size,), "norms over several heads")
        self._head_epsilons.append(norm.epsilon)
        return norm.gain


def _angles(base: Any) -> Iterator[tuple[str, tuple[Tensor, float]]]:
    """The rotary angles of the model, by name: there may be a set for each kind of layer."""
    rotary = base.rotary_emb
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
    for kind, rope_type in kinds.items():
        _require(rope_type in STATIC_ROPE, "angles that depend on the length")
        prefix = f"{kind}_" if kind else ""
        angles = getattr(rotary, f"{prefix}inv_freq").float()
        yield kind, (angles, float(getattr(rotary, f"{prefix}attention_scaling")))


def _read_norm(module: Any) -> Norm:
    """A root mean square norm. Its gain is its weight, or 1 more than it, as in Gemma: a vector shows which."""
    epsilon = float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0)
    weight = getattr(module, "weight", None)
    _require(epsilon > 0 and isinstance(weight, Tensor) and weight.dim() == 1, "another norm")
    assert isinstance(weight, Tensor)
    x = torch.linspace(-2, 3, weight.numel(), device=weight.device)
    normed = x * torch.rsqrt(x.square().mean() + epsilon)
    found = module(x.to(weight.dtype)).float()
    for gain in (weight.data, 1 + weight.data.float()):
        if _near(found, normed * gain.float()):
            return Norm(gain.contiguous(), epsilon)
    raise UnsupportedModel("it has another norm")


def _activation_name(activation: Any) -> str:
    x = torch.linspace(-4, 4, 65)
    for name, function in ACTIVATIONS.items():
        if activation is not None and torch.allclose(activation(x).float(), function(x), atol=1e-4):
            return name
    raise UnsupportedModel("it has another activation")


def _is_normalised(router: Any) -> bool:
    """Whether the weights of a row's experts sum to 1: a softmax over those experts, and not over all. Random rows
    show which."""
    generator = torch.Generator().manual_seed(1)
    weight = router.weight.data
    rows = torch.randn(8, weight.shape[1], generator=generator).to(weight.device)
    rows = (rows / weight.float().norm(dim=1).mean().clamp(min=1e-6)).to(weight.dtype)  # no expert takes nearly all
    logits, weights, chosen = router(rows)[:3]
    scores = logits.float()
    _require(weights.shape == chosen.shape == (8, router.top_k), "another router")
    chosen_scores = scores.gather(1, chosen).sort(1, descending=True).values
    _require(torch.equal(chosen_scores, scores.topk(router.top_k).values), "another router")  # such as a biased choice
    for normalised in (True, False):
        among = scores.gather(1, chosen) if normalised else scores
        expected = (scores.gather(1, chosen) - among.logsumexp(1, keepdim=True)).exp()
        if _near(weights.float(), expected):
            return normalised
    raise UnsupportedModel("it has another router")


def _linear(*modules: nn.Linear) -> Linear:
    for module in modules:
        plain = type(module) is nn.Linear and module.weight.is_floating_point()
        _require(plain, "quantised weights")
    return concatenate(*modules)


def _near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found.float(), expected, atol=2e-2, rtol=2e-2)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UnsupportedModel(f"it has {what}")
