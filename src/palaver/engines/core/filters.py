"""The filters of the draw: which tokens are left, and their weights. All of it in float64, over the tokens that a
preselection left. The order: temperature, top_k, typical_p, top_p, min_p, top_a, XTC; a dynamic temperature comes last.
Tokens that are equally likely are kept or removed together."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.logits_changes import Ids, Scores
from palaver.sampling import Sampling

Weights: TypeAlias = NDArray[np.float64]


class Candidates(NamedTuple):
    """Token ids in ascending order, their scores, and the weight of each: 0 if it is removed."""

    ids: Ids
    scores: Scores
    weights: Weights

    @classmethod
    def of(cls, ids: Ids, scores: Scores, temperature: float) -> Candidates:
        own = scores[ids]
        return cls(ids, own, _weights(own, temperature))


class Distribution(NamedTuple):
    """What the filters need to know of all tokens."""

    total: float
    """The sum of their weights."""
    entropy: float = 0.0
    """Set if it is needed."""

    @classmethod
    def of(cls, weights: Weights) -> Distribution:
        total = float(weights.sum())
        return cls(total, _entropy(weights / total))

    def information(self, weights: Weights) -> Weights:
        """In nats; infinite for a weight of 0."""
        shares = weights / self.total
        return -np.log(shares, where=shares > 0, out=np.full_like(shares, -np.inf))


def _weights(scores: Scores, temperature: float) -> Weights:
    """Probabilities relative to the likeliest token."""
    weights = scores.astype(np.float64)
    weights /= temperature
    weights -= weights.max()
    return np.exp(weights, out=weights)


def has_filter(sampling: Sampling, size: int) -> bool:
    """Whether the draw is from anything else than the plain distribution over so many tokens."""
    shape = sampling.dynatemp_range > 0 or sampling.xtc_probability > 0
    wide = sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1 or sampling.top_a > 0
    return shape or wide or 0 < sampling.top_k < size


def filter_candidates(
    candidates: Candidates, sampling: Sampling, all_tokens: Distribution | None = None, xtc_uniform: float = 1.0
) -> Candidates:
    """Applies all filters after top_k. `all_tokens`: their distribution, if the candidates are not all; they must
    include all that the filters keep. `xtc_uniform`: the random number that decides whether XTC applies."""
    ids, scores, weights = candidates
    total = None if all_tokens is None else all_tokens.total
    if sampling.typical_p < 1:
        weights = _typical(weights, sampling.typical_p, all_tokens or Distribution.of(weights))
        total = None
    if sampling.top_p < 1:
        weights = _top_p(weights, sampling.top_p, total)
        total = None
    if sampling.min_p > 0:
        weights = weights * (weights >= sampling.min_p * weights.max())
        total = None
    if sampling.top_a > 0:
        weights = _top_a(weights, sampling.top_a, total)
    if xtc_uniform < sampling.xtc_probability:
        weights = _exclude_top_choices(weights, sampling.xtc_threshold)
    if sampling.dynatemp_range > 0:
        weights = _dynamic_temperature(scores, weights, sampling)
    return Candidates(ids, scores, weights)


def _typical(weights: Weights, typical_p: float, all_tokens: Distribution) -> Weights:
    """The tokens whose information is nearest to the expected one, until they reach the probability."""
    distance = np.abs(all_tokens.information(weights) - all_tokens.entropy)
    order = distance.argsort(kind="stable")
    last = int(weights[order].cumsum().searchsorted(typical_p * all_tokens.total))
    return weights * (distance <= distance[order[min(last, len(order) - 1)]])


def _top_p(weights: Weights, top_p: float, total: float | None) -> Weights:
    """The likeliest tokens that together reach the probability."""
    ordered = np.sort(weights)[::-1]
    target = top_p * (weights.sum() if total is None else total)
    last = int(ordered.cumsum().searchsorted(target))
    return weights * (weights >= ordered[min(last, len(ordered) - 1)])


def _top_a(weights: Weights, top_a: float, total: float | None) -> Weights:
    """Tokens that are at least as likely as `top_a` times the square of the greatest probability."""
    top = weights.max()
    return weights * (weights >= top_a * top * top / (weights.sum() if total is None else total))


def _exclude_top_choices(weights: Weights, threshold: float) -> Weights:
    """Removes the tokens that are at least this likely, except for the least likely of them."""
    choices = weights >= threshold * weights.sum()
    choices &= weights > 0
    return weights * (weights <= weights[choices].min()) if np.count_nonzero(choices) > 1 else weights


def _dynamic_temperature(scores: Scores, weights: Weights, sampling: Sampling) -> Weights:
    """The more even the distribution, the higher is its temperature."""
    left = weights > 0
    count = int(np.count_nonzero(left))
    if count < 2:
        return weights
    evenness = _entropy(weights[left] / weights[left].sum()) / math.log(count)
    temperature = sampling.dynamic_temperature(evenness)
    new = np.zeros_like(weights)
    top = scores[left].max()
    new[left] = _weights(scores[left], temperature) if temperature > 0 else scores[left] == top
    return new


def _entropy(shares: Weights) -> float:
    present = shares[shares > 0]
    return float(-(present * np.log(present)).sum())
