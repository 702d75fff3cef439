"""A token drawn from scores: filters, then inverse transform sampling in the order of the vocabulary.

In that order a tiny change of a score moves each boundary a tiny bit, so it changes the token only when the random
number lies that close to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHORTLIST = 1024
"""So many of the likeliest tokens nearly always reach top_p; sorting a whole vocabulary is slow."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of a draw, a row each."""

    temperature: Tensor
    top_k: list[int]
    """0: off."""
    top_p: Tensor | None
    """None where no row has it."""
    min_p: Tensor | None
    uniform: Tensor


def draw(scores: Tensor, filters: Filters) -> Tensor:
    """A token id for each row. Ties at the edge of a filter are kept together."""
    scores = scores / filters.temperature
    if all(0 < k < min(SHORTLIST, scores.shape[-1]) for k in filters.top_k):
        ids = _from_few(scores, filters)
        if ids is not None:
            return ids
    return _pick(_kept(_top_k(scores, filters.top_k), filters), filters.uniform)


def distribution(scores: Tensor, filters: Filters) -> Tensor:
    """The probability that `draw` gives to each token."""
    weights = _kept(_top_k(scores / filters.temperature, filters.top_k), filters)
    return weights / weights.sum(-1, keepdim=True)


def _from_few(scores: Tensor, filters: Filters) -> Tensor | None:
    """The same from the top k alone, None where another token is as likely as the last of them."""
    ks = torch.tensor(filters.top_k, device=scores.device)[:, None]
    best = scores.topk(max(filters.top_k) + 1, -1)
    if bool((best.values.gather(-1, ks) == best.values.gather(-1, ks - 1)).any()):
        return None
    beyond = torch.arange(best.values.shape[-1], device=scores.device) >= ks
    ids, order = best.indices.masked_fill(beyond, scores.shape[-1]).sort(-1)
    few = best.values.masked_fill(beyond, -torch.inf).gather(-1, order)
    return ids.gather(-1, _pick(_kept(few, filters), filters.uniform)[:, None])[:, 0]


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    edges = weights.double().cumsum(-1)
    found = torch.searchsorted(edges, uniform * edges[:, -1:], right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(found, last)


def _kept(scores: Tensor, filters: Filters) -> Tensor:
    """The probabilities, 0 where a filter removes the token."""
    weights = scores.softmax(-1)
    if filters.top_p is not None:
        weights = weights * (weights >= _top_p_edge(weights, filters.top_p))
    if filters.min_p is not None:
        weights = weights * (weights >= weights.amax(-1, keepdim=True) * filters.min_p)
    return weights


def _top_k(scores: Tensor, top_k: list[int]) -> Tensor:
    if not any(top_k):
        return scores
    size = scores.shape[-1]
    ks = torch.tensor([min(k, size) or size for k in top_k], device=scores.device)[:, None]
    largest = max(min(k, size) for k in top_k)
    edge = scores.topk(largest, -1).values.gather(-1, ks.clamp(max=largest) - 1)
    return scores.masked_fill((scores < edge) & (ks < size), -torch.inf)


def _top_p_edge(weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability that is still needed to reach top_p."""
    best = weights.topk(min(SHORTLIST, weights.shape[-1]), -1).values
    if bool((best.double().sum(-1, keepdim=True) < top_p).any()):
        best = weights.sort(-1, descending=True).values
    reached = best.double().cumsum(-1) >= top_p
    at = torch.where(reached.any(-1), reached.to(torch.uint8).argmax(-1), best.shape[-1] - 1)
    edge = best.gather(-1, at[:, None])
    return torch.where(top_p < 1, edge, 0.0)
