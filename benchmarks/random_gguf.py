"""GGUF files of random weights in the shapes of published models, for measurements. All layers have the same weights,
and so have all experts of a layer: what is computed and what is read from memory is that of a real file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_files import Array, Repeated, qwen3_metadata, write_gguf

COMMON = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_local_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151_936, "num_hidden_layers": 48, "rope_parameters": {"rope_theta": 1e6},
    },
    "gemma3-4b": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_144, "num_hidden_layers": 34,
        "sliding_window": 1024, "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 201_088, "num_hidden_layers": 24, "sliding_window": 128,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150_000.0}
        | {"original_max_position_embeddings": 4096},
    },
}  # fmt: skip
"""Settings of config.json. Contexts are short, so that llama.cpp's cache fits beside the weights. Heads have weights of
their own: a random model with those of its embedding repeats one token."""
SEED = 1


def write_shape(folder: Path, shape: str, layers: int | None) -> None:
    """The config.json of a shape, with the tokenizer of the folder. `layers`: fewer of them."""
    config = COMMON | SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    (folder / "config.json").write_text(json.dumps(config))


def write_random_gguf(folder: Path, path: Path, kind: str) -> Path:
    """`kind`: the type of the matrices; with mxfp4 others than those of experts are q8_0, as in published files. Tokens
    that the tokenizer has no text for never come."""
    config = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(SEED)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    head = np.zeros((vocabulary, hidden), np.float32)
    texts = _texts(folder)
    head[texts] = rng.standard_normal((len(texts), hidden), np.float32) * 0.05
    rest = "q8_0" if kind == "mxfp4" else kind
    tensors: dict[str, tuple[str, Array | Repeated]] = {"token_embd.weight": (rest, np.roll(head, 1, axis=1))}
    tensors["output.weight"] = (rest, head)
    tensors["output_norm.weight"] = ("f32", np.ones(hidden, np.float32))
    layer = dict(_layer(config, kind, rest, rng))
    for number in range(config["num_hidden_layers"]):
        tensors |= {f"blk.{number}.{name}": tensor for name, tensor in layer.items()}
    return write_gguf(path, qwen3_metadata(folder, kind), tensors)


def _texts(folder: Path) -> list[int]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    return sorted(set(tokenizer["model"]["vocab"].values()) - {token["id"] for token in tokenizer["added_tokens"]})


def _layer(
    config: dict[str, Any], kind: str, rest: str, rng: np.random.Generator
) -> Iterator[tuple[str, tuple[str, Any]]]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    experts = config.get("num_local_experts")
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    is_oss, is_gemma = config["model_type"] == "gpt_oss", config["model_type"].startswith("gemma")

    def matrix(outputs: int, inputs: int) -> Array:
        return rng.standard_normal((outputs, inputs), np.float32) / np.float32(np.sqrt(inputs))

    for name, outputs, inputs in (
        ("attn_q", queries, hidden),
        ("attn_k", keys, hidden),
        ("attn_v", keys, hidden),
        ("attn_output", hidden, queries),
    ):
        yield f"{name}.weight", (rest, matrix(outputs, inputs))
        if is_oss:
            yield f"{name}.bias", ("f32", np.zeros(outputs, np.float32))
    for name, outputs, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        if experts is None:
            yield f"ffn_{name}.weight", (kind, matrix(outputs, inputs))
            continue
        yield f"ffn_{name}_exps.weight", (kind, Repeated(matrix(outputs, inputs), experts))
        if is_oss:
            yield f"ffn_{name}_exps.bias", ("f32", np.zeros((experts, outputs), np.float32))
    if experts is not None:
        yield "ffn_gate_inp.weight", ("f32", matrix(experts, hidden))
    if is_oss:
        yield "ffn_gate_inp.bias", ("f32", np.zeros(experts, np.float32))
        yield "attn_sinks.weight", ("f32", np.zeros(config["num_attention_heads"], np.float32))
    else:
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"{name}.weight", ("f32", np.ones(size, np.float32))
    norms = ("attn_norm", "post_attention_norm" if is_oss else "ffn_norm")
    for name in (*norms, "post_attention_norm", "post_ffw_norm") if is_gemma else norms:
        yield f"{name}.weight", ("f32", np.ones(hidden, np.float32))
