"""From logits to tokens: applies the options of every request and selects a token for each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.request import LogitsProcessor
from palaver.errors import EngineError, PalaverError, RequestError
from palaver.generation import Alternative, Step
from palaver.sampling import Sampling

SAMPLER_VERSION = 1
"""Raised when the same logits, settings and seed may give another token than before."""
SHORTLIST = 1024
"""This many of the likeliest tokens nearly always include all that the filters keep. Sorting a whole vocabulary is
slow."""

Array = NDArray[Any]
TensorOrArray: TypeAlias = Tensor | Array
Candidates = tuple[Sequence[int] | Array, Array]
"""Token ids in ascending order, and the weight of each."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row."""

    ids: list[int]
    logprobs: list[float]
    """The model's own log-probabilities of these tokens, before any option."""
    token_scores: list[float]
    """The scores of these tokens after all options; minus infinity if every token is forbidden."""
    scores: Tensor
    """The scores of all tokens after all options, a row for each request."""


def sample(logits: Tensor, processors: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
    """The next token of each row, or the error that prevents one. Rows are independent of each other."""
    logprobs = logits.float().log_softmax(-1)
    greedy = not any(p.do_sample or p.is_active or p.reply.forced_id is not None for p in processors)
    sampled = _sample_greedy(logprobs) if greedy else _sample_with_options(logits.float(), logprobs, processors)
    return [_step(processor, logprobs, row, sampled) for row, processor in enumerate(processors)]


def _sample_greedy(logprobs: Tensor) -> SampledTokens:
    rows = _as_array(logprobs)
    ids: list[int] = rows.argmax(-1).tolist()
    values = _values_at(rows, ids)
    return SampledTokens(ids, values, values, logprobs)


def _sample_with_options(logits: Tensor, logprobs: Tensor, processors: Sequence[LogitsProcessor]) -> SampledTokens:
    scores = _apply_processors(logits, processors)
    ids = _select_ids(scores, processors)
    return SampledTokens(ids, _values_at(_as_array(logprobs), ids), _values_at(_as_array(scores), ids), scores)


def _as_array(rows: Tensor) -> TensorOrArray:
    """On the CPU a numpy view of the same memory: numpy is several times faster for such small operations."""
    return rows.numpy() if rows.device.type == "cpu" else rows


def _values_at(rows: TensorOrArray, ids: list[int]) -> list[float]:
    """The value of one token in each row."""
    if not isinstance(rows, Tensor):
        return [float(rows[row, token_id]) for row, token_id in enumerate(ids)]
    values: list[float] = rows.gather(-1, torch.tensor(ids, device=rows.device)[:, None])[:, 0].tolist()
    return values


def _apply_processors(logits: Tensor, processors: Sequence[LogitsProcessor]) -> Tensor:
    """The scores after all options that come before the draw. Does not change `logits`."""
    if not any(processor.is_active for processor in processors):
        return logits
    scores = logits.clone()
    for row, processor in enumerate(processors):
        if processor.is_active:
            processor.apply(scores[row])
    return scores


def _select_ids(scores: Tensor, processors: Sequence[LogitsProcessor]) -> list[int]:
    sampled_rows = [row for row, processor in enumerate(processors) if processor.do_sample]
    if len(sampled_rows) == len(processors):
        return _draw(scores, processors)
    ids: list[int] = _as_array(scores).argmax(-1).tolist()
    if sampled_rows:
        drawn = _draw(scores[sampled_rows], [processors[row] for row in sampled_rows])
        for row, token_id in zip(sampled_rows, drawn, strict=True):
            ids[row] = token_id
    forced_ids = (processor.reply.forced_id for processor in processors)
    return [best if forced is None else forced for best, forced in zip(ids, forced_ids, strict=True)]


def _draw(scores: Tensor, processors: Sequence[LogitsProcessor]) -> list[int]:
    samplings = [processor.sampling for processor in processors]
    return draw_tokens(scores, samplings, [processor.uniform() for processor in processors])


def _step(processor: LogitsProcessor, logprobs: Tensor, row: int, sampled: SampledTokens) -> Step | PalaverError:
    logprob = sampled.logprobs[row]
    if logprob != logprob:
        return EngineError("The model computed something that is not a number, so no token could be chosen.")
    if sampled.token_scores[row] == -torch.inf and processor.reply.forced_id is None:
        return RequestError("No token is left to choose from: the bans and constraints of this request exclude all.")
    count = processor.sampling.logprobs
    if count == 0:
        return Step(sampled.ids[row], logprob)
    drawn_logprobs = _drawn_logprobs(sampled.scores[row], processor)
    return Step(
        sampled.ids[row],
        logprob,
        _alternatives(logprobs[row], count),
        float(drawn_logprobs[sampled.ids[row]]),
        _alternatives(drawn_logprobs, count),
    )


def _drawn_logprobs(scores: Tensor, processor: LogitsProcessor) -> Tensor:
    """The log-probabilities after all options. For a greedy request those of the processed scores."""
    if not processor.do_sample:
        return scores.log_softmax(-1)
    ids, weights = filter_scores(scores.cpu().numpy(), processor.sampling)
    probabilities = np.zeros(scores.shape[0])
    probabilities[ids] = weights / weights.sum()
    return torch.from_numpy(probabilities).log()


def _alternatives(logprobs: Tensor, count: int) -> tuple[Alternative, ...]:
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Alternative(token_id, logprob) for token_id, logprob in pairs)


def draw_tokens(scores: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """Draws a token id for each row by inverse transform. Any id for a row of NaNs."""
    with np.errstate(invalid="ignore"):
        if scores.device.type != "cpu":
            return draw_on_device(scores, samplings, uniforms)
        rows = zip(scores.numpy(), samplings, uniforms, strict=True)
        return [_inverse_transform(filter_scores(row, sampling), uniform) for row, sampling, uniform in rows]


def draw_on_device(scores: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """As `draw_tokens`. Copies only the likeliest tokens of a row from the device, and the whole row if needed."""
    top = scores.topk(min(SHORTLIST, scores.shape[-1]), -1)
    values, ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    drawn = []
    for row, (sampling, uniform) in enumerate(zip(samplings, uniforms, strict=True)):
        candidates = _filter_shortlist(values[row], ids[row], sampling)
        if candidates is None:
            candidates = filter_scores(scores[row].cpu().numpy(), sampling)
        drawn.append(_inverse_transform(candidates, uniform))
    return drawn


def filter_scores(scores: Array, sampling: Sampling) -> Candidates:
    """Applies top_k, top_p and min_p to a whole vocabulary. Ties at a filter's threshold stay together."""
    if 0 < sampling.top_k < len(scores):
        threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(~(scores < threshold))
        return ids, _weights(scores[ids], sampling)
    return range(len(scores)), _weights(scores, sampling)


def _filter_shortlist(scores: Array, ids: Array, sampling: Sampling) -> Candidates | None:
    """As `filter_scores`, from the likeliest tokens alone, best first. None if others may count too."""
    k = sampling.top_k
    if not 0 < k < len(scores) or scores[k] == scores[k - 1]:
        return None
    order = ids[:k].argsort()
    return ids[:k][order], _weights(scores[:k][order], sampling)


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
