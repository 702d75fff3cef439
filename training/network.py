"""Qwen3 in plain PyTorch, for training on packed rows. Parameter names are those of `Qwen3ForCausalLM`; a test
proves that both give the same logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from training.shards import LEARNED, STARTS, TOKEN

Mask: TypeAlias = BlockMask | Tensor | None
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Shape:
    vocabulary: int = 4096
    hidden: int = 256
    inner: int = 832
    layers: int = 8
    heads: int = 8
    key_heads: int = 4
    head: int = 32
    theta: float = 10_000.0
    epsilon: float = 1e-6
    context: int = 8192

    def config(self) -> dict[str, Any]:
        """The same as keyword arguments of transformers' Qwen3Config."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


TINY = Shape(hidden=64, inner=128, layers=2, heads=4, key_heads=2, head=16)
"""For computers without accelerator."""


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


def rotations(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    frequencies = shape.theta ** (-torch.arange(0, shape.head, 2, dtype=torch.float32) / shape.head)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head, shape.epsilon)
        self.k_norm = Norm(shape.head, shape.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        rows, length, _ = x.shape
        split = (rows, length, -1, self.head)
        value = self.v_proj(x).view(split).transpose(1, 2)
        query = rotated(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin).to(value.dtype)
        key = rotated(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin).to(value.dtype)
        seen = attend(query, key, value, mask)
        return self.o_proj(seen.transpose(1, 2).reshape(rows, length, -1))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    if isinstance(mask, BlockMask):
        found = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        assert isinstance(found, Tensor)
        return found
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)


class Inner(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.self_attn = attention(shape)
        self.mlp = Inner(shape)
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, *places: Any) -> Tensor:
        """`places`: what its attention takes beside the states."""
        x = x + self.self_attn(self.input_layernorm(x), *places)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """What transformers calls `model`: everything but the head, which shares the embedding's weights."""

    def __init__(self, shape: Shape, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Attention | Inner):
            last = module.o_proj if isinstance(module, Attention) else module.down_proj
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * self.shape.layers))

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """The hidden states after the last block, before the final norm."""
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x, cos, sin, mask)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The mean over the tokens to learn; others are labelled -100."""
        return F.cross_entropy(self.logits(hidden).float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def _blocks(documents: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, how many blocks of keys share a conversation with it, and which come first."""
    first, last = documents[:, ::BLOCK], documents[:, BLOCK - 1 :: BLOCK]
    order = torch.ones(first.shape[1], first.shape[1], dtype=torch.bool, device=documents.device).tril()
    shared = ((last[:, None, :] >= first[:, :, None]) & order)[:, None].to(torch.int32)
    return shared.sum(-1, dtype=torch.int32), shared.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def unpack_rows(packed: Tensor, attention: str) -> tuple[Tensor, Tensor, Mask]:
    """Token ids, labels (-100 where nothing is learned) and the mask of the rows of a shard."""
    ids = (packed & int(TOKEN)).long()
    learned = (packed & int(LEARNED)) != 0
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = torch.where(learned[:, 1:], ids[:, 1:], -100)
    documents = ((packed & int(STARTS)) != 0).to(torch.int32).cumsum(1, dtype=torch.int32)
    return ids, labels, documents_mask(documents, attention)


def documents_mask(documents: Tensor, kind: str) -> Mask:
    """Lets every token see its own conversation only, up to itself; `causal` lets it see the whole row so far."""
    _rows, length = documents.shape

    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    match kind:
        case "flex":
            return BlockMask.from_kv_blocks(*_blocks(documents), BLOCK_SIZE=BLOCK, mask_mod=same)
        case "dense":
            order = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
            return (documents[:, None, :, None] == documents[:, None, None, :]) & order
        case "causal":
            return None
        case _:
            raise ValueError(f"attention must be flex, dense or causal, not {kind}")
