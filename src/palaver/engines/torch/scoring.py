"""How queries, keys and values become what is seen: scores, their softmax, and the values in that measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """How scores are computed, besides queries and keys."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """For each head a score that takes part in the softmax and stands for no token."""


def attend_singles(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: Head) -> Tensor:
    """One query a sequence: the heads that share a key are taken for so many queries, which saves repeating keys."""
    count, heads, size = queries.shape
    shared = keys.shape[1]
    grouped = queries.view(count, shared, heads // shared, size)
    if head.sinks is None and head.softcap is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=head.scale)
    else:
        sinks = None if head.sinks is None else head.sinks.view(1, shared, heads // shared, 1)
        out = _attend_plainly(grouped, keys, values, mask, head, sinks)
    return out.reshape(count, heads, -1)


def attend_chunk(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, head: Head) -> Tensor:
    """[heads, queries, size]. Heads that share a key are taken for more queries, as above."""
    heads, count, size = queries.shape
    shared = keys.shape[1]
    grouped = queries.reshape(1, shared, -1, size)
    if head.sinks is None and head.softcap is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=head.scale)
    else:
        sinks = None if head.sinks is None else head.sinks.view(1, shared, -1, 1).repeat_interleave(count, 2)
        out = _attend_plainly(grouped, keys, values, mask, head, sinks)
    return out.reshape(heads, count, -1)


def _attend_plainly(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: Head, sinks: Tensor | None
) -> Tensor:
    scores = queries @ keys.transpose(-1, -2) * head.scale
    if head.softcap is not None:
        scores = torch.tanh(scores / head.softcap) * head.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return weights[..., : keys.shape[-2]] @ values
