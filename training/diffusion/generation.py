"""Replies by block diffusion, the plain way: every step computes the whole text again.

This is the reference for Palaver's own engine, which must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.diffusion.network import END_ID, MASK_ID, NOISY, DiffusionNetwork
from training.network import rotations


@torch.inference_mode()
def replies(
    network: DiffusionNetwork, tokenizer: Tokenizer, prompts: list[str], limits: list[int], steps: int, batch: int
) -> list[str]:
    """A greedy reply for each prompt, with its end token where it came within the limit of tokens."""
    ids = [e.ids for e in tokenizer.encode_batch_fast(prompts, add_special_tokens=False)]
    order = sorted(range(len(ids)), key=lambda at: len(ids[at]) + limits[at])
    found = [""] * len(ids)
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        for at, reply in _batch(network, [(at, ids[at], limits[at]) for at in chosen], steps):
            found[at] = tokenizer.decode(reply, skip_special_tokens=False)
    return found


def _batch(
    network: DiffusionNetwork, asked: list[tuple[int, list[int], int]], steps: int
) -> Iterator[tuple[int, list[int]]]:
    """The replies as they end, each with its number."""
    going = [(at, prompt, list[int](), limit) for at, prompt, limit in asked]
    while going:
        blocks = denoise(network, [prompt + reply for _, prompt, reply, _ in going], steps)
        left = []
        for (at, prompt, reply, limit), block in zip(going, blocks, strict=True):
            reply += block[: block.index(END_ID) + 1] if END_ID in block else block
            if reply[-1] == END_ID or len(reply) >= limit:
                yield at, reply
            else:
                left.append((at, prompt, reply, limit))
        going = left


def denoise(network: DiffusionNetwork, contexts: list[list[int]], steps: int) -> list[list[int]]:
    """The next block after each context."""
    device = network.model.embed_tokens.weight.device
    lengths = torch.tensor([len(context) for context in contexts], device=device)
    width = int(lengths.max()) + NOISY
    tokens = torch.full((len(contexts), width), END_ID)
    for row, context in enumerate(contexts):
        tokens[row, : len(context)] = torch.tensor(context)
        tokens[row, len(context) : len(context) + NOISY] = MASK_ID
    tokens = tokens.to(device)
    mask = _mask(lengths, width)
    cos, sin = (part.to(device) for part in rotations(network.shape, width))
    places = lengths[:, None] + torch.arange(NOISY, device=device)
    for step in range(steps):
        block = tokens.gather(1, places)
        masked = block == MASK_ID
        remaining = int(masked[0].sum())
        if not remaining:
            break
        hidden = network(tokens, cos, sin, mask)
        before = (places - 1)[:, :, None].expand(-1, -1, hidden.shape[-1])
        shares = network.logits(hidden.gather(1, before)).float().softmax(-1)
        sure, choice = shares.max(-1)
        shown = max(1, remaining // (steps - step))
        best = sure.masked_fill(~masked, -1.0).topk(shown, 1).indices
        block.scatter_(1, best, choice.gather(1, best))
        tokens.scatter_(1, places, block)
    return [list(row) for row in tokens.gather(1, places).tolist()]


def _mask(lengths: Tensor, width: int) -> Tensor:
    """Contexts are read causally; the block after them sees all of it and of itself; the filling sees all."""
    at = torch.arange(width, device=lengths.device)
    causal = at[None, :] <= at[:, None]
    in_block = (at >= lengths[:, None]) & (at < lengths[:, None] + NOISY)
    return (causal | (in_block[:, :, None] & in_block[:, None, :]))[:, None]
