"""A GGUF file of a decoder that compiled steps run, in the terms of a folder with config.json and safetensors.

A file is accepted only if every setting of its architecture is known; the rest is checked as for folders
(`decoder_config.py`). llama.cpp runs all other files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.checkpoint import Checkpoint, StoredTensor
from palaver.engines.core.decoder_config import (
    FULL_ATTENTION,
    GELU_TANH,
    ROUTER,
    SINKS,
    WINDOW_ATTENTION,
    layer_prefix,
)
from palaver.engines.core.runner import UnsupportedModel
from palaver.errors import BrokenModel
from palaver.gguf import GGUFHeader, Tensor, read_gguf

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
}
"""llama.cpp's names of architectures, and those of config.json. Mistral is a llama there."""
EXPERTS = ("qwen3moe", "gpt-oss")
WINDOWED = ("gemma2", "gemma3", "gpt-oss")
PAIRED = {"llama": ("attn_q", "attn_k")}
"""The tensors whose rows lie in pairs that turn together, by architecture."""
ROPE_FACTORS = "rope_freqs.weight"
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Settings that every file has, and their names in config.json."""
_ROPE = {
    "none": {},
    "linear": {"rope.scaling.factor": "factor"},
    "yarn": {
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    },
}
"""The kinds of scaled rotary embeddings: their settings, and the names of these in config.json."""
_KNOWN = frozenset({
    *_SIZES, *(key for keys in _ROPE.values() for key in keys), "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.sliding_window", "expert_count", "expert_used_count", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.finetuned", "vocab_size",
})  # fmt: skip
SHARED_EXPERTS = "expert_shared_feed_forward_length"
_ALSO_KNOWN = {
    "qwen3moe": {"expert_feed_forward_length", SHARED_EXPERTS},
    "gpt-oss": {"expert_feed_forward_length"},
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {"final_logit_softcapping", "attention.sliding_window_pattern", "rope.freq_base_swa"},
}
"""The settings of some architectures alone."""
_OF_PICTURES = {"gemma3": ("mm.", "vision.")}
"""How those begin that describe the encoder of pictures, which is in another file."""
GEMMA2_WINDOW, GEMMA2_SCORE_CAP, GEMMA2_LOGIT_CAP = 4096, 50.0, 30.0
GEMMA3_PATTERN, GEMMA3_LOCAL_THETA = 6, 10_000.0
"""What llama.cpp takes where a file does not say it."""
GPT_OSS_YARN = {"truncate": False}
"""As the model was trained; files don't say it."""
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""The layers of the model with 27 billion parameters, which divides scores by another number than the others."""
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": SINKS,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": ROUTER,
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_OTHER_LAYER_NAMES = {
    "gpt-oss": _LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    **dict.fromkeys(
        ("gemma2", "gemma3"),
        _LAYER_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}


def open_gguf_checkpoint(file: Path) -> Checkpoint:
    """Reads the header only. Raises BrokenModel, and UnsupportedModel unless all settings are known."""
    header = read_gguf(file)
    settings = _settings(header)
    names = {tensor.name for tensor in header.tensors}
    config = _config(header, settings, names)
    layer_names = _OTHER_LAYER_NAMES.get(header.architecture, _LAYER_NAMES)
    tensors = {_name(tensor.name, layer_names): _stored(header, settings, tensor) for tensor in header.tensors}
    _require(len(tensors) == len(header.tensors), "it has two tensors for one purpose")
    factors = tensors.pop(ROPE_FACTORS, None)
    return Checkpoint(
        name=header.name,
        folder=file.parent,
        config=config,
        weights=header.files,
        tensors=tensors,
        header=header,
        rope_factors=None if factors is None else _read_factors(factors),
    )


def _settings(header: GGUFHeader) -> dict[str, Any]:
    """The settings of the architecture. Raises UnsupportedModel where one is not known or can't be followed."""
    _require(header.architecture in MODEL_TYPES, "it is of another kind")
    _require(header.metadata.get("general.type", "model") == "model", "it is no model")
    prefix = f"{header.architecture}."
    settings = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    known = _KNOWN | _ALSO_KNOWN.get(header.architecture, set())
    unknown = sorted(
        key for key in set(settings) - known if not key.startswith(_OF_PICTURES.get(header.architecture, ()))
    )
    _require(not unknown, f"it has the unknown setting {unknown[0] if unknown else ''}")
    if header.architecture not in EXPERTS:
        _require(not settings.get("expert_count") and not settings.get("expert_used_count"), "it has experts")
    _require(not settings.get(SHARED_EXPERTS), "it has shared experts")  # Qwen3-Coder's files say 0
    _require(settings.get("vocab_size", len(header.pieces)) == len(header.pieces), "it has another vocabulary")
    if header.architecture not in WINDOWED:
        window, context = settings.get("attention.sliding_window") or math.inf, settings.get("context_length", 0)
        numbers = isinstance(window, int | float) and isinstance(context, int)
        _require(numbers and window >= context, "it has a window of attention")
    key_length = settings.get("attention.key_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        _require(settings.get(name, _head_dim(settings)) == _head_dim(settings), "it has heads of several sizes")
    _require(key_length is None or type(key_length) is int, "it has heads of several sizes")
    return settings


def _head_dim(settings: Mapping[str, Any]) -> int | None:
    """As llama.cpp finds it; None for settings that no model has."""
    hidden, heads = settings.get("embedding_length"), settings.get("attention.head_count")
    implied = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
    found = settings.get("attention.key_length", implied)
    return found if type(found) is int else None


def _config(header: GGUFHeader, settings: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The same as a config.json."""
    return {
        **{name: settings.get(key) for key, name in _SIZES.items()},
        "model_type": MODEL_TYPES[header.architecture],
        "hidden_act": "silu",
        "vocab_size": len(header.pieces),
        "head_dim": _head_dim(settings),
        "num_key_value_heads": settings.get("attention.head_count_kv", settings.get("attention.head_count")),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "rope_parameters": _rope_parameters(settings),
        **_special(header.architecture, settings),
    }


def _special(architecture: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What only some architectures have."""
    match architecture:
        case "qwen3moe":
            return {
                "num_experts": settings.get("expert_count"),
                "num_experts_per_tok": settings.get("expert_used_count"),
                "moe_intermediate_size": settings.get("expert_feed_forward_length"),
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
            }
        case "gpt-oss":
            rope = _rope_parameters(settings)
            return {
                "num_experts": settings.get("expert_count"),
                "num_experts_per_tok": settings.get("expert_used_count"),
                "intermediate_size": settings.get("expert_feed_forward_length"),
                "sliding_window": settings.get("attention.sliding_window"),
                "rope_parameters": rope | (GPT_OSS_YARN if rope["rope_type"] == "yarn" else {}),
            }
        case "gemma2":
            return _gemma(architecture, settings) | {
                "sliding_window": settings.get("attention.sliding_window", GEMMA2_WINDOW),
                "attn_logit_softcapping": settings.get("attn_logit_softcapping", GEMMA2_SCORE_CAP),
                "final_logit_softcapping": settings.get("final_logit_softcapping", GEMMA2_LOGIT_CAP),
            }
        case "gemma3":
            local_theta = settings.get("rope.freq_base_swa", GEMMA3_LOCAL_THETA)
            return _gemma(architecture, settings) | {
                "sliding_window": settings.get("attention.sliding_window"),
                "sliding_window_pattern": settings.get("attention.sliding_window_pattern", GEMMA3_PATTERN),
                "final_logit_softcapping": settings.get("final_logit_softcapping") or None,
                "rope_parameters": {
                    FULL_ATTENTION: _rope_parameters(settings),
                    WINDOW_ATTENTION: {"rope_type": "default", "rope_theta": local_theta},
                },
            }
    return {}


def _gemma(architecture: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    scale: Any = _head_dim(settings)
    hidden, heads = settings.get("embedding_length"), settings.get("attention.head_count")
    if settings.get("block_count") == LARGEST_GEMMA[architecture] and type(hidden) is int and type(heads) is int:
        scale = hidden // max(heads, 1)
    return {"hidden_act": GELU_TANH, "query_pre_attn_scalar": scale}


def _rope_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    kind = settings.get("rope.scaling.type", "linear" if "rope.scaling.factor" in settings else "none")
    _require(isinstance(kind, str) and kind in _ROPE, "it has an unknown rotary embedding")
    found = {name: settings[key] for key, name in _ROPE[kind].items() if key in settings}
    theta = {"rope_theta": settings["rope.freq_base"]} if "rope.freq_base" in settings else {}
    return {"rope_type": "default" if kind == "none" else kind, **found, **theta}


def _name(name: str, layer_names: Mapping[str, str]) -> str:
    """The tensor's name in safetensors; its own where they have no such tensor."""
    module, _, part = name.rpartition(".")
    if module in _OUTER_NAMES:
        return f"{_OUTER_NAMES[module]}.{part}"
    prefix, _, inner = module.rpartition(".")
    block, _, layer = prefix.partition(".")
    if block == "blk" and layer.isdecimal() and inner in layer_names:
        return f"{layer_prefix(int(layer))}{layer_names[inner]}.{part}"
    return name


def _stored(header: GGUFHeader, settings: Mapping[str, Any], tensor: Tensor) -> StoredTensor:
    heads = {"attn_q": settings.get("attention.head_count")}
    heads["attn_k"] = settings.get("attention.head_count_kv", heads["attn_q"])
    module = tensor.name.rpartition(".")[0].rpartition(".")[2]
    paired = heads[module] if module in PAIRED.get(header.architecture, ()) else 0
    shape = tuple(reversed(tensor.shape))
    return StoredTensor(tensor.path, tensor.offset, tensor.type.name, shape, tensor.nbytes, paired or 0)


def _read_factors(tensor: StoredTensor) -> NDArray[np.float32]:
    """By which the frequencies of the rotary embedding are divided."""
    _require(tensor.dtype == "F32" and len(tensor.shape) == 1, "it has an unknown rotary embedding")
    factors = np.fromfile(tensor.path, np.float32, tensor.elements, offset=tensor.offset)
    if factors.nbytes != tensor.nbytes:
        raise BrokenModel(f"A tensor in {str(tensor.path)!r} is not as long as its header says.")
    _require(bool((np.isfinite(factors) & (factors > 0)).all()), "it has an unknown rotary embedding")
    return factors


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise UnsupportedModel(why)
