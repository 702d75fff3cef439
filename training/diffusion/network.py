"""Sprout's network for block diffusion: what it reads in training, and what it may see there.

A row has two parts. The first is clean: whole conversations, read causally, as Sprout reads them. The second is noisy:
blocks of the replies again, some of their tokens masked. A noisy block sees its own tokens in both directions, and of
the clean part its conversation before the block. So the keys and values of finished text never depend on a noisy block,
and a reply is generated block by block with an exact cache.

As in Sprout, the state at a token predicts the token after it. The first token of a block is predicted by the clean
token before it, the others by their left neighbour in the block, masked or not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from training import export
from training.network import BLOCK, Mask, Network, Shape, rotations
from training.shards import LEARNED, STARTS, TOKEN
from training.tokenizer import ENTRIES, SPROUT

MASK_TEXT = "<|mask|>"
MASK_ID = ENTRIES
END_ID = 2
"""Ends a reply, and fills its last block after the end."""
NOISY = 32
"""The tokens of a noisy block."""
CLEAN_WEIGHT = 0.3
"""The weight of the loss on clean tokens beside the one on masked tokens."""


def shape_of(shape: Shape) -> Shape:
    return replace(shape, vocabulary=ENTRIES + 1)


class DiffusionNetwork(Network):
    def logits(self, hidden: Tensor) -> Tensor:
        """Of all tokens but the mask, which is never predicted."""
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight[:ENTRIES])

    def weighted_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        losses = F.cross_entropy(
            self.logits(hidden).float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
        )
        return (losses * weights.flatten()).sum()


@torch.no_grad()
def start_from_sprout(network: DiffusionNetwork) -> None:
    """Sprout's weights; the mask starts as the mean of all tokens."""
    sprout = Network(Shape())
    export.restore(sprout, SPROUT)
    weights = sprout.state_dict()
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table.mean(0, keepdim=True)])
    network.load_state_dict(weights)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch of rows with a clean and a noisy part."""

    tokens: Tensor
    labels: Tensor
    """-100 where nothing is learned."""
    weights: Tensor
    """How much each label counts; the masked ones 1 in all, the clean ones `CLEAN_WEIGHT`."""
    cos: Tensor
    sin: Tensor
    mask: Mask


@dataclass(frozen=True, slots=True)
class Batcher:
    """Makes inputs of the rows of a shard: draws blocks of the replies and masks some of their tokens."""

    cos: Tensor
    sin: Tensor
    blocks: int
    """Noisy blocks in a row."""
    attention: str

    @classmethod
    def of(cls, shape: Shape, length: int, blocks: int, attention: str, device: torch.device) -> Batcher:
        cos, sin = rotations(shape, length + NOISY)
        return cls(cos.to(device), sin.to(device), blocks, attention)

    def inputs(self, packed: Tensor) -> Inputs:
        rows, length = packed.shape
        ids = (packed & int(TOKEN)).long()
        learned = (packed & int(LEARNED)) != 0
        documents = ((packed & int(STARTS)) != 0).to(torch.int32).cumsum(1, dtype=torch.int32)
        starts, drawn = draw_blocks(learned, self.blocks)
        places = (starts[:, :, None] + torch.arange(NOISY, device=ids.device)).flatten(1)
        target, inside = block_tokens(ids, documents, starts, places)
        masked = draw_masks(rows, self.blocks, ids.device).flatten(1)
        labels = torch.full((rows, length + places.shape[1]), -100, device=ids.device)
        labels[:, : length - 1] = torch.where(learned[:, 1:], ids[:, 1:], -100)
        follows = torch.arange(NOISY, device=ids.device).repeat(self.blocks)[1:] > 0
        told = masked[:, 1:] & follows & drawn.repeat_interleave(NOISY, 1)[:, 1:]
        labels[:, length:-1] = torch.where(told, target[:, 1:], -100)
        tokens = torch.cat([ids, torch.where(masked, MASK_ID, target)], 1)
        positions = torch.cat([torch.arange(length, device=ids.device).expand(rows, -1), places], 1)
        return Inputs(
            tokens,
            labels,
            _label_weights(labels, length, inside),
            self.cos[positions][:, None],
            self.sin[positions][:, None],
            visibility(documents, starts, self.attention),
        )


def _label_weights(labels: Tensor, length: int, inside: Tensor) -> Tensor:
    """The filling after the end of a reply counts a quarter: it is easy, and there is much of it."""
    weights = (labels != -100).float()
    weights[:, length:-1] *= torch.where(inside[:, 1:], 1.0, 0.25)
    clean, noisy = weights[:, :length], weights[:, length:]
    clean *= CLEAN_WEIGHT / clean.sum().clamp(min=1)
    noisy /= noisy.sum().clamp(min=1)
    return weights


def draw_blocks(learned: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where `count` blocks of each row start, in order, and which of them are real; a block may come up to three times.

    Most blocks start a multiple of their length after the start of the reply, as they do when it is generated. A
    quarter starts anywhere, as after a reply that was cut.
    """
    rows, length = learned.shape
    at = torch.arange(length, device=learned.device).expand(rows, -1)
    before = F.pad(learned, (1, 0))[:, :-1]
    begin = torch.where(learned & ~before, at, 0).cummax(1).values
    aligned = learned & ((at - begin) % NOISY == 0)
    order = torch.rand(rows, 3 * length, device=learned.device) - torch.arange(
        3, device=learned.device
    ).repeat_interleave(length)
    chosen = torch.where(aligned.repeat(1, 3), order, -10.0).topk(count, 1)
    starts, drawn = chosen.indices % length, chosen.values > -9
    moved = starts + torch.randint(0, NOISY, starts.shape, device=starts.device)
    moved = torch.where(learned.gather(1, moved.clamp(max=length - 1)) & (moved < length), moved, starts)
    # The next reply may begin within the distance: a moved block stays in its own.
    moved = torch.where(begin.gather(1, moved) == begin.gather(1, starts), moved, starts)
    starts = torch.where(torch.rand(starts.shape, device=starts.device) < 0.25, moved, starts)
    starts, by_place = starts.sort(1)
    return starts, drawn.gather(1, by_place)


def block_tokens(ids: Tensor, documents: Tensor, starts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the blocks, filled with end tokens after the reply, and which are of the reply."""
    length = ids.shape[1]
    clamped = places.clamp(max=length - 1)
    own = documents.gather(1, starts).repeat_interleave(NOISY, 1)
    inside = (documents.gather(1, clamped) == own) & (places < length)
    return torch.where(inside, ids.gather(1, clamped), END_ID), inside


def draw_masks(rows: int, blocks: int, device: torch.device) -> Tensor:
    """Which tokens of each block are masked.

    Half of the blocks are masked at a rate of their own, as in masked diffusion. The others are masked from a place on,
    with a few tokens shown behind it: generation goes from left to right more often than not.
    """
    shape = (rows, blocks, 1)
    noise = torch.rand(rows, blocks, NOISY, device=device)
    anywhere = noise < torch.rand(shape, device=device)
    at = torch.arange(NOISY, device=device)
    first = torch.randint(0, NOISY, shape, device=device)
    shown = torch.rand(shape, device=device) ** 3
    behind = (at >= first) & (noise >= shown)
    masked = torch.where(torch.rand(shape, device=device) < 0.5, anywhere, behind)
    # At least one token is masked, and not only the first, which the clean token before the block predicts.
    one = at == torch.randint(1, NOISY, shape, device=device)
    return masked | (one & ~masked[:, :, 1:].any(-1, keepdim=True))


def visibility(documents: Tensor, starts: Tensor, kind: str) -> Mask:
    """The mask over [clean | noisy]."""
    rows, length = documents.shape
    device = documents.device
    count = starts.shape[1] * NOISY
    at = torch.arange(length, device=device, dtype=torch.int32).expand(rows, -1)
    own = documents.gather(1, starts).repeat_interleave(NOISY, 1)
    document = torch.cat([documents, own], 1)
    limit = torch.cat([at, (starts - 1).to(torch.int32).repeat_interleave(NOISY, 1)], 1)
    block = torch.arange(starts.shape[1], device=device, dtype=torch.int32).repeat_interleave(NOISY).expand(rows, -1)
    group = torch.cat([-1 - at, block], 1)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (document[row, query] == document[row, key]) & (key <= limit[row, query])
        return context | (group[row, query] == group[row, key])

    if kind == "dense":
        line = torch.arange(length + count, device=device)
        context = (document[:, :, None] == document[:, None, :]) & (line[None, None, :] <= limit[:, :, None])
        return (context | (group[:, :, None] == group[:, None, :]))[:, None]
    if kind != "flex":
        raise ValueError(f"attention must be flex or dense, not {kind}")
    return BlockMask.from_kv_blocks(*_sparse_blocks(document, limit, length), BLOCK_SIZE=BLOCK, mask_mod=visible)


def _sparse_blocks(document: Tensor, limit: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """For each block of queries, how many blocks of keys it may see, and which come first."""

    def parts(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, BLOCK))

    low, high = parts(document).amin(-1), parts(document).amax(-1)
    reach = parts(limit).amax(-1)
    number = torch.arange(low.shape[1], device=low.device)
    is_clean = number < length // BLOCK
    seen = (high[:, None, :] >= low[:, :, None]) & (low[:, None, :] <= high[:, :, None])
    seen &= (number * BLOCK)[None, None, :] <= reach[:, :, None]
    seen &= is_clean[None, None, :]
    seen |= (number[:, None] == number[None, :])[None]
    shared = seen[:, None].to(torch.int32)
    return shared.sum(-1, dtype=torch.int32), shared.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
