"""Many greedy replies at once, to prompts with pictures and sounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from training.omni import pool, tokens
from training.omni.features import Medium, Picture
from training.omni.network import Cache, OmniNetwork
from training.omni.shards import Document, arrays

END = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: NDArray[np.uint16]
    positions: NDArray[np.int16]
    media: tuple[Medium, ...] = ()
    limit: int = 256


def prompt(tokenizer: Tokenizer, text: str, media: tuple[Medium, ...], limit: int) -> Prompt:
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)
    ids = tokens.expand(ids, [medium.length for medium in media])
    grids = [medium.grid for medium in media if isinstance(medium, Picture)]
    return Prompt(ids, tokens.positions(ids, grids), media, limit)


def replies(network: OmniNetwork, tokenizer: Tokenizer, prompts: list[Prompt], batch: int) -> list[str]:
    """A reply for each prompt, with its end token where it came within the limit."""
    order = sorted(range(len(prompts)), key=lambda at: (prompts[at].limit, len(prompts[at].ids)))
    found = [""] * len(prompts)
    for group in _groups(order, prompts, batch):
        written = generate(network, [prompts[at] for at in group])
        for at, ids in zip(group, written, strict=True):
            found[at] = tokenizer.decode(ids, skip_special_tokens=False)
    return found


def _groups(order: list[int], prompts: list[Prompt], batch: int) -> Iterator[list[int]]:
    """Batches of at most `batch` prompts, fewer where prompts are long."""
    group: list[int] = []
    for at in order:
        width = max([len(prompts[at].ids)] + [len(prompts[other].ids) for other in group])
        if group and (len(group) >= batch or width**2 * (len(group) + 1) > batch * 2**18):
            yield group
            group = []
        group.append(at)
    if group:
        yield group


@torch.inference_mode()
def generate(network: OmniNetwork, prompts: list[Prompt]) -> list[list[int]]:
    """Greedy tokens for each prompt, up to and with the end token."""
    with torch.compiler.set_stance("force_eager"):
        return _generate(network, prompts, max(prompt.limit for prompt in prompts))


def _generate(network: OmniNetwork, prompts: list[Prompt], limit: int) -> list[list[int]]:
    device = network.language_model.norm.weight.device
    width = max(len(one.ids) for one in prompts)
    x, positions, seen = _inputs(network, prompts, width, device)
    here = positions[:, :, -1:].amax(0, keepdim=True).expand(3, -1, -1)
    cache: Cache = [None] * network.shape.text.layers
    order = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    eye = torch.eye(width, dtype=torch.bool, device=device)
    mask = (seen[:, None, None, :] & order) | eye
    rows = torch.arange(len(prompts), device=device)
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(limit):
        cos, sin = network.rotations(positions)
        hidden = network(x, cos, sin, mask, cache)[:, -1:]
        chosen = network.logits(hidden)[:, -1].argmax(-1)
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            written[row].append(token)
        going = chosen != END
        if not going.any():
            break
        here = here + 1
        seen = torch.cat([seen, torch.ones(len(rows), 1, dtype=torch.bool, device=device)], 1)
        if going.sum() <= 0.85 * len(going):
            kept = going.nonzero()[:, 0]
            cache = [(pair[0][kept], pair[1][kept]) for pair in cache if pair is not None]
            chosen, here, seen, rows = chosen[kept], here[:, kept], seen[kept], rows[kept]
        x, positions, mask = network.embed(chosen[:, None], None), here, seen[:, None, None, :]
    return [ids[: ids.index(END) + 1] if END in ids else ids for ids in written]


def _inputs(
    network: OmniNetwork, prompts: list[Prompt], width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, positions and mask of the prompts, padded on the left."""
    padded = []
    for one in prompts:
        before = width - len(one.ids)
        ids = np.concatenate([np.zeros(before, np.uint16), one.ids])
        positions = np.concatenate([np.zeros((3, before), np.int16), one.positions], 1)
        padded.append([Document(ids, positions, one.media)])
    batch = pool.media_batch(arrays(padded, width), range(len(prompts)), device)
    packed, places, media = batch
    assert places is not None
    lengths = torch.tensor([len(one.ids) for one in prompts], device=device)
    seen = torch.arange(width, device=device) >= (width - lengths)[:, None]
    return network.embed(packed.long(), media), places.int(), seen
