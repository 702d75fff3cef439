"""The parts of a plain decoder from a checkpoint's files, without the transformers library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.decoder_config import QKV, DecoderConfig, layer_prefix
from palaver.engines.torch.decoders.plain import (
    DecoderLayer,
    Linear,
    PlainDecoder,
    RMSNorm,
    RotaryEmbedding,
    StaticRotary,
    build_layer,
    norm_heads,
)


def read_plain_decoder(
    checkpoint: Checkpoint, config: DecoderConfig, device: torch.device, dtype: torch.dtype, max_position: int
) -> PlainDecoder:
    with _open_files(checkpoint) as files:
        return _Reader(checkpoint, config, files, device, dtype).decoder(max_position)


@contextmanager
def _open_files(checkpoint: Checkpoint) -> Iterator[dict[Any, Any]]:
    with ExitStack() as stack:
        yield {path: stack.enter_context(safe_open(path, framework="pt")) for path in checkpoint.weights}


class _Reader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        files: dict[Any, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._files = files
        self._device = device
        self._dtype = dtype

    def decoder(self, max_position: int) -> PlainDecoder:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight")
        static = StaticRotary(config.frequencies, self._device)
        rotary = RotaryEmbedding(static, embedding.new_empty(1), config.head_dim, max_position)
        return PlainDecoder(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            scale=config.scale,
            max_position=max_position,
            embedding=embedding,
            rotary=rotary,
            layers=[self._layer(layer_prefix(layer), rotary) for layer in range(config.num_layers)],
            norm=self._norm("model.norm"),
            lm_head=Linear(embedding.t().contiguous(), None) if config.tied else self._linear("", "lm_head"),
        )

    def _layer(self, prefix: str, rotary: RotaryEmbedding) -> DecoderLayer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return build_layer(
            input_norm=self._norm(f"{prefix}input_layernorm"),
            qkv_proj=self._linear(attention, *QKV),
            qk_norm=self._qk_norm(attention) if self._config.qk_norm else None,
            o_proj=self._linear(attention, "o_proj"),
            post_attention_norm=self._norm(f"{prefix}post_attention_layernorm"),
            gate_up_proj=self._linear(mlp, "gate_proj", "up_proj"),
            down_proj=self._linear(mlp, "down_proj"),
            rotary=rotary,
        )

    def _linear(self, prefix: str, *names: str) -> Linear:
        """Several layers side by side."""
        weight = torch.cat([self._tensor(f"{prefix}{name}.weight") for name in names]).t().contiguous()
        biases = [self._tensor(f"{prefix}{name}.bias") for name in names if name in self._config.biases]
        return Linear(weight, torch.cat(biases) if biases else None)

    def _norm(self, module: str) -> RMSNorm:
        return RMSNorm(self._tensor(f"{module}.weight"), self._config.epsilon)

    def _qk_norm(self, prefix: str) -> RMSNorm:
        query, key = (self._tensor(f"{prefix}{name}.weight") for name in ("q_norm", "k_norm"))
        return norm_heads(query, key, self._config.num_heads, self._config.num_kv_heads, self._config.epsilon)

    def _tensor(self, name: str) -> Tensor:
        file = self._files[self._checkpoint.tensors[name].path]
        tensor: Tensor = file.get_tensor(name).to(self._device, self._dtype)
        return tensor
