"""Writes GGUF files: any metadata and tensors, and Qwen3 checkpoints such as the embedded model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
Array = np.ndarray[Any, np.dtype[Any]]
CONTROL, USER_DEFINED, NORMAL, UNUSED, BYTE = 3, 4, 1, 5, 6
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q4_0": 2, "q8_0": 7}
_TENSOR_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q8_0": 8}


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Array]] | None = None, version: int = 3
) -> Path:
    """`tensors`: the type ("f32", "f16", "bf16", "q8_0", "q4_0") and the float values of each."""
    tensors = tensors or {}
    encoded = {name: _encode_tensor(kind, values) for name, (kind, values) in tensors.items()}
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_text(key), _value(value)]
    offset = 0
    for name, (kind, values) in tensors.items():
        head += [_text(name), struct.pack("<I", values.ndim)]
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


def _encode_tensor(kind: str, values: Array) -> bytes:
    if kind == "q8_0":
        blocks = values.astype(np.float32).reshape(-1, 32)
        scales = np.abs(blocks).max(1, keepdims=True) / 127
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        rounded = np.round(blocks * inverse).astype(np.int8)
        return np.concatenate((scales.astype(np.float16).view(np.int8), rounded), axis=1).tobytes()
    if kind == "q4_0":
        blocks = values.astype(np.float32).reshape(-1, 32)
        scales = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1) / -8
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        nibbles = np.clip(np.floor(blocks * inverse + 8.5), 0, 15).astype(np.uint8)
        packed = nibbles[:, :16] | nibbles[:, 16:] << 4
        return np.concatenate((scales.astype(np.float16).view(np.uint8), packed), axis=1).tobytes()
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
    config = json.loads((folder / "config.json").read_text())
    template = folder / "chat_template.jinja"
    rope = config.get("rope_parameters") or {}
    ends = _read(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    defaults = _read(folder / "generation_config.json")
    named = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
    return {
        "general.architecture": "qwen3",
        "general.name": folder.name,
        "general.file_type": FILE_TYPES[kind],
        "qwen3.block_count": config["num_hidden_layers"],
        "qwen3.context_length": config["max_position_embeddings"],
        "qwen3.embedding_length": config["hidden_size"],
        "qwen3.feed_forward_length": config["intermediate_size"],
        "qwen3.attention.head_count": config["num_attention_heads"],
        "qwen3.attention.head_count_kv": config["num_key_value_heads"],
        "qwen3.attention.key_length": config["head_dim"],
        "qwen3.attention.value_length": config["head_dim"],
        "qwen3.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "qwen3.rope.freq_base": float(rope.get("rope_theta") or config["rope_theta"]),
        **tokenizer_metadata((folder / "tokenizer.json").read_text(), size=config["vocab_size"]),
        "tokenizer.ggml.eos_token_id": ends[0],
        "tokenizer.ggml.add_bos_token": False,
        **({"tokenizer.ggml.eot_token_id": ends[1]} if len(ends) > 1 else {}),
        **({"tokenizer.chat_template": template.read_text()} if template.is_file() else {}),
        **{f"general.sampling.{ours}": defaults[name] for name, ours in named.items() if name in defaults},
    }


def qwen3_tensors(folder: Path, kind: str = "f32") -> dict[str, tuple[str, Array]]:
    """The weights by llama.cpp's names. Vectors stay in f32."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    out = {}
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        out[_tensor_name(name)] = ("f32" if values.ndim == 1 else kind, values)
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        out.pop("output.weight", None)
    return out


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
}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _tensor_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in _OUTER_NAMES:
        return f"{_OUTER_NAMES[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.weight"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
