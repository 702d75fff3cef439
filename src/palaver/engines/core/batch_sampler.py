"""Samples several rows of a small vocabulary with the same settings at once: the calls cost more than the numbers.

A row has the bits that it has by itself (`sampler.py`): each number is computed alike, and sums run along rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.logits_changes import Ids, Scores
from palaver.generation import Alternative, Step
from palaver.sampling import Sampling

BLOCK = 256
"""Sums run over blocks of tokens, and columns of at most so many tokens have maxima."""


def split_columns(size: int) -> tuple[int, int]:
    """Tokens are looked for by the maxima of columns: how many tokens a column has, and how many columns there are."""
    depth = max(1, min(size // BLOCK, BLOCK))
    return depth, size // depth


def can_batch(sampling: Sampling, size: int) -> bool:
    """Whether `sample_batch` takes these settings: those without a filter that looks at all tokens. Filters beside
    top_k, top_p and min_p are the caller's to exclude."""
    _, columns = split_columns(size)
    if max(sampling.top_k, sampling.logprobs) >= columns:
        return False
    return sampling.temperature == 0 or sampling.top_k > 0 or (sampling.top_p == 1 and sampling.min_p == 0)


def sample_batch(logits: Scores, sampling: Sampling, uniforms: Sequence[float]) -> list[Step | None]:
    """The next token of each row, with the random number of each. None for rows that have to be sampled by themselves:
    with equals at the edge of a filter, with sums at the edge of rounding, or with nothing to choose from."""
    rows = _Rows(logits)
    drawn = _choose(rows, sampling, np.array(uniforms))
    count = sampling.logprobs
    likeliest = rows.likeliest(count)[:, :count] if count else None
    best = None if likeliest is None else likeliest.tolist()
    best_values = [] if likeliest is None else np.take_along_axis(logits, likeliest, 1).tolist()
    ids, log_sums = drawn.token_ids.tolist(), rows.log_sums.tolist()
    values = np.take_along_axis(logits, drawn.token_ids[:, None], 1)[:, 0].tolist()
    steps: list[Step | None] = []
    for row, valid in enumerate(drawn.valid.tolist()):
        if not valid or math.isnan(log_sums[row]):
            steps.append(None)
        elif best is None:
            steps.append(Step(ids[row], values[row] - log_sums[row]))
        else:
            best_ids = best[row]
            likely = [value - log_sums[row] for value in best_values[row]]
            *others, own = drawn.logprobs(row, [*best_ids, ids[row]], [*best_values[row], values[row]])
            alternatives = tuple(map(Alternative, best_ids, likely))
            drawn_from = tuple(map(Alternative, best_ids, others))
            steps.append(Step(ids[row], values[row] - log_sums[row], alternatives, own, drawn_from))
    return steps


class _Rows:
    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._likeliest: Ids | None = None
        self._weights: dict[float, Scores] = {}
        self._sums: dict[float, NDArray[np.float64]] = {}

    @cached_property
    def _maxima(self) -> Scores:
        depth, columns = split_columns(self.scores.shape[1])
        return self.scores[:, : depth * columns].reshape(len(self.scores), depth, columns).max(1)

    @cached_property
    def tops(self) -> Scores:
        rest = self.scores[:, self._maxima.shape[1] * split_columns(self.scores.shape[1])[0] :]
        tops = self._maxima.max(1)
        return np.maximum(tops, rest.max(1)) if rest.shape[1] else tops

    @cached_property
    def log_sums(self) -> NDArray[np.float64]:
        return self.tops.astype(np.float64) + np.log(self.block_sums(1.0).sum(1))

    def weights(self, temperature: float) -> Scores:
        """Relative to the likeliest token: [rows, blocks, BLOCK], of which the last block is filled with zeros."""
        if temperature not in self._weights:
            count, size = self.scores.shape
            weights = np.zeros((count, -(-size // BLOCK), BLOCK), dtype=np.float32)
            flat = weights.reshape(count, -1)[:, :size]
            np.subtract(self.scores, self.tops[:, None], out=flat)
            if temperature != 1:
                flat *= np.float32(1 / temperature)
            np.exp(flat, out=flat)
            self._weights = {temperature: weights}
        return self._weights[temperature]

    def block_sums(self, temperature: float) -> NDArray[np.float64]:
        if temperature not in self._sums:
            self._sums[temperature] = self.weights(temperature).sum(2).astype(np.float64)
        return self._sums[temperature]

    def likeliest(self, count: int) -> Ids:
        """At least so many of the likeliest tokens of each row, as `_Row.likeliest`. A row with too few of them has
        anything."""
        if self._likeliest is None or self._likeliest.shape[1] < count:
            self._likeliest = self._find_likeliest(count)
        return self._likeliest

    def _find_likeliest(self, count: int) -> Ids:
        least = np.partition(self._maxima, -count, axis=1)[:, -count]
        least = np.where(least > -np.inf, least, np.inf)  # not a number, too
        places = np.flatnonzero(self.scores >= least[:, None])  # quicker than by row
        rows, ids = np.divmod(places, self.scores.shape[1])
        order = np.lexsort((-self.scores[rows, ids], rows))
        firsts = np.searchsorted(rows, np.arange(len(self.scores)))
        best = np.minimum(firsts[:, None] + np.arange(count), len(ids) - 1)
        return ids[order][best] if len(ids) else np.zeros((len(self.scores), count), dtype=np.int64)

    def has_likeliest(self, count: int) -> NDArray[np.bool_]:
        """Which rows have as many tokens above minus infinity, in as many columns."""
        return (self._maxima > -np.inf).sum(1) >= count


class _DrawnRows(NamedTuple):
    token_ids: Ids
    valid: NDArray[np.bool_]
    temperature: float = 1.0
    log_sums: NDArray[np.float64] | None = None
    """Of the scores divided by the temperature, where nothing was filtered."""
    candidates: tuple[list[list[int]], list[list[float]], list[float]] | None = None
    """By row, the ids that top_k left, the weights that the other filters left them, and their sum."""

    def logprobs(self, row: int, ids: Sequence[int], scores: Sequence[float]) -> list[float]:
        """Of these tokens in the distribution that the row's token was drawn from."""
        if self.candidates is None:
            assert self.log_sums is not None
            log_sum = self.log_sums[row].item()
            return [value / self.temperature - log_sum for value in scores]
        own_ids, weights, totals = self.candidates
        by_id, log_sum = dict(zip(own_ids[row], weights[row], strict=True)), math.log(totals[row])
        found = [by_id.get(token_id, 0.0) for token_id in ids]
        return [math.log(weight) - log_sum if weight > 0 else -math.inf for weight in found]


def _choose(rows: _Rows, sampling: Sampling, uniforms: NDArray[np.float64]) -> _DrawnRows:
    if sampling.temperature == 0:
        enough = rows.has_likeliest(max(1, sampling.logprobs))
        return _DrawnRows(rows.scores.argmax(1), enough, 1.0, rows.log_sums)
    if 0 < sampling.top_k < rows.scores.shape[1]:
        return _draw_from_top(rows, sampling, uniforms)
    return _draw_from_all(rows, sampling.temperature, uniforms, sampling.logprobs)


def _draw_from_all(rows: _Rows, temperature: float, uniforms: NDArray[np.float64], count: int) -> _DrawnRows:
    every = np.arange(len(uniforms))
    cumulative = rows.block_sums(temperature).cumsum(1)
    totals = cumulative[:, -1]
    targets = uniforms * totals
    blocks = (cumulative <= targets[:, None]).sum(1)
    valid = (blocks < cumulative.shape[1]) & rows.has_likeliest(max(1, count))
    blocks[~valid] = 0
    rest = targets - np.where(blocks > 0, cumulative[every, blocks - 1], 0.0)
    inside = rows.weights(temperature)[every, blocks].cumsum(1, dtype=np.float64)
    places = (inside <= rest[:, None]).sum(1)
    valid &= places < BLOCK
    token_ids = np.where(valid, blocks * BLOCK + places, 0)
    logs = [math.log(total) if total > 0 else math.nan for total in totals.tolist()]
    return _DrawnRows(token_ids, valid, temperature, rows.tops.astype(np.float64) / temperature + np.array(logs))


def _draw_from_top(rows: _Rows, sampling: Sampling, uniforms: NDArray[np.float64]) -> _DrawnRows:
    top_k, every = sampling.top_k, np.arange(len(uniforms))
    best = rows.likeliest(max(sampling.logprobs, top_k + 1))
    edge = np.take_along_axis(rows.scores, best[:, top_k - 1 : top_k + 1], 1)
    valid = (edge[:, 1] < edge[:, 0]) & rows.has_likeliest(best.shape[1])
    ids = np.sort(best[:, :top_k], axis=1)
    weights = np.take_along_axis(rows.scores, ids, 1).astype(np.float64)
    weights /= sampling.temperature
    weights -= weights.max(1, keepdims=True)
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        ordered = np.sort(weights, axis=1)[:, ::-1]
        targets = sampling.top_p * weights.sum(1)
        last = (ordered.cumsum(1) < targets[:, None]).sum(1)
        weights = weights * (weights >= ordered[every, np.minimum(last, top_k - 1)][:, None])
    if sampling.min_p > 0:
        weights = weights * (weights >= sampling.min_p * weights.max(1, keepdims=True))
    cumulative = weights.cumsum(1)
    places = (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(1)
    valid &= places < top_k
    token_ids = np.where(valid, ids[every, np.minimum(places, top_k - 1)], 0)
    return _DrawnRows(token_ids, valid, candidates=(ids.tolist(), weights.tolist(), weights.sum(1).tolist()))
