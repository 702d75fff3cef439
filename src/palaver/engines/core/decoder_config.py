"""Decoders that are recognised by their configuration alone, without the transformers library: plain ones, and for
compiled steps those with experts, windows of attention or the norms and caps of Gemma.

A configuration is accepted only if all of its settings that matter are known, rotary embeddings included. Any doubt is
an UnsupportedModel: the library's own code then runs the model, or its modules show that it is a plain decoder after
all."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaver.engines.base import EngineInfo
from palaver.engines.core import gguf_metadata
from palaver.engines.core.checkpoint import Checkpoint, read_json
from palaver.engines.core.quantization_config import IGNORED, TYPES, Quantization, TensorShapes
from palaver.engines.core.runner import UnsupportedModel
from palaver.errors import BadParameter, ModelError
from palaver.sampling import NUMBERS, Sampling

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """The angle of each pair of a head at position 1, and the factor of all cosines and sines."""

    angles: Floats
    scaling: float


def default_frequencies(theta: float, head_dim: int) -> Floats:
    return (np.float32(1) / _wavelengths(theta, head_dim)).astype(np.float32)


def linear_frequencies(theta: float, head_dim: int, rope: Mapping[str, Any]) -> Floats:
    """All positions are divided by the factor."""
    return default_frequencies(theta, head_dim) / np.float32(rope["factor"])


def llama3_frequencies(theta: float, head_dim: int, rope: Mapping[str, Any]) -> Floats:
    """Long waves are divided by the factor, short ones stay, and those between are blended."""
    angles = default_frequencies(theta, head_dim)
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    waves = np.float32(2 * math.pi) / angles
    blend = (np.float32(length) / waves - np.float32(low)) / np.float32(high - low)
    divided = angles / np.float32(rope["factor"])
    blended = (np.float32(1) - blend) * divided + blend * angles
    long, short = waves > np.float32(length / low), waves < np.float32(length / high)
    return np.where(long, divided, np.where(short, angles, blended)).astype(np.float32)


def yarn_frequencies(theta: float, head_dim: int, rope: Mapping[str, Any]) -> Floats:
    """As llama3, with a linear ramp between the pairs that turn `beta_fast` and `beta_slow` times."""
    waves = _wavelengths(theta, head_dim)
    length = rope["original_max_position_embeddings"]

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    ramp = ((np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)).clip(0, 1)
    kept = np.float32(1) - ramp
    stretched = np.float32(1) / (np.float32(rope["factor"]) * waves)
    return (stretched * (np.float32(1) - kept) + (np.float32(1) / waves) * kept).astype(np.float32)


def yarn_scaling(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(mscale: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * mscale * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1)


def _wavelengths(theta: float, head_dim: int) -> Floats:
    """How many positions each pair takes to turn by one radian."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    waves: Floats = np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)
    return waves


QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION = (*QKV, "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LAYER_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
"""The latter two where what attention and the feed-forward part add is normed."""
ROUTER = "mlp.gate"
MAX_LAYERS, MAX_EXPERTS, MAX_HEAD_DIM = 10_000, 1024, 1024
MAX_SIZE, MAX_NUMBER = 2**31 - 1, 1e30
"""Of any setting: larger ones overflow where they are computed with."""
SINKS = "self_attn.sinks"
GELU_TANH, CLAMPED_SWIGLU = "gelu_pytorch_tanh", "clamped_swiglu"
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Of clamped gates, as compiled steps have them."""
FULL_ATTENTION, WINDOW_ATTENTION = "full_attention", "sliding_attention"
DEFAULT_THETA = 10_000.0
GENERATION_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
ROPE_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
}
"""The kinds of rotary embedding that are understood: the settings that each needs, and those it may have."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of one `model_type` have in common."""

    qkv_bias: bool | None = None
    """Whether queries, keys and values have biases; None where `attention_bias` says it, for the output too."""
    mlp_bias: bool = False
    """Whether `mlp_bias` may be set."""
    qk_norm: bool = False
    optional_window: bool = False
    """Whether `sliding_window` only counts with `use_sliding_window`."""
    required: tuple[str, ...] = ()
    """Settings whose defaults differ from family to family."""
    activation: str = "silu"
    full_layers: int | None = None
    """Where `layer_types` is missing, one layer of so many has no window; 0 if always all have one. None if no layer
    may."""
    names_full_layers: bool = False
    """Whether `sliding_window_pattern` may be another number of layers."""
    local_angles: bool = False
    """Whether layers with a window have angles of their own. Their defaults differ from those of other families."""
    gemma: bool = False
    """Whether embeddings are scaled, scores by a setting of their own, logits may have a cap, weights of norms are less
    1, and what attention and the feed-forward part add is normed."""
    caps_scores: bool = False
    """Whether scores may have a cap: the library ignores that of Gemma 3."""
    experts: bool = False
    gpt_oss: bool = False
    """Whether attention has sinks, and gates are clamped."""


FAMILIES = {
    "llama": Family(mlp_bias=True),
    "mistral": Family(qkv_bias=False, full_layers=0, required=("sliding_window",)),
    "qwen2": Family(qkv_bias=True, optional_window=True),
    "qwen3": Family(qk_norm=True, optional_window=True, required=("head_dim",)),
    "qwen3_moe": Family(
        qk_norm=True, optional_window=True, required=("head_dim", "norm_topk_prob", "decoder_sparse_step"), experts=True
    ),
    "gemma2": Family(
        activation=GELU_TANH,
        full_layers=2,
        gemma=True,
        caps_scores=True,
        required=(
            *("head_dim", "sliding_window", "query_pre_attn_scalar"),
            *("attn_logit_softcapping", "final_logit_softcapping"),
        ),
    ),
    "gemma3_text": Family(
        qk_norm=True,
        activation=GELU_TANH,
        full_layers=6,
        names_full_layers=True,
        local_angles=True,
        gemma=True,
        required=("head_dim", "sliding_window", "query_pre_attn_scalar"),
    ),
    "gpt_oss": Family(full_layers=2, required=("head_dim", "sliding_window"), experts=True, gpt_oss=True),
}


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A feed-forward part of which each token chooses some experts."""

    count: int
    per_token: int
    weighs_all: bool
    """Whether an expert's weight is its share of all, not of the chosen ones."""
    biases: bool = False
    """Whether experts, and the router that chooses them, have biases."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderConfig:
    """The sizes and parts of a decoder."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    epsilon: float
    tied: bool
    """Whether the embedding is the output layer too."""
    biases: frozenset[str]
    """The projections that have a bias."""
    qk_norm: bool
    frequencies: Frequencies
    scale: float
    """Of the products of queries and keys."""
    windows: tuple[int, ...] = ()
    """By layer, how many keys a query sees; 0 for all. Empty where no layer has a window."""
    local_frequencies: Frequencies | None = None
    """Of the layers with a window, where they differ."""
    activation: str = "silu"
    embedding_scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    """The limits that scores and logits are moved below; 0 for none."""
    norms_results: bool = False
    """Whether what attention and the feed-forward part add is normed."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    sinks: bool = False
    """Whether each head has a score that no key has, which takes its share of the weights."""
    experts: ExpertSizes | None = None
    """`intermediate_size` is that of an expert then."""

    def check_plain(self) -> None:
        """Raises UnsupportedModel unless it is a plain decoder."""
        _require(not any(self.windows), "a window of attention")
        _require(self.experts is None, "experts")
        _require(not self.norms_results and not self.sinks, "other parts in its layers")

    def tensor_shapes(self, stacked: bool = False) -> dict[str, tuple[int, ...]]:
        """The tensors of the checkpoint. `stacked`: those of all experts are one tensor."""
        hidden, inner = (self.hidden_size,), (self.intermediate_size,)
        queries, keys = (self.num_heads * self.head_dim,), (self.num_kv_heads * self.head_dim,)
        outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        outputs |= {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
        inputs = dict.fromkeys(outputs, hidden) | {"o_proj": queries, "down_proj": inner}
        shapes = {"model.embed_tokens.weight": (self.vocabulary_size, *hidden), "model.norm.weight": hidden}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary_size, *hidden)
        for layer in range(self.num_layers):
            for name, size in outputs.items():
                module = f"{layer_prefix(layer)}{'self_attn' if name in ATTENTION else 'mlp'}.{name}"
                if self.experts is not None and name in MLP:
                    shapes |= self._expert_shapes(layer, name, (*size, *inputs[name]), stacked)
                    continue
                shapes[f"{module}.weight"] = (*size, *inputs[name])
                if name in self.biases:
                    shapes[f"{module}.bias"] = size
            if self.experts is not None:
                shapes[f"{layer_prefix(layer)}{ROUTER}.weight"] = (self.experts.count, *hidden)
                if self.experts.biases:
                    shapes[f"{layer_prefix(layer)}{ROUTER}.bias"] = (self.experts.count,)
            if self.sinks:
                shapes[f"{layer_prefix(layer)}{SINKS}.weight"] = (self.num_heads,)
            for name in LAYER_NORMS if self.norms_results else LAYER_NORMS[:2]:
                shapes[f"{layer_prefix(layer)}{name}.weight"] = hidden
            for name in ("q_norm", "k_norm") if self.qk_norm else ():
                shapes[f"{layer_prefix(layer)}self_attn.{name}.weight"] = (self.head_dim,)
        return shapes

    def _expert_shapes(
        self, layer: int, name: str, shape: tuple[int, ...], stacked: bool
    ) -> dict[str, tuple[int, ...]]:
        assert self.experts is not None
        count, weights = self.experts.count, {"weight": shape}
        if self.experts.biases:
            weights["bias"] = shape[:1]
        if stacked:
            return {f"{expert_projection(layer, name)}.{part}": (count, *one) for part, one in weights.items()}
        experts = [expert_projection(layer, name, expert) for expert in range(count)]
        return {f"{expert}.{part}": one for expert in experts for part, one in weights.items()}

    def joined_layers(self) -> Iterator[tuple[str, ...]]:
        """The linear layers, those together that are computed side by side."""
        for layer in range(self.num_layers):
            attention, mlp = f"{layer_prefix(layer)}self_attn.", f"{layer_prefix(layer)}mlp."
            yield tuple(f"{attention}{name}" for name in QKV)
            yield (f"{attention}o_proj",)
            yield f"{mlp}gate_proj", f"{mlp}up_proj"
            yield (f"{mlp}down_proj",)


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expert_projection(layer: int, name: str, expert: int | None = None) -> str:
    """The module of one expert, or of all of them."""
    number = "" if expert is None else f".{expert}"
    return f"{layer_prefix(layer)}mlp.experts{number}.{name}"


FLOATS = frozenset({"F32", "F16", "BF16"})


def read_decoder_config(
    checkpoint: Checkpoint, quantised: Collection[str] = (), quantization: Quantization | None = None
) -> DecoderConfig:
    """Raises UnsupportedModel unless the configuration and the tensors are those of a decoder that is known.

    `quantised`: the types that matrices may have beside floats. `quantization`: how linear layers are stored."""
    config = _parse(checkpoint.config)
    if checkpoint.header is not None:
        config = replace(config, norm_offset=0.0)  # it is added in the file
    _require(quantization is not None or not checkpoint.config.get("quantization_config"), "quantised weights")
    stacked = config.experts is not None and f"{expert_projection(0, MLP[0])}.weight" in checkpoint.tensors
    per_layer = 1 if config.experts is None or stacked else config.experts.count
    _require(config.num_layers * per_layer <= len(checkpoint.tensors), "more layers or experts than weights")
    expected: TensorShapes = {name: (shape,) for name, shape in config.tensor_shapes(stacked).items()}
    found = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    if quantization is not None:
        expected = _quantised_shapes(expected, quantization, found)
        found = {name: shape for name, shape in found.items() if name.rpartition(".")[2] not in IGNORED}
        quantised = TYPES
    names = sorted(set(found) ^ set(expected)) or sorted(name for name in found if found[name] not in expected[name])
    if names:
        raise UnsupportedModel(f"its weights are not those of its configuration ({names[0]})")
    for name, tensor in checkpoint.tensors.items():
        is_matrix = (len(tensor.shape) > 1 and not name.endswith(".bias")) or quantization is not None
        known = tensor.dtype in FLOATS or (is_matrix and tensor.dtype in quantised)
        _require(known or name not in expected, f"weights of the type {tensor.dtype}")
    return config if checkpoint.rope_factors is None else _divide_frequencies(config, checkpoint.rope_factors)


def read_plain_config(checkpoint: Checkpoint, quantization: Quantization | None = None) -> DecoderConfig:
    """The same for plain decoders alone."""
    config = read_decoder_config(checkpoint, quantization=quantization)
    config.check_plain()
    return config


def _quantised_shapes(plain: TensorShapes, quantization: Quantization, found: Collection[str]) -> TensorShapes:
    """The shapes with those of quantised linear layers in the place of their weights."""
    shapes = dict(plain)
    for name, (shape,) in plain.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == "model.embed_tokens":
            continue
        stored = quantization.tensor_shapes(module, *shape, found)
        if stored is not None:
            del shapes[name]
            shapes |= stored
            if f"{module}.bias" in found:  # some programs store zeros
                shapes[f"{module}.bias"] = ((shape[0],),)
    _require(shapes.keys() != plain.keys(), "a quantisation, and no quantised weights")
    return shapes


def _divide_frequencies(config: DecoderConfig, factors: Floats) -> DecoderConfig:
    angles = config.frequencies.angles
    _require(factors.shape == angles.shape, "an unknown rotary embedding")
    return replace(config, frequencies=Frequencies(angles / factors, config.frequencies.scaling))


def _parse(config: Mapping[str, Any]) -> DecoderConfig:
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UnsupportedModel("it is of another kind")
    _require(config.get("hidden_activation", config.get("hidden_act")) == family.activation, "another activation")
    _require(not config.get("use_bidirectional_attention"), "attention to later tokens")
    for name in family.required:
        _require(name in config, f"no setting {name}")
    heads, hidden = _positive(config, "num_attention_heads"), _positive(config, "hidden_size")
    implicit = config.get("head_dim") is None
    _require(not (implicit and hidden % heads), "sizes that don't fit each other")
    head_dim = hidden // heads if implicit else _positive(config, "head_dim")
    kv_heads = _positive(config, "num_key_value_heads")
    _require(heads % kv_heads == 0 and head_dim % 2 == 0, "sizes that don't fit each other")
    _require(head_dim <= MAX_HEAD_DIM, "heads of more than 1024 numbers")
    max_position, num_layers = _positive(config, "max_position_embeddings"), _positive(config, "num_hidden_layers")
    _require(num_layers <= MAX_LAYERS, "more layers than weights")
    experts = _experts(family, config) if family.experts else None
    expert_size = "intermediate_size" if family.gpt_oss else "moe_intermediate_size"
    frequencies, local_frequencies = _all_frequencies(family, config, head_dim, max_position)
    return DecoderConfig(
        vocabulary_size=_positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size" if experts is None else expert_size),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        epsilon=_number(config, "rms_norm_eps"),
        tied=_flag(config, "tie_word_embeddings", family.gemma),
        biases=_biases(family, config),
        qk_norm=family.qk_norm,
        frequencies=frequencies,
        scale=(_positive_number(config, "query_pre_attn_scalar") if family.gemma else head_dim) ** -0.5,
        windows=_windows(family, config, num_layers),
        local_frequencies=local_frequencies,
        activation=CLAMPED_SWIGLU if family.gpt_oss else family.activation,
        embedding_scale=math.sqrt(hidden) if family.gemma else 1.0,
        score_cap=_cap(config, "attn_logit_softcapping") if family.caps_scores else 0.0,
        logit_cap=_cap(config, "final_logit_softcapping") if family.gemma else 0.0,
        norms_results=family.gemma,
        norm_offset=1.0 if family.gemma else 0.0,
        sinks=family.gpt_oss,
        experts=experts,
    )


def _windows(family: Family, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    counts = not family.optional_window or config.get("use_sliding_window")
    window: Any = config.get("sliding_window") if counts else None
    kinds: Any = config.get("layer_types")
    names = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    _require(kinds is None or names, "an unknown kind of attention")
    if not window and set(kinds or ()) <= {FULL_ATTENTION}:
        _require(kinds is not None or not family.full_layers, "layers with windows of no size")
        return ()
    _require(type(window) is int and window > 0 and family.full_layers is not None, "a window of attention")
    _require(kinds is None or family.full_layers != 0, "an unknown kind of attention")
    if kinds is None:
        named: Any = config.get("sliding_window_pattern") if family.names_full_layers else None
        pattern: Any = family.full_layers if named is None else named
        _require(type(pattern) is int and pattern >= 0, "an unknown kind of attention")
        full = [pattern > 0 and (layer + 1) % pattern == 0 for layer in range(num_layers)]
        kinds = [FULL_ATTENTION if is_full else WINDOW_ATTENTION for is_full in full]
    known = set(kinds) <= {FULL_ATTENTION, WINDOW_ATTENTION}
    _require(known and len(kinds) == num_layers, "an unknown kind of attention")
    return tuple(window if kind == WINDOW_ATTENTION else 0 for kind in kinds)


def _experts(family: Family, config: Mapping[str, Any]) -> ExpertSizes:
    count = _positive(config, "num_experts" if "num_experts" in config else "num_local_experts")
    chosen = _positive(config, "num_experts_per_tok")
    _require(chosen <= count <= MAX_EXPERTS, "sizes that don't fit each other")
    if family.gpt_oss:
        clamps = config.get("swiglu_limit", SWIGLU_LIMIT), config.get("swiglu_alpha", SWIGLU_ALPHA)
        _require(clamps == (SWIGLU_LIMIT, SWIGLU_ALPHA), "another activation")
        return ExpertSizes(count, chosen, weighs_all=False, biases=True)
    _require(config.get("decoder_sparse_step") == 1 and not config.get("mlp_only_layers"), "layers without experts")
    return ExpertSizes(count, chosen, weighs_all=not _flag(config, "norm_topk_prob"))


def _cap(config: Mapping[str, Any], name: str) -> float:
    return 0.0 if config.get(name) is None else _positive_number(config, name)


def _biases(family: Family, config: Mapping[str, Any]) -> frozenset[str]:
    mlp = MLP if family.mlp_bias and _flag(config, "mlp_bias") else ()
    if family.qkv_bias is not None:
        return frozenset((*QKV, *mlp) if family.qkv_bias else mlp)
    return frozenset((*ATTENTION, *mlp) if _flag(config, "attention_bias") else mlp)


def _all_frequencies(
    family: Family, config: Mapping[str, Any], head_dim: int, max_position: int
) -> tuple[Frequencies, Frequencies | None]:
    """Those of all layers, or of those without a window and those with one."""
    if not family.local_angles:
        return _frequencies(config, head_dim, max_position), None
    by_layer = config.get("rope_parameters")
    if by_layer is None:
        _require({"rope_theta", "rope_local_base_freq"} <= config.keys(), "no base of its angles")
        local = {"rope_theta": config["rope_local_base_freq"]}
        return _frequencies(config, head_dim, max_position), _frequencies(local, head_dim, max_position)
    kinds = (FULL_ATTENTION, WINDOW_ATTENTION)
    _require(isinstance(by_layer, Mapping) and by_layer.keys() == set(kinds), "an unknown rotary embedding")
    ropes = [by_layer[kind] for kind in kinds]
    named = all(isinstance(rope, Mapping) and "rope_theta" in rope for rope in ropes)
    _require(named and not config.get("rope_scaling"), "an unknown rotary embedding")
    full, own = (_frequencies({**config, "rope_parameters": rope}, head_dim, max_position) for rope in ropes)
    return full, own


def _frequencies(config: Mapping[str, Any], head_dim: int, max_position: int) -> Frequencies:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    _require(isinstance(rope, Mapping) and "partial_rotary_factor" not in config, "an unknown rotary embedding")
    _require("original_max_position_embeddings" not in config, "an unknown rotary embedding")
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(isinstance(kind, str) and kind in ROPE_KEYS, "angles that depend on the length")
    theta = rope.get("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    needed, optional = ROPE_KEYS[kind]
    settings = {name: value for name, value in rope.items() if name not in ("rope_type", "type", "rope_theta")}
    if "original_max_position_embeddings" in needed:
        settings.setdefault("original_max_position_embeddings", max_position)
    _require(needed <= set(settings) <= needed | optional, "an unknown rotary embedding")
    numbers = [theta, *(settings[name] for name in needed)]
    _require(all(_is_number(value) and value > 0 for value in numbers), "an unknown rotary embedding")
    try:
        angles, scaling = _angles(kind, theta, head_dim, settings)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise UnsupportedModel("it has an unknown rotary embedding") from error
    _require(bool(np.isfinite(angles).all()), "an unknown rotary embedding")
    return Frequencies(angles, scaling)


def _angles(kind: str, theta: float, head_dim: int, rope: Mapping[str, Any]) -> tuple[Any, float]:
    if kind == "yarn":
        return yarn_frequencies(theta, head_dim, rope), yarn_scaling(rope)
    if kind == "llama3":
        return llama3_frequencies(theta, head_dim, rope), 1.0
    if kind == "linear":
        return linear_frequencies(theta, head_dim, rope), 1.0
    return default_frequencies(theta, head_dim), 1.0


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value <= MAX_SIZE:
        raise UnsupportedModel(f"it has no setting {name}")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if not _is_number(value):
        raise UnsupportedModel(f"it has no setting {name}")
    return float(value)  # type: ignore[arg-type]


def _positive_number(config: Mapping[str, Any], name: str) -> float:
    value = _number(config, name)
    _require(value > 0, f"no setting {name}")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """The default where it is missing, as in the library for these families."""
    value = config.get(name, default)
    if type(value) is not bool:
        raise UnsupportedModel(f"it has no setting {name}")
    return value


def _is_number(value: object) -> bool:
    """Whether it is a finite number, of a size that float32 has."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UnsupportedModel(f"it has {what}")


def read_generation_config(checkpoint: Checkpoint) -> tuple[Sampling, frozenset[int]]:
    """The model's sampling defaults and its end-of-sequence ids. Raises UnsupportedModel where they aren't plain."""
    if checkpoint.header is not None:
        return gguf_metadata.sampling_defaults(checkpoint.header), gguf_metadata.end_ids(checkpoint.header)
    path = checkpoint.folder / "generation_config.json"
    generation: Any = None
    if path.is_file():
        try:
            generation = read_json(path)
        except ModelError as error:
            raise UnsupportedModel("its generation_config.json can't be read") from error
    elif any(name in checkpoint.config for name in (*GENERATION_PARAMETERS, "do_sample")):
        raise UnsupportedModel("its sampling defaults are in its config.json")
    if "eos_token_id" not in checkpoint.config or not isinstance(generation, dict | None):
        raise UnsupportedModel("it names no end of a reply")
    ends = _token_ids(checkpoint.config) | _token_ids(generation or {})
    return sampling_defaults(generation or {}), ends


def generation_settings(folder: Path, config: Mapping[str, Any]) -> tuple[Sampling, frozenset[int]]:
    """As `read_generation_config`, of any model: what isn't plain is ignored."""
    path = folder / "generation_config.json"
    found = read_json(path) if path.is_file() else {}
    generation = found if isinstance(found, dict) else {}
    configs = (config, config.get("text_config") or {}, generation)
    ends = [config.get("eos_token_id") for config in configs]
    ids = [token_id for one in ends for token_id in (one if isinstance(one, list) else [one])]
    return sampling_defaults(generation), frozenset(token_id for token_id in ids if isinstance(token_id, int))


def decoder_info(
    checkpoint: Checkpoint, config: DecoderConfig, context: int | None, device: str, dtype: str
) -> EngineInfo:
    """What the files say of the model. `context`: a context length shorter than the model's own."""
    defaults, end_ids = read_generation_config(checkpoint)
    return EngineInfo(
        model=checkpoint.name,
        context_length=min(config.max_position, context or config.max_position),
        vocabulary_size=config.vocabulary_size,
        end_ids=end_ids,
        defaults=defaults,
        device=device,
        dtype=dtype,
    )


def _token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token_id) is int for token_id in ids):
        raise UnsupportedModel("it names no end of a reply")
    return frozenset(ids)


def sampling_defaults(generation: Mapping[str, Any]) -> Sampling:
    """The defaults of a generation configuration; invalid values are ignored."""
    found = {name: _valid(name, generation.get(name)) for name in GENERATION_PARAMETERS}
    settings = {name: value for name, value in found.items() if value is not None}
    do_sample = generation.get("do_sample")
    if do_sample is False or (do_sample is None and "temperature" not in settings):
        settings["temperature"] = 0.0
    return Sampling(**settings)


def _valid(name: str, value: Any) -> Any:
    try:
        return NUMBERS[name].check(value)
    except BadParameter:
        return None
