"""A token drawn from scores: filters, then inverse transform sampling in the order of the vocabulary.

In that order a tiny change of a score moves each boundary a tiny bit, so it changes the token only when the random
number lies that close to one. Plain arrays: for a single row they are much quicker than tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from palaver.sampling import Sampling

SHORTLIST = 1024
"""So many of the likeliest tokens nearly always hold all that filters keep; a whole vocabulary is slow to sort."""

Array = NDArray[Any]
Kept = tuple[Sequence[int] | Array, Array]
"""Token ids in ascending order, and what each weighs."""


def draw(scores: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """A token id for each row; any, where a row holds no number."""
    with np.errstate(invalid="ignore"):
        if scores.device.type == "cpu":
            rows = scores.numpy()
            return [_pick(kept(row, s), u) for row, s, u in zip(rows, samplings, uniforms, strict=True)]
        return _draw_from_afar(scores, samplings, uniforms)


def _draw_from_afar(scores: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """Fetches the likeliest of each row from the device, and a whole row only where it takes that."""
    short = scores.topk(min(SHORTLIST, scores.shape[-1]), -1)
    values, ids = short.values.cpu().numpy(), short.indices.cpu().numpy()
    out = []
    for row, (sampling, uniform) in enumerate(zip(samplings, uniforms, strict=True)):
        few = _kept_of_few(values[row], ids[row], sampling)
        out.append(_pick(kept(scores[row].cpu().numpy(), sampling) if few is None else few, uniform))
    return out


def kept(scores: Array, sampling: Sampling) -> Kept:
    """What the filters leave of a whole vocabulary; ties at a filter's edge stay together."""
    if 0 < sampling.top_k < len(scores):
        edge = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(~(scores < edge))
        return ids, _weights(scores[ids], sampling)
    return range(len(scores)), _weights(scores, sampling)


def _kept_of_few(scores: Array, ids: Array, sampling: Sampling) -> Kept | None:
    """The same from the likeliest alone, best first; None where they are not all that may count."""
    k = sampling.top_k
    if not 0 < k < len(scores) or scores[k] == scores[k - 1]:
        return None
    order = ids[:k].argsort()
    return ids[:k][order], _weights(scores[:k][order], sampling)


def _weights(scores: Array, sampling: Sampling) -> Array:
    """Relative to the likeliest; 0 for what top_p and min_p remove."""
    weights: Array = scores.astype(np.float64)
    weights /= sampling.temperature
    weights -= weights.max()
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        weights *= weights >= _top_p_edge(weights, sampling.top_p)
    if sampling.min_p > 0:
        weights *= weights >= sampling.min_p
    return weights


def _top_p_edge(weights: Array, top_p: float) -> float:
    """The smallest weight that is still needed to reach this part of all."""
    wanted = top_p * weights.sum()
    if len(weights) > 4 * SHORTLIST:
        best = np.sort(np.partition(weights, -SHORTLIST)[-SHORTLIST:])[::-1]
        if best.sum() >= wanted:
            return _edge(best, wanted)
    return _edge(np.sort(weights)[::-1], wanted)


def _edge(best: Array, wanted: float) -> float:
    reached = int(best.cumsum().searchsorted(wanted))
    return float(best[min(reached, len(best) - 1)])


def _pick(found: Kept, uniform: float) -> int:
    ids, weights = found
    edges = weights.cumsum()
    at = int(edges.searchsorted(uniform * edges[-1], side="right"))
    if at == len(edges):  # by rounding, or because nothing here is a number
        at = int(np.flatnonzero(weights)[-1]) if weights.any() else 0
    return int(ids[at])
