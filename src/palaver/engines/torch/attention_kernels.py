"""How queries, keys and values become what is seen: scores, their softmax, and the values in that measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

LONG = 1024
"""Keys. Over fewer of them the library's own attention is as quick as any."""
MOST_SCORES = 1_500_000
"""Beyond so many they don't stay near the processor until they are needed again."""
REFUSALS = 8
"""After so many in a row it is not tried again."""
LEAST = -80.0
"""Exponentials of less are next to nothing, and take a hundred times as long."""
SAFE = (1e-20, 1e20)
"""Sums of exponentials between these lost nothing: those of less than the least are nothing beside them."""


class ScoreWorkspace:
    """Memory for the scores of a few queries over a long text. To ask for it anew in each layer would take longer
    than to fill it."""

    def __init__(self) -> None:
        self._memory = _floats(0)
        self._refusals = 0

    def of(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        if self._memory.numel() < size:
            self._memory = _floats(size)
        return self._memory[:size].view(shape)

    @property
    def pays(self) -> bool:
        """Whether the model's scores are of a size that can be used here."""
        return self._refusals < REFUSALS

    def note(self, used: bool) -> None:
        self._refusals = 0 if used else self._refusals + 1


def _floats(size: int) -> Tensor:
    """Named in full: the default dtype is the process's, and loading a model changes it."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True)
class AttentionHead:
    """How scores are computed, besides queries and keys."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """For each head a score that takes part in the softmax and stands for no token."""
    room: ScoreWorkspace | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def pair_bytes(heads: int, shared: int, dtype: torch.dtype, device: torch.device, head: AttentionHead) -> int:
    """What attention for several queries takes beside keys and values, for each pair of a query and a key."""
    if not head.plain:  # scores with and without the mask, and their softmax, in float32
        return 3 * heads * 4 + heads // shared * dtype.itemsize
    masked = device.type != "cuda" or dtype == torch.float32
    return heads // shared * dtype.itemsize if masked else 0


def attend_singles(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: AttentionHead) -> Tensor:
    """One query a sequence: the heads that share a key are taken for so many queries, which saves repeating keys."""
    count, heads, size = queries.shape
    shared = keys.shape[1]
    grouped = queries.view(count, shared, heads // shared, size)
    if head.plain and (mask is None or not queries.is_cuda):
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=head.scale)
    else:  # on CUDA the library's own takes up to four times as long for few queries behind a mask
        sinks = None if head.sinks is None else head.sinks.view(1, shared, heads // shared, 1)
        out = _attend_plainly(grouped, keys, values, mask, head, sinks)
    return out.reshape(count, heads, -1)


def attend_chunk(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, head: AttentionHead) -> Tensor:
    """[heads, queries, size]. Heads that share a key are taken for more queries, as above."""
    heads, count, size = queries.shape
    shared = keys.shape[1]
    grouped = queries.reshape(1, shared, -1, size)
    if head.plain:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=head.scale)
    else:
        sinks = None if head.sinks is None else head.sinks.view(1, shared, -1, 1).repeat_interleave(count, 2)
        out = _attend_plainly(grouped, keys, values, mask, head, sinks)
    return out.reshape(heads, count, -1)


def suits_flash(queries: Tensor, values: Tensor, head: AttentionHead) -> bool:
    if not head.plain or not queries.is_cuda or queries.dtype == torch.float32:
        return False
    size = queries.shape[-1]
    return size == values.shape[-1] and size <= 256 and torch.cuda.get_device_capability(queries.device) >= (8, 0)


def attend_flash(queries: Tensor, keys: Tensor, values: Tensor, head: AttentionHead) -> Tensor:
    """[heads, queries, size]: the last so many tokens of a text, each of which sees all up to itself."""
    order = causal_lower_right(queries.shape[1], keys.shape[2])
    return F.scaled_dot_product_attention(
        queries[None], keys, values, attn_mask=order, scale=head.scale, enable_gqa=True
    )[0]


def suits_workspace(queries: Tensor, keys: Tensor, head: AttentionHead) -> bool:
    """[heads, queries, size]."""
    length = keys.shape[2]
    fits = length >= LONG and queries.shape[0] * queries.shape[1] * length <= MOST_SCORES
    return fits and head.plain and queries.dtype == torch.float32 and head.room is not None and head.room.pays


def attend_in_workspace(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, head: AttentionHead
) -> Tensor | None:
    """A few queries at the end of a long text; `seen` is 1 or 0 for its last keys. None where numbers are too big or
    too small.

    A softmax is mostly the search for the greatest score, which keeps exponentials in bounds. Nearly always they are
    without it, and the sums that are needed anyway tell.
    """
    assert head.room is not None
    heads, count, size = queries.shape
    shared, length = keys.shape[1:3]
    grouped = queries.reshape(shared, -1, size)
    room = head.room.of(shared, grouped.shape[1], length)
    scores = torch.baddbmm(room, grouped, keys[0].transpose(1, 2), beta=0, alpha=head.scale, out=room)
    scores.clamp_(min=LEAST).exp_()
    scores[..., length - seen.shape[-1] :] *= seen
    sums = scores.sum(-1, keepdim=True)
    least, most = torch.aminmax(sums)
    safe = bool(SAFE[0] < least) and bool(most < SAFE[1])
    head.room.note(safe)
    if not safe:
        return None
    return torch.bmm(scores, values[0]).div_(sums).view(heads, count, -1)


def _attend_plainly(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: AttentionHead, sinks: Tensor | None
) -> Tensor:
    scores = _products(queries, keys)
    if head.softcap is not None:
        scores = torch.tanh(scores * (head.scale / head.softcap)) * head.softcap
    elif mask is None:
        scores = scores * head.scale
    if mask is not None:
        scores = torch.add(mask, scores, alpha=head.scale if head.softcap is None else 1)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1).to(values.dtype)
    return weights[..., : keys.shape[-2]] @ values


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Of each query with each key, in float32 however narrow they are."""
    if queries.dtype == torch.float32:
        return queries @ keys.transpose(-1, -2)
    if not queries.is_cuda:
        return (queries @ keys.transpose(-1, -2)).float()
    count, heads, rows, size = queries.shape
    flat = keys.flatten(0, 1).transpose(1, 2)
    return torch.bmm(queries.reshape(-1, rows, size), flat, out_dtype=torch.float32).view(count, heads, rows, -1)
