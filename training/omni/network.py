"""The Qwen2.5-Omni thinker in plain PyTorch, for training on packed rows. Tests prove that it gives the logits of
transformers' `Qwen2_5OmniThinkerForConditionalGeneration`.

Pictures and chunks of sound are padded to one size each, so that they form a dense batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.network import Body, Mask, Norm, Shape, attend, rotated
from training.omni.features import CHUNK, MAX_PATCHES, MELS, PATCH_PIXELS
from training.omni.tokens import ENTRIES

Cache = list[tuple[Tensor, Tensor] | None]
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


_TEXT = Shape(vocabulary=ENTRIES)


@dataclass(frozen=True, slots=True)
class OmniShape:
    text: Shape = _TEXT
    rope_sections: tuple[int, int, int] = (1, 2, 13)
    """How many frequencies turn with time, height and width. Width gets the later ones, which are the slowest: with
    a share as in larger models the columns of a small picture would hardly differ."""
    vision_hidden: int = 192
    vision_inner: int = 512
    vision_layers: int = 4
    vision_heads: int = 6
    audio_hidden: int = 192
    audio_inner: int = 768
    audio_layers: int = 4
    audio_heads: int = 6


TINY = OmniShape(
    text=Shape(vocabulary=ENTRIES, hidden=64, inner=128, layers=2, heads=2, key_heads=1, head=32),
    vision_hidden=32,
    vision_inner=64,
    vision_layers=1,
    vision_heads=2,
    audio_hidden=32,
    audio_inner=64,
    audio_layers=1,
    audio_heads=2,
)


@dataclass(frozen=True, slots=True)
class Media:
    """The pictures and sounds of a batch, and where their embeddings go in its flattened rows."""

    patches: Tensor
    """Pictures as bytes: (pictures, MAX_PATCHES, PATCH_PIXELS)."""
    grids: Tensor
    """Rows and columns of patches of each picture."""
    chunks: Tensor
    """Sounds as bytes: (chunks, CHUNK, MELS)."""
    frames: Tensor
    """The frames of each chunk."""
    picture_from: Tensor
    picture_to: Tensor
    sound_from: Tensor
    sound_to: Tensor


class VisionAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        value = _heads(self.v(x), self.heads)
        query = rotated(_heads(self.q(x), self.heads).float(), cos, sin).to(value.dtype)
        key = rotated(_heads(self.k(x), self.heads).float(), cos, sin).to(value.dtype)
        return self.proj(_joined(F.scaled_dot_product_attention(query, key, value, seen)))


class VisionInner(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner)
        self.up_proj = nn.Linear(hidden, inner)
        self.down_proj = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionBlock(nn.Module):
    def __init__(self, shape: OmniShape) -> None:
        super().__init__()
        self.norm1 = Norm(shape.vision_hidden, 1e-6)
        self.norm2 = Norm(shape.vision_hidden, 1e-6)
        self.attn = VisionAttention(shape.vision_hidden, shape.vision_heads)
        self.mlp = VisionInner(shape.vision_hidden, shape.vision_inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, seen)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.ln_q = Norm(hidden, 1e-6)
        self.mlp = nn.Sequential(nn.Linear(4 * hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).flatten(-2).view(*x.shape[:-2], -1, 4 * x.shape[-1]))


class PatchEmbed(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, hidden, (2, 14, 14), (2, 14, 14), bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """A picture is a film of two equal frames: the weights of both are added up."""
        return F.linear(patches, self.proj.weight.sum(2).flatten(1))


class Vision(nn.Module):
    """Every block attends to the whole picture: pictures are no larger than a window."""

    def __init__(self, shape: OmniShape) -> None:
        super().__init__()
        self.head = shape.vision_hidden // shape.vision_heads
        self.patch_embed = PatchEmbed(shape.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.vision_layers))
        self.merger = Merger(shape.vision_hidden, shape.text.hidden)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Embeddings of (pictures, MAX_PATCHES / 4); those after the end of a picture mean nothing."""
        mean = torch.tensor(MEAN, device=patches.device).repeat_interleave(PATCH_PIXELS // 3)
        deviation = torch.tensor(DEVIATION, device=patches.device).repeat_interleave(PATCH_PIXELS // 3)
        x = self.patch_embed((patches.float() / 255 - mean) / deviation)
        cos, sin = self._rotations(grids)
        seen = torch.arange(MAX_PATCHES, device=grids.device) < (grids[:, 0] * grids[:, 1])[:, None]
        for block in self.blocks:
            x = block(x, cos, sin, seen[:, None, None])
        found = self.merger(x)
        assert isinstance(found, Tensor)
        return found

    def _rotations(self, grids: Tensor) -> tuple[Tensor, Tensor]:
        """Patches come in squares of four, and the squares in rows."""
        at = torch.arange(MAX_PATCHES, device=grids.device)
        square, columns = at // 4, (grids[:, 1:] // 2)
        row = square // columns * 2 + at % 4 // 2
        column = square % columns * 2 + at % 2
        half = self.head // 2
        frequencies = 10_000.0 ** (-torch.arange(0, half, 2, dtype=torch.float32, device=grids.device) / half)
        angles = torch.cat([row[..., None] * frequencies, column[..., None] * frequencies], -1)
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos(), angles.sin()


class AudioAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        query, key, value = (_heads(part(x), self.heads) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(_joined(F.scaled_dot_product_attention(query, key, value, seen)))


class AudioBlock(nn.Module):
    def __init__(self, shape: OmniShape) -> None:
        super().__init__()
        self.self_attn = AudioAttention(shape.audio_hidden, shape.audio_heads)
        self.self_attn_layer_norm = nn.LayerNorm(shape.audio_hidden)
        self.fc1 = nn.Linear(shape.audio_hidden, shape.audio_inner)
        self.fc2 = nn.Linear(shape.audio_inner, shape.audio_hidden)
        self.final_layer_norm = nn.LayerNorm(shape.audio_hidden)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), seen)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Audio(nn.Module):
    """Chunks of at most two seconds; none hears its neighbour."""

    def __init__(self, shape: OmniShape) -> None:
        super().__init__()
        hidden = shape.audio_hidden
        self.conv1 = nn.Conv1d(MELS, hidden, 3, padding=1)
        self.conv2 = nn.Conv1d(hidden, hidden, 3, stride=2, padding=1)
        self.audio_bos_eos_token = nn.Embedding(2, shape.text.hidden)  # transformers has it and uses it nowhere
        self.layers = nn.ModuleList(AudioBlock(shape) for _ in range(shape.audio_layers))
        self.ln_post = nn.LayerNorm(hidden)
        self.proj = nn.Linear(hidden, shape.text.hidden)

    def forward(self, features: Tensor, frames: Tensor) -> Tensor:
        """Embeddings of (chunks, CHUNK / 4); those after the end of a chunk mean nothing."""
        heard = torch.arange(CHUNK, device=frames.device) < frames[:, None]
        x = features.transpose(1, 2) * heard[:, None]
        x = F.gelu(self.conv1(x)) * heard[:, None]
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        x = x + _sinusoids(CHUNK // 2, x.shape[-1], x.device)
        seen = (torch.arange(CHUNK // 2, device=frames.device) < ((frames - 1) // 2 + 1)[:, None])[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        found = self.proj(self.ln_post((x[:, ::2] + x[:, 1::2]) / 2))
        assert isinstance(found, Tensor)
        return found


def _sinusoids(length: int, channels: int, device: torch.device) -> Tensor:
    step = math.log(10_000) / (channels // 2 - 1)
    scales = torch.exp(-step * torch.arange(channels // 2, device=device).float())
    angles = torch.arange(length, device=device)[:, None] * scales
    return torch.cat([angles.sin(), angles.cos()], 1)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class BiasedAttention(nn.Module):
    """Qwen2's: biases, and no norms of queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head)
        self.k_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head)
        self.v_proj = nn.Linear(shape.hidden, shape.key_heads * shape.head)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: Cache | None = None, layer: int = 0
    ) -> Tensor:
        split = (*x.shape[:2], -1, self.head)
        value = self.v_proj(x).view(split).transpose(1, 2)
        query = rotated(self.q_proj(x).view(split).transpose(1, 2).float(), cos, sin).to(value.dtype)
        key = rotated(self.k_proj(x).view(split).transpose(1, 2).float(), cos, sin).to(value.dtype)
        if cache is not None:
            earlier = cache[layer]
            if earlier is not None:
                key, value = torch.cat([earlier[0], key], 2), torch.cat([earlier[1], value], 2)
            cache[layer] = (key, value)
        return self.o_proj(_joined(attend(query, key, value, mask)))


class OmniNetwork(nn.Module):
    def __init__(self, shape: OmniShape) -> None:
        super().__init__()
        self.shape = shape
        self.visual = Vision(shape)
        self.audio_tower = Audio(shape)
        self.language_model = Body(shape.text, BiasedAttention)
        self.apply(_start)

    def embed(self, tokens: Tensor, media: Media | None) -> Tensor:
        """The embeddings of tokens, with those of pictures and sounds in their places."""
        x = self.language_model.embed_tokens(tokens)
        assert isinstance(x, Tensor)
        if media is None:
            return x
        flat = x.flatten(0, 1)
        if len(media.patches):
            seen = self.visual(media.patches, media.grids).flatten(0, 1)
            flat = flat.index_copy(0, media.picture_to, seen[media.picture_from].to(flat.dtype))
        if len(media.chunks):
            heard = self.audio_tower(_levels(media.chunks), media.frames).flatten(0, 1)
            flat = flat.index_copy(0, media.sound_to, heard[media.sound_from].to(flat.dtype))
        return flat.view_as(x)

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for positions of (3, rows, length): time, height and width."""
        shape = self.shape.text
        steps = torch.arange(0, shape.head, 2, dtype=torch.float32, device=positions.device)
        angles = positions[..., None].float() * shape.theta ** (-steps / shape.head)
        parts = angles.split(self.shape.rope_sections, -1)
        angles = torch.cat([part[at] for at, part in enumerate(parts)], -1)
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: Cache | None = None) -> Tensor:
        """The hidden states after the last block, before the final norm."""
        for at, block in enumerate(self.language_model.layers):
            x = block(x, cos, sin, mask, cache, at) if cache is not None else block(x, cos, sin, mask)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.language_model.norm(hidden), self.language_model.embed_tokens.weight)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The mean over the tokens to learn; others are labelled -100."""
        return F.cross_entropy(self.logits(hidden).float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def _levels(chunks: Tensor) -> Tensor:
    """Log-mel levels from bytes; see `features.as_bytes`."""
    return chunks.float() / 64 - 2 if chunks.dtype == torch.uint8 else chunks


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def parameters_of(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def library_config(shape: OmniShape, ids: dict[str, int]) -> dict[str, Any]:
    """The same as keyword arguments of transformers' Qwen2_5OmniThinkerConfig."""
    text = {k: v for k, v in shape.text.config().items() if k not in ("head_dim", "attention_bias")}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": list(shape.rope_sections)}
    return {
        "text_config": text,
        "vision_config": {
            "depth": shape.vision_layers,
            "hidden_size": shape.vision_hidden,
            "intermediate_size": shape.vision_inner,
            "num_heads": shape.vision_heads,
            "out_hidden_size": shape.text.hidden,
            "fullatt_block_indexes": list(range(shape.vision_layers)),
        },
        "audio_config": {
            "encoder_layers": shape.audio_layers,
            "encoder_attention_heads": shape.audio_heads,
            "encoder_ffn_dim": shape.audio_inner,
            "d_model": shape.audio_hidden,
            "output_dim": shape.text.hidden,
            "n_window": CHUNK // 2,
        },
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **ids,
    }
