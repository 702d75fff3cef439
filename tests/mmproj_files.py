"""Writes tiny random projectors of GGUF models: `mmproj` files, and random text models for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_files import Array, tokenizer_metadata, write_gguf

HIDDEN, LAYERS, FEED_FORWARD = 64, 2, 128
WIDTH = 64
"""Of the random text models."""
MEL_BINS, FRAMES = 128, 1500
KINDS = {"mlp": "image", "gemma3": "image", "qwen2vl_merger": "image", "qwen2a": "audio"}
"""The types of projectors that this module writes, and what they take. The tokens of a picture see each other with
gemma3; they have positions in three dimensions with qwen2vl_merger."""
Tensors = dict[str, tuple[str, Array]]


def make_projector(path: Path, kind: str, width: int, size: int = 64) -> Path:
    """`width`: of the text model's embeddings. `size`: of the pictures that the encoder gets, in pixels."""
    makers = {"mlp": _llava, "gemma3": _gemma, "qwen2vl_merger": _qwen_vision, "qwen2a": _whisper}
    tensors = makers[kind](_Random(3), width, (size // 8) ** 2)
    media = KINDS[kind].replace("image", "vision")
    fields: dict[str, Any] = {
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "projection_dim": width,
        "block_count": LAYERS,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if media == "vision":
        fields |= {"image_size": size, "patch_size": 8, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    else:
        fields["num_mel_bins"] = MEL_BINS
    metadata = {
        "general.architecture": "clip",
        "general.file_type": 0,
        f"clip.has_{media}_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": True,
        **{f"clip.{media}.{name}": value for name, value in fields.items()},
    }
    return write_gguf(path, metadata, tensors)


class _Random:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 0.3) -> tuple[str, Array]:
        return "f32", self._rng.normal(0, scale, shape).astype(np.float32)

    def linear(self, name: str, out: int, width: int, scale: float = 0.1) -> Tensors:
        return {f"{name}.weight": self(out, width, scale=scale), f"{name}.bias": self(out)}

    def norm(self, name: str, width: int) -> Tensors:
        return {f"{name}.weight": self(width), f"{name}.bias": self(width)}

    def blocks(self, prefix: str) -> Tensors:
        found: Tensors = {}
        for layer in range(LAYERS):
            block = f"{prefix}.blk.{layer}"
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                found |= self.linear(f"{block}.{name}", HIDDEN, HIDDEN)
            found |= self.norm(f"{block}.ln1", HIDDEN) | self.norm(f"{block}.ln2", HIDDEN)
            found |= self.linear(f"{block}.ffn_up", FEED_FORWARD, HIDDEN)
            found |= self.linear(f"{block}.ffn_down", HIDDEN, FEED_FORWARD)
        return found


def _llava(random: _Random, width: int, patches: int) -> Tensors:
    return {
        "v.patch_embd.weight": random(HIDDEN, 3, 8, 8),
        "v.position_embd.weight": random(patches, HIDDEN),
        **random.blocks("v"),
        **random.linear("mm.0", width, HIDDEN),
        **random.linear("mm.2", width, width, scale=0.05),
    }


def _gemma(random: _Random, width: int, patches: int) -> Tensors:
    return {
        "v.patch_embd.weight": random(HIDDEN, 3, 8, 8),
        "v.patch_embd.bias": random(HIDDEN),
        "v.position_embd.weight": random(patches, HIDDEN),
        **random.blocks("v"),
        **random.norm("v.post_ln", HIDDEN),
        "mm.input_projection.weight": random(HIDDEN, width),
        "mm.soft_emb_norm.weight": random(HIDDEN),
    }


def _qwen_vision(random: _Random, width: int, patches: int) -> Tensors:
    return {
        "v.patch_embd.weight": random(HIDDEN, 3, 8, 8),
        "v.patch_embd.weight.1": random(HIDDEN, 3, 8, 8),
        **random.blocks("v"),
        **random.norm("v.post_ln", HIDDEN),
        **random.linear("mm.0", 4 * HIDDEN, 4 * HIDDEN),
        **random.linear("mm.2", width, 4 * HIDDEN, scale=0.05),
    }


def _whisper(random: _Random, width: int, patches: int) -> Tensors:
    return {
        "a.conv1d.1.weight": random(HIDDEN, MEL_BINS, 3, scale=0.1),
        "a.conv1d.1.bias": random(HIDDEN, 1),
        "a.conv1d.2.weight": random(HIDDEN, HIDDEN, 3, scale=0.1),
        "a.conv1d.2.bias": random(HIDDEN, 1),
        "a.position_embd.weight": random(FRAMES, HIDDEN),
        **{name: tensor for name, tensor in random.blocks("a").items() if not name.endswith("attn_k.bias")},
        **random.norm("a.post_ln", HIDDEN),
        **random.linear("mm.a.fc", width, HIDDEN),
    }


def make_qwen2(path: Path, definition: str, template: str = "", context: int = 3000, dimensions: int = 1) -> Path:
    """A random Qwen2, or the text model of a random Qwen2-VL, whose positions have three dimensions."""
    width, heads, kv_heads, inner, random = WIDTH, 4, 2, 128, _Random(5)
    size = width // heads
    fields = {
        "block_count": LAYERS,
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        **({"rope.dimension_sections": [2, 3, 3, 0]} if dimensions == 3 else {}),
    }
    architecture = "qwen2vl" if dimensions == 3 else "qwen2"
    metadata = {
        "general.architecture": architecture,
        "general.file_type": 0,
        **{f"{architecture}.{name}": value for name, value in fields.items()},
        **tokenizer_metadata(definition),
        "tokenizer.ggml.add_bos_token": False,
        **({"tokenizer.chat_template": template} if template else {}),
    }
    tensors: Tensors = {
        "token_embd.weight": random(len(metadata["tokenizer.ggml.tokens"]), width),
        "output_norm.weight": random(width),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensors |= random.linear(f"{block}.attn_q", width, width)
        tensors |= random.linear(f"{block}.attn_k", kv_heads * size, width)
        tensors |= random.linear(f"{block}.attn_v", kv_heads * size, width)
        tensors |= {
            f"{block}.attn_output.weight": random(width, width),
            f"{block}.attn_norm.weight": random(width),
            f"{block}.ffn_norm.weight": random(width),
            f"{block}.ffn_gate.weight": random(inner, width),
            f"{block}.ffn_up.weight": random(inner, width),
            f"{block}.ffn_down.weight": random(width, inner),
        }
    return write_gguf(path, metadata, tensors)
