"""Writes GGUF files: any metadata and tensors, and checkpoints of plain decoders such as the embedded model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.gguf_quants import BLOCKS, quantise

ALIGNMENT = 32
Array = np.ndarray[Any, np.dtype[Any]]
CONTROL, USER_DEFINED, NORMAL, UNUSED, BYTE = 3, 4, 1, 5, 6
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9}
FILE_TYPES |= {"q4_k": 15, "q5_k": 17, "q6_k": 18, "mxfp4": 38}
_TENSOR_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
_TENSOR_TYPES |= {"q4_k": 12, "q5_k": 13, "q6_k": 14, "mxfp4": 39}
Kinds = str | Callable[[str], str]
"""The type of all matrices, or of the matrix of a name."""


class Repeated(NamedTuple):
    """So many times the same matrix, which is encoded once."""

    values: Array
    times: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.times, *self.values.shape


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Array | Repeated]] | None = None,
    version: int = 3,
) -> Path:
    """`tensors`: the type, such as "f32" or "q4_k", and the float values of each."""
    tensors = tensors or {}
    known: dict[tuple[str, int], bytes] = {}
    for kind, values in tensors.values():
        if (kind, id(values)) not in known:
            known[kind, id(values)] = _encode_tensor(kind, values)
    encoded = {name: known[kind, id(values)] for name, (kind, values) in tensors.items()}
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_text(key), _value(value)]
    offset = 0
    for name, (kind, values) in tensors.items():
        head += [_text(name), struct.pack("<I", len(values.shape))]
        head += [struct.pack("<Q", size) for size in reversed(values.shape)]
        head.append(struct.pack("<IQ", _TENSOR_TYPES[kind], offset))
        offset += _padded(len(encoded[name]))
    with path.open("wb") as file:
        data = b"".join(head)
        file.write(data.ljust(_padded(len(data)), b"\0"))
        for one in encoded.values():
            file.write(one.ljust(_padded(len(one)), b"\0"))
    return path


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case list():
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        case bytes():  # a value that is encoded already, with its type
            return value
        case _:
            raise TypeError(type(value))


def _encode_tensor(kind: str, values: Array | Repeated) -> bytes:
    if isinstance(values, Repeated):
        return _encode_tensor(kind, values.values) * values.times
    if kind in BLOCKS:
        return quantise(kind, values).tobytes()
    if kind == "bf16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16).tobytes()
    return np.ascontiguousarray(values, np.float16 if kind == "f16" else np.float32).tobytes()


def tokenizer_metadata(definition: str, pre: str = "qwen2", whole: bool = True, size: int = 0) -> dict[str, Any]:
    """The vocabulary of a byte-level tokenizer.json, padded to `size`. `whole`: with the definition itself, as some
    files have it."""
    spec = json.loads(definition)
    pieces = {token_id: piece for piece, token_id in spec["model"]["vocab"].items()}
    kinds = dict.fromkeys(pieces, NORMAL)
    for token in spec["added_tokens"]:
        pieces[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    size = max(size, max(pieces) + 1)
    merges = [one if isinstance(one, str) else " ".join(one) for one in spec["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [pieces.get(token_id, f"[PAD{token_id}]") for token_id in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(token_id, UNUSED) for token_id in range(size)],
        "tokenizer.ggml.merges": merges or ["a b"],
        **({"tokenizer.huggingface.json": definition} if whole else {}),
    }


def convert_qwen3(folder: Path, path: Path, kind: str = "f32", extra: Mapping[str, Any] | None = None) -> Path:
    """A GGUF file of a Qwen3 checkpoint. `kind`: the type of its matrices."""
    return write_gguf(path, {**qwen3_metadata(folder, kind), **(extra or {})}, qwen3_tensors(folder, kind))


def qwen3_metadata(folder: Path, kind: str = "f32") -> dict[str, Any]:
    """With the tokenizer, the template and the defaults of its folder."""
    config = _read(folder / "config.json")
    template = folder / "chat_template.jinja"
    ends = _read(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    defaults = _read(folder / "generation_config.json")
    named = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
    return {
        **decoder_metadata(folder, kind),
        **tokenizer_metadata((folder / "tokenizer.json").read_text(), size=config["vocab_size"]),
        "tokenizer.ggml.eos_token_id": ends[0],
        "tokenizer.ggml.add_bos_token": False,
        **({"tokenizer.ggml.eot_token_id": ends[1]} if len(ends) > 1 else {}),
        **({"tokenizer.chat_template": template.read_text()} if template.is_file() else {}),
        **{f"general.sampling.{ours}": defaults[name] for name, ours in named.items() if name in defaults},
    }


def qwen3_tensors(folder: Path, kind: Kinds = "f32") -> dict[str, tuple[str, Array]]:
    return decoder_tensors(folder, kind)


def architecture(config: Mapping[str, Any]) -> str:
    """llama.cpp's name."""
    names = {"mistral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"}
    return names.get(config["model_type"], config["model_type"])


def decoder_metadata(folder: Path, kind: str = "f32") -> dict[str, Any]:
    """Without a tokenizer."""
    config = _read(folder / "config.json")
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    settings = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta") or config["rope_theta"]),
        **_rope_settings(rope),
        **_special_settings(config),
    }
    name = architecture(config)
    general = {"architecture": name, "name": folder.name, "file_type": FILE_TYPES[kind]}
    return _prefixed("general", general) | _prefixed(name, settings)


def _special_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of some architectures alone."""
    match config["model_type"]:
        case "qwen3_moe":
            return {
                "expert_count": config["num_local_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
            }
        case "gemma2":
            caps = {f"{name}_logit_softcapping": config[f"{name}_logit_softcapping"] for name in ("attn", "final")}
            return caps | {"attention.sliding_window": config["sliding_window"]}
        case "gpt_oss":
            return {
                "expert_count": config["num_local_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config["intermediate_size"],
                "attention.sliding_window": config["sliding_window"],
            }
        case "gemma3_text":
            return {"attention.sliding_window": config["sliding_window"]}
    return {}


def _prefixed(prefix: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in settings.items()}


def _rope_settings(rope: Mapping[str, Any]) -> dict[str, Any]:
    match rope.get("rope_type"):
        case "linear":
            return _prefixed("rope.scaling", {"type": "linear", "factor": float(rope["factor"])})
        case "yarn":
            length = rope["original_max_position_embeddings"]
            scaling = {"type": "yarn", "factor": float(rope["factor"]), "original_context_length": length}
            scaling |= {f"yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow") if name in rope}
            return _prefixed("rope.scaling", scaling)
        case _:
            return {}


def rope_factors(rope: Mapping[str, Any], head_dim: int) -> Array:
    """What llama.cpp divides the frequencies of Llama 3 by."""
    factors = []
    for pair in range(head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wave
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def decoder_tensors(folder: Path, kind: Kinds = "f32") -> dict[str, tuple[str, Array]]:
    """The weights by llama.cpp's names, the queries and keys of Llama in its order. Vectors stay in f32."""
    from safetensors.torch import load_file

    config, out = _read(folder / "config.json"), {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    is_gemma = architecture(config).startswith("gemma")
    named = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, values in stack_experts(named, config.get("num_local_experts") or 0).items():
        ours = _tensor_name(name, _OTHER_LAYER_NAMES.get(architecture(config), _LAYER_NAMES))
        module = ours.split(".")[-2]
        if is_gemma and values.ndim == 1:
            values = values + np.float32(1)
        if architecture(config) == "llama" and module in heads:
            halves = values.reshape(heads[module], 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        is_vector = values.ndim == 1 or module == "ffn_gate_inp" or ours.endswith(".bias")
        out[ours] = ("f32" if is_vector else kind if isinstance(kind, str) else kind(ours), values)
    if config.get("tie_word_embeddings"):
        out.pop("output.weight", None)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = ("f32", rope_factors(rope, config["head_dim"]))
    return out


def stack_experts(named: Mapping[str, Array], count: int) -> dict[str, Array]:
    """The weights of all experts in one tensor."""
    plain = {name: values for name, values in named.items() if ".experts." not in name}
    for name, values in named.items():
        before, found, behind = name.partition(".experts.0.")
        if found:
            experts = [named[f"{before}.experts.{number}.{behind}"] for number in range(count)]
            plain[f"{before}.experts.{behind}"] = np.stack(experts)
        if ".experts." in name and name.rpartition(".")[2] in _OSS_PARTS:
            plain |= _split_oss(name, values)
    return plain


_OSS_PARTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _split_oss(name: str, values: Array) -> dict[str, Array]:
    """The experts of gpt-oss: inputs come first, and gates take turns with what they gate."""
    module, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
    part = "bias" if is_bias else "weight"
    values = values if is_bias else values.swapaxes(1, 2)
    if module.endswith(".down_proj"):
        return {f"{module}.{part}": values}
    prefix = module.removesuffix("gate_up_proj")
    return {f"{prefix}{which}_proj.{part}": values[:, first::2] for first, which in enumerate(("gate", "up"))}


def convert_adapter(adapter: Path, path: Path) -> Path:
    """A GGUF file of peft's LoRA adapter for a Qwen3 model."""
    from safetensors.torch import load_file

    prefix, parts = "base_model.model.", {".lora_A.weight": ".weight.lora_a", ".lora_B.weight": ".weight.lora_b"}
    tensors: dict[str, tuple[str, Array]] = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        part = next(part for part in parts if name.endswith(part))
        module = _tensor_name(name.removeprefix(prefix).removesuffix(part) + ".weight").removesuffix(".weight")
        tensors[module + parts[part]] = ("f32", tensor.float().numpy())
    general = {"general.type": "adapter", "general.architecture": "qwen3"}
    alpha = float(_read(adapter / "adapter_config.json")["lora_alpha"])
    return write_gguf(path, {**general, "adapter.type": "lora", "adapter.lora.alpha": alpha}, tensors)


def make_mamba(path: Path, definition: str, context: int = 256) -> Path:
    """A random Mamba model: its state can't be cut."""
    width, inner, state, rank, layers, rng = 64, 128, 16, 4, 2, np.random.default_rng(1)
    metadata = {
        "general.architecture": "mamba",
        "mamba.block_count": layers,
        "mamba.context_length": context,
        "mamba.embedding_length": width,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": 4,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
        **tokenizer_metadata(definition),
    }

    def random(*shape: int) -> tuple[str, Array]:
        return "f32", rng.normal(0, 0.5, shape).astype(np.float32)

    size = len(metadata["tokenizer.ggml.tokens"])
    tensors = {"token_embd.weight": random(size, width), "output_norm.weight": random(width)}
    for layer in range(layers):
        block = {
            "attn_norm.weight": random(width),
            "ssm_in.weight": random(2 * inner, width),
            "ssm_conv1d.weight": random(inner, 4),
            "ssm_conv1d.bias": random(inner),
            "ssm_x.weight": random(rank + 2 * state, inner),
            "ssm_dt.weight": random(inner, rank),
            "ssm_dt.bias": random(inner),
            "ssm_a": ("f32", -np.abs(random(inner, state)[1])),
            "ssm_d": random(inner),
            "ssm_out.weight": random(width, inner),
        }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return write_gguf(path, metadata, tensors)


_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OSS_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}
_OTHER_LAYER_NAMES = {"gemma2": _GEMMA_NAMES, "gemma3": _GEMMA_NAMES, "gpt-oss": _OSS_NAMES}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _tensor_name(name: str, layer_names: Mapping[str, str] = _LAYER_NAMES) -> str:
    name, _, part = name.rpartition(".") if not name.endswith(".sinks") else (name, "", "weight")
    if name in _OUTER_NAMES:
        return f"{_OUTER_NAMES[name]}.{part}"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{layer_names[rest]}.{part}"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
