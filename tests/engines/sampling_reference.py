"""The rules of the draw, plainly: float64, the whole vocabulary, one step after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from palaver.sampling import Sampling

Weights = NDArray[np.float64]


class ReferenceDraw:
    """The probabilities of all tokens after all filters, and whether a filter's edge was too close to call."""

    def __init__(self, scores: NDArray[np.float32], sampling: Sampling, xtc_uniform: float, margin: float) -> None:
        self.margin = margin
        self.close = False
        self._scores = scores.astype(np.float64)
        dynamic = sampling.dynatemp_range > 0
        p = softmax(self._scores / (1.0 if dynamic else sampling.temperature))
        if 0 < sampling.top_k < len(p):
            p = self._keep(p, scores >= np.sort(scores)[-sampling.top_k])
        if sampling.typical_p < 1:
            p = self._typical(p, sampling.typical_p)
        if sampling.top_p < 1:
            order = np.argsort(-p, kind="stable")
            p = self._keep(p, p >= p[order[self._reach(p[order], sampling.top_p)]])
        if sampling.min_p > 0:
            p = self._at_least(p, sampling.min_p * p.max())
        if sampling.top_a > 0:
            p = self._at_least(p, sampling.top_a * p.max() ** 2)
        if xtc_uniform < sampling.xtc_probability:
            p = self._xtc(p, sampling.xtc_threshold)
        self.probabilities = self._dynamic_temperature(p, sampling) if dynamic else p

    def draw(self, uniform: float) -> tuple[int, bool]:
        """The token, and whether rounding may decide otherwise."""
        edges = self.probabilities.cumsum()
        return int(edges.searchsorted(uniform, side="right")), self.close or bool(
            abs(edges[:-1] - uniform).min() < self.margin
        )

    def _keep(self, p: Weights, kept: NDArray[np.bool_]) -> Weights:
        left = np.where(kept, p, 0.0)
        return left / left.sum()

    def _reach(self, ordered: Weights, target: float) -> int:
        """How many of these probabilities are before the one at which their sum reaches the target."""
        sums = ordered.cumsum()
        self.close |= bool(abs(sums - target).min() < self.margin)
        return int(min((sums < target).sum(), len(sums) - 1))

    def _at_least(self, p: Weights, edge: float) -> Weights:
        self.close |= bool((abs(p - edge) < self.margin * edge).any())
        return self._keep(p, p >= edge)

    def _typical(self, p: Weights, typical_p: float) -> Weights:
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        distance = np.array([abs(-math.log(x) - entropy) if x > 0 else math.inf for x in p])
        order = np.argsort(distance, kind="stable")
        edge = distance[order[self._reach(p[order], typical_p)]]
        near = np.sort(abs(distance[np.isfinite(distance)] - edge))
        self.close |= len(near) > 1 and bool(near[1] < self.margin)
        return self._keep(p, distance <= edge)

    def _xtc(self, p: Weights, threshold: float) -> Weights:
        self.close |= bool((abs(p - threshold) < self.margin).any())
        choices = (p >= threshold) & (p > 0)
        return self._keep(p, p <= p[choices].min()) if choices.sum() > 1 else p

    def _dynamic_temperature(self, p: Weights, sampling: Sampling) -> Weights:
        left = p > 0
        if left.sum() < 2:
            return p
        evenness = -sum(x * math.log(x) for x in p[left]) / math.log(left.sum())
        low, high = (
            max(0, sampling.temperature - sampling.dynatemp_range),
            sampling.temperature + sampling.dynatemp_range,
        )
        temperature = low + (high - low) * min(1.0, evenness) ** sampling.dynatemp_exponent
        scores = np.where(left, self._scores, -np.inf)
        return softmax(scores / temperature) if temperature > 0 else self._keep(p, scores == scores.max())


def softmax(scores: Weights) -> Weights:
    weights: Weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def dry_penalties(ids: Sequence[int], vocabulary: Sequence[bytes], sampling: Sampling) -> dict[int, float]:
    """What DRY subtracts, by token id: every earlier place is compared token by token."""
    breakers = [text.encode() for text in sampling.dry_sequence_breakers]
    last_n = len(ids) if sampling.dry_penalty_last_n < 0 else sampling.dry_penalty_last_n
    window = list(ids[max(0, len(ids) - last_n) :])
    reach = 0
    while reach < len(window) and not _breaks(ids, len(ids) - 1 - reach, vocabulary, breakers):
        reach += 1
    penalties: dict[int, float] = {}
    for following in range(1, len(window)):
        length = 0
        while length < min(reach, following) and window[following - 1 - length] == window[-1 - length]:
            length += 1
        token_id = window[following]
        free = any(breaker in vocabulary[token_id] for breaker in breakers)
        if length >= sampling.dry_allowed_length and not free:
            penalty = sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
            penalties[token_id] = max(penalties.get(token_id, 0.0), penalty)
    return penalties


def _breaks(ids: Sequence[int], at: int, vocabulary: Sequence[bytes], breakers: Sequence[bytes]) -> bool:
    """Whether a breaker ends inside of this token."""
    before = b"".join(vocabulary[i] for i in ids[:at])
    text = before + vocabulary[ids[at]]
    return any(text.endswith(breaker, 0, end) for breaker in breakers for end in range(len(before) + 1, len(text) + 1))
