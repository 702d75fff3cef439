"""Tiny random models of many families, with a vocabulary of single bytes and a few markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from palaver.engines.torch.loader import quiet

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<end>", "<start>")
VOCABULARY: tuple[bytes, ...] = (*(bytes([byte]) for byte in range(256)), *(marker.encode() for marker in MARKERS))
THINK, THINK_END, CALL, CALL_END, END, START = range(256, 256 + len(MARKERS))
SIZE = len(VOCABULARY)

SMALL: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": END,
}
WINDOWED: dict[str, Any] = {"sliding_window": 24}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", WINDOWED),
    "gemma3": (
        "Gemma3TextConfig",
        {**WINDOWED, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
    ),
    "gemma2": (
        "Gemma2Config",
        {**WINDOWED, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
    ),
    "gpt_oss": ("GptOssConfig", {**WINDOWED, **EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "phi3": ("Phi3Config", {"rope_scaling": None}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "longrope": (
        "Phi3Config",
        {"original_max_position_embeddings": 96}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}},
    ),
    "dynamic_ntk": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "sliding_window": None,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
            | {
                "original_max_position_embeddings": 128,
                "llama_4_scaling_beta": 0.5,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
            | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {"num_hidden_layers": 4, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 80, "floor_scale": 64, "attn_scale": 0.5, "no_rope_layer_interval": 2},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 128}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 32},
    ),
    "jamba": (
        "JambaConfig",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
        | {"mamba_d_state": 8, "use_mamba_kernels": False},
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    ),
    "mamba": ("MambaConfig", {"state_size": 8, "conv_kernel": 4, "expand": 2}),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False}),
}


def config(family: str, **overrides: Any) -> Any:
    name, special = FAMILIES[family]
    with quiet():
        return getattr(transformers, name)(**(SMALL | special | overrides))


def build(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A model with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    with quiet():
        model = transformers.AutoModelForCausalLM.from_config(config(family, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that begin as ones and zeros would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """The same, as files."""
    with quiet():
        build(family, seed, **overrides).save_pretrained(folder)
    return folder
