"""From logits to tokens in the host's memory: applies the options of a request to a row and selects its token.

A token is drawn by inverse transform in vocabulary order, with a random number that depends on the seed and on the
token's position alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.logits_changes import Ids, Scores
from palaver.engines.core.processor import LogitsProcessor
from palaver.errors import EngineError, PalaverError, RequestError
from palaver.generation import Alternative, Step
from palaver.sampling import Sampling

SAMPLER_VERSION = 1
"""Raised when the same logits, settings and seed may give another token than before."""
SHORTLIST = 1024
"""This many of the likeliest tokens nearly always include all that the filters keep. Sorting a whole vocabulary is
slow."""
BLOCK = 256
"""The likeliest tokens are looked for in the blocks of the vocabulary with the greatest maxima."""

Array = NDArray[Any]
Candidates = tuple[Sequence[int] | Array, Array]
"""Token ids in ascending order, and the weight of each."""


class SampledToken(NamedTuple):
    id: int
    logprob: float
    """The model's own log-probability, before any option."""
    score: float
    """Its score after all options; minus infinity if every token is forbidden."""


def make_step(
    token: SampledToken,
    processor: LogitsProcessor,
    alternatives: tuple[Alternative, ...] = (),
    drawn_logprob: float | None = None,
    drawn_from: tuple[Alternative, ...] = (),
) -> Step | PalaverError:
    if math.isnan(token.logprob):
        return not_a_number()
    if token.score == -np.inf and processor.reply.forced_id is None:
        return RequestError("No token is left to choose from: the bans and constraints of this request exclude all.")
    return Step(token.id, token.logprob, alternatives, drawn_logprob, drawn_from)


def not_a_number() -> EngineError:
    return EngineError("The model computed something that is not a number, so no token could be chosen.")


def make_alternatives(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Alternative, ...]:
    return tuple(map(Alternative, ids, logprobs))


def sample_row(logits: Scores, processor: LogitsProcessor) -> Step | PalaverError:
    """The next token of a row, or the error that prevents one. Does not change the row."""
    scores = logits
    if processor.is_active:
        scores = logits.copy()
        processor.changes().apply(scores)
    with np.errstate(invalid="ignore"):
        norm = _log_sum_exp(logits)
        if math.isnan(norm):
            return not_a_number()
        if processor.do_sample or processor.sampling.logprobs:
            return _sample_row(logits, norm, scores, processor)
        token_id = _greedy_id(scores, processor)
        return make_step(_token(token_id, logits, norm, scores), processor)


def _greedy_id(scores: Scores, processor: LogitsProcessor) -> int:
    forced = processor.reply.forced_id
    return int(scores.argmax()) if forced is None else forced


def _token(token_id: int, logits: Scores, norm: float, scores: Scores) -> SampledToken:
    return SampledToken(token_id, float(logits[token_id]) - norm, float(scores[token_id]))


def _sample_row(logits: Scores, norm: float, scores: Scores, processor: LogitsProcessor) -> Step | PalaverError:
    sampling = processor.sampling
    count = min(sampling.logprobs, len(scores))
    by_shortlist = processor.do_sample and 0 < sampling.top_k < SHORTLIST and (count or len(scores) > 4 * SHORTLIST)
    best = likeliest_ids(scores, max(count, sampling.top_k + 1 if by_shortlist else 0))
    candidates: Candidates | None = None
    if processor.do_sample:
        candidates = _filter_shortlist(best, scores, sampling) if by_shortlist else None
        candidates = candidates or filter_scores(scores, sampling)
        token_id = _inverse_transform(candidates, processor.uniform())
    else:
        token_id = _greedy_id(scores, processor)
    token = _token(token_id, logits, norm, scores)
    if not count:
        return make_step(token, processor)
    raw_ids = best[:count] if scores is logits else likeliest_ids(logits, count)
    own_ids = best[:count].tolist()
    drawn = _drawn_logprobs([token_id, *own_ids], scores, candidates)
    alternatives = make_alternatives(raw_ids.tolist(), (logits[raw_ids].astype(np.float64) - norm).tolist())
    return make_step(token, processor, alternatives, drawn[0], make_alternatives(own_ids, drawn[1:]))


def _log_sum_exp(scores: Scores) -> float:
    """NaN if the row has a NaN, or nothing above minus infinity."""
    top = scores.max()
    return float(top) + float(np.log(np.exp(scores - top).sum(dtype=np.float64)))


def likeliest_ids(scores: Scores, count: int) -> Ids:
    """The likeliest tokens, best first; among equals the lower id comes first."""
    count = min(count, len(scores))
    if not count:
        return np.empty(0, dtype=np.int64)
    ids: Ids | None = None
    whole = len(scores) // BLOCK
    if whole > 2 * count:
        maxima = scores[: whole * BLOCK].reshape(whole, BLOCK).max(1)
        blocks = np.flatnonzero(maxima >= np.partition(maxima, -count)[-count])
        ids = np.add.outer(blocks * BLOCK, np.arange(BLOCK)).ravel()
        ids = np.concatenate((ids, np.arange(whole * BLOCK, len(scores))))
    values = scores if ids is None else scores[ids]
    threshold = np.partition(values, -count)[-count]
    places = np.flatnonzero(values >= threshold)
    places = places[np.argsort(-values[places], kind="stable")][:count]
    return places if ids is None else ids[places]


def _drawn_logprobs(token_ids: list[int], scores: Scores, candidates: Candidates | None) -> list[float]:
    """Log-probabilities after all options; minus infinity for tokens that the filters removed. For a greedy request
    those of the scores."""
    if candidates is None:
        greedy: list[float] = (scores[token_ids].astype(np.float64) - _log_sum_exp(scores)).tolist()
        return greedy
    ids, weights = candidates
    places = np.asarray(token_ids) if isinstance(ids, range) else np.searchsorted(ids, token_ids)
    places = places.clip(max=len(weights) - 1)
    found = np.asarray(ids)[places] == token_ids if not isinstance(ids, range) else True
    with np.errstate(divide="ignore"):
        logprobs: list[float] = np.log(np.where(found, weights[places], 0) / weights.sum()).tolist()
    return logprobs


def filter_scores(scores: Array, sampling: Sampling) -> Candidates:
    """Applies top_k, top_p and min_p to a whole vocabulary. Ties at a filter's threshold stay together."""
    if 0 < sampling.top_k < len(scores):
        threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(~(scores < threshold))
        return ids, _weights(scores[ids], sampling)
    return range(len(scores)), _weights(scores, sampling)


def _filter_shortlist(best: Ids, scores: Scores, sampling: Sampling) -> Candidates | None:
    """As `filter_scores`, from the likeliest tokens alone. None if others may count too."""
    k = sampling.top_k
    if k >= len(best) or scores[best[k]] == scores[best[k - 1]]:
        return None
    ids = np.sort(best[:k])
    return ids, _weights(scores[ids], sampling)


def _weights(scores: Array, sampling: Sampling) -> Array:
    """Probabilities relative to the likeliest token; 0 for the tokens that top_p and min_p remove."""
    weights: Array = scores.astype(np.float64)
    weights /= sampling.temperature
    weights -= weights.max()
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        weights *= weights >= _top_p_threshold(weights, sampling.top_p)
    if sampling.min_p > 0:
        weights *= weights >= sampling.min_p
    return weights


def _top_p_threshold(weights: Array, top_p: float) -> float:
    """The smallest weight among the likeliest tokens that together reach `top_p`."""
    target = top_p * weights.sum()
    if len(weights) > 4 * SHORTLIST:
        best = np.sort(np.partition(weights, -SHORTLIST)[-SHORTLIST:])[::-1]
        if best.sum() >= target:
            return _weight_reaching(target, best)
    return _weight_reaching(target, np.sort(weights)[::-1])


def _weight_reaching(target: float, weights: Array) -> float:
    """The weight at which the sum of these weights, greatest first, reaches the target."""
    index = int(weights.cumsum().searchsorted(target))
    return float(weights[min(index, len(weights) - 1)])


def _inverse_transform(candidates: Candidates, uniform: float) -> int:
    ids, weights = candidates
    cumulative = weights.cumsum()
    index = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    if index == len(cumulative):  # by rounding, or because the weights are NaN
        index = int(np.flatnonzero(weights)[-1]) if weights.any() else 0
    return int(ids[index])
