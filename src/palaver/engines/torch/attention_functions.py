"""Attention kernels: softmax(queries x keys) x values, in the fastest way for the device, dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_WORKSPACE_KEYS = 1024
"""Over fewer keys torch's own attention is as fast as a workspace."""
MAX_WORKSPACE_SCORES = 1_500_000
"""More scores don't stay in the processor's cache until they are needed again."""
MAX_FAILURES = 8
"""After so many failures in a row the workspace is not used any more."""
MIN_SCORE = -80.0
"""Exponentials of lower scores are next to nothing, and take a hundred times as long."""
SAFE_SUMS = (1e-20, 1e20)
"""Sums of exponentials between these are precise: what MIN_SCORE cuts off is negligible."""


class ScoreWorkspace:
    """Memory for the scores of a few queries over a long text, reused by all layers: allocating it again in each would
    take longer than filling it."""

    def __init__(self) -> None:
        self._memory = _floats(0)
        self._failures = 0

    def view(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        if self._memory.numel() < size:
            self._memory = _floats(size)
        return self._memory[:size].view(shape)

    @property
    def enabled(self) -> bool:
        """False where the model's scores were out of range too often."""
        return self._failures < MAX_FAILURES

    def record(self, succeeded: bool) -> None:
        self._failures = 0 if succeeded else self._failures + 1


def _floats(size: int) -> Tensor:
    """With an explicit dtype: the default dtype belongs to the process, and loading a model changes it."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How scores are computed, besides queries and keys."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """For each head a score that takes part in the softmax and stands for no token."""
    workspace: ScoreWorkspace | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def pair_bytes(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device, params: AttentionParams) -> int:
    """The memory that attention for several queries takes for each pair of a query and a key."""
    if not params.plain:  # scores with and without the mask, and their softmax, in float32
        return 3 * heads * 4 + heads // kv_heads * dtype.itemsize
    masked = device.type != "cuda" or dtype == torch.float32
    return heads // kv_heads * dtype.itemsize if masked else 0


def attend_decode(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """One query a sequence. Heads that share a key become queries of one head, so keys are not repeated."""
    count, heads, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.view(count, kv_heads, heads // kv_heads, size)
    if params.plain and (mask is None or not queries.is_cuda):
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=params.scale)
    else:  # on CUDA torch's own takes up to four times as long for few queries with a mask
        sinks = None if params.sinks is None else params.sinks.view(1, kv_heads, heads // kv_heads, 1)
        out = _attend_eager(grouped, keys, values, mask, params, sinks)
    return out.reshape(count, heads, -1)


def attend_prefill(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """[heads, queries, size]. Heads that share a key become queries of one head."""
    heads, count, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(1, kv_heads, -1, size)
    if params.plain:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=params.scale)
    else:
        sinks = None if params.sinks is None else params.sinks.view(1, kv_heads, -1, 1).repeat_interleave(count, 2)
        out = _attend_eager(grouped, keys, values, mask, params, sinks)
    return out.reshape(heads, count, -1)


def can_use_flash(queries: Tensor, values: Tensor, params: AttentionParams) -> bool:
    if not params.plain or not queries.is_cuda or queries.dtype == torch.float32:
        return False
    size = queries.shape[-1]
    return size == values.shape[-1] and size <= 256 and torch.cuda.get_device_capability(queries.device) >= (8, 0)


def attend_flash(queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """[heads, queries, size]: the last tokens of a text, with causal attention."""
    if queries.shape[1] == keys.shape[2]:
        causal, whole = None, True
    else:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: a second or more

        causal, whole = causal_lower_right(queries.shape[1], keys.shape[2]), False
    return F.scaled_dot_product_attention(
        queries[None], keys, values, attn_mask=causal, is_causal=whole, scale=params.scale, enable_gqa=True
    )[0]


def can_use_workspace(queries: Tensor, keys: Tensor, params: AttentionParams) -> bool:
    """[heads, queries, size]."""
    length = keys.shape[2]
    fits = length >= MIN_WORKSPACE_KEYS and queries.shape[0] * queries.shape[1] * length <= MAX_WORKSPACE_SCORES
    workspace = params.workspace
    return fits and params.plain and queries.dtype == torch.float32 and workspace is not None and workspace.enabled


def attend_in_workspace(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, params: AttentionParams
) -> Tensor | None:
    """A few queries at the end of a long text; `visible` is 1 or 0 for its last keys. None where scores are out of
    range.

    Most of a softmax's time is the search for the largest score, which bounds the exponentials. They are nearly always
    in range without it, and the sums, which are needed anyway, tell.
    """
    assert params.workspace is not None
    heads, count, size = queries.shape
    kv_heads, length = keys.shape[1:3]
    grouped = queries.reshape(kv_heads, -1, size)
    memory = params.workspace.view(kv_heads, grouped.shape[1], length)
    scores = torch.baddbmm(memory, grouped, keys[0].transpose(1, 2), beta=0, alpha=params.scale, out=memory)
    scores.clamp_(min=MIN_SCORE).exp_()
    scores[..., length - visible.shape[-1] :] *= visible
    sums = scores.sum(-1, keepdim=True)
    smallest, largest = torch.aminmax(sums)
    safe = bool(SAFE_SUMS[0] < smallest) and bool(largest < SAFE_SUMS[1])
    params.workspace.record(safe)
    if not safe:
        return None
    return torch.bmm(scores, values[0]).div_(sums).view(heads, count, -1)


def _attend_eager(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams, sinks: Tensor | None
) -> Tensor:
    scores = _dot_products(queries, keys)
    if params.softcap is not None:
        scores = torch.tanh(scores * (params.scale / params.softcap)) * params.softcap
    elif mask is None:
        scores = scores * params.scale
    if mask is not None:
        scores = torch.add(mask, scores, alpha=params.scale if params.softcap is None else 1)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1).to(values.dtype)
    return weights[..., : keys.shape[-2]] @ values


def _dot_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Of each query with each key, in float32 whatever their dtype."""
    if queries.dtype == torch.float32:
        return queries @ keys.transpose(-1, -2)
    if not queries.is_cuda:
        return (queries @ keys.transpose(-1, -2)).float()
    count, heads, rows, size = queries.shape
    flat = keys.flatten(0, 1).transpose(1, 2)
    return torch.bmm(queries.reshape(-1, rows, size), flat, out_dtype=torch.float32).view(count, heads, rows, -1)
