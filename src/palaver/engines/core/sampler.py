"""From logits to tokens: applies the options of every request and selects a token for each row of a batch.

A token is drawn by inverse transform in vocabulary order, with a random number that depends on the seed and on the
token's position alone. On CUDA the whole batch is sampled there, and one small row of results is copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.request import LogitsProcessor
from palaver.errors import EngineError, PalaverError, RequestError
from palaver.generation import Alternative, Step
from palaver.sampling import Sampling

SAMPLER_VERSIONS = {"cpu": 1, "cuda": 2}
"""By device type. Raised when the same logits, settings and seed may give another token than before."""
SHORTLIST = 1024
"""This many of the likeliest tokens nearly always include all that the filters keep. Sorting a whole vocabulary is
slow."""

Array = NDArray[Any]
Candidates = tuple[Sequence[int] | Array, Array]
"""Token ids in ascending order, and the weight of each."""


def sampler_version(device: torch.device) -> int:
    return SAMPLER_VERSIONS.get(device.type, SAMPLER_VERSIONS["cpu"])


def sample(logits: Tensor, processors: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
    """The next token of each row, or the error that prevents one. Rows are independent of each other."""
    on_device = logits.device.type == "cuda"
    logits = logits.float() if on_device else logits.float().cpu()
    scores = _apply_processors(logits, processors)
    if on_device:
        return sample_on_device(logits, scores, processors, _kernels())
    logprobs = logits.log_softmax(-1).numpy()
    if not any(p.do_sample or p.sampling.logprobs or p.reply.forced_id is not None for p in processors):
        return _sample_greedy(logprobs, scores.numpy(), processors)
    rows = zip(logprobs, scores, processors, strict=True)
    with np.errstate(invalid="ignore"):
        return [_sample_row(row, own, processor, scores is logits) for row, own, processor in rows]


def _apply_processors(logits: Tensor, processors: Sequence[LogitsProcessor]) -> Tensor:
    """The scores after all options that come before the draw. Does not change `logits`."""
    if not any(processor.is_active for processor in processors):
        return logits
    scores = logits.clone()
    for row, processor in enumerate(processors):
        if processor.is_active:
            processor.apply(scores[row])
    return scores


class _SampledToken(NamedTuple):
    id: int
    logprob: float
    """The model's own log-probability, before any option."""
    score: float
    """Its score after all options; minus infinity if every token is forbidden."""


def _step(
    token: _SampledToken,
    processor: LogitsProcessor,
    alternatives: tuple[Alternative, ...] = (),
    drawn_logprob: float | None = None,
    drawn_from: tuple[Alternative, ...] = (),
) -> Step | PalaverError:
    if token.logprob != token.logprob:
        return EngineError("The model computed something that is not a number, so no token could be chosen.")
    if token.score == -torch.inf and processor.reply.forced_id is None:
        return RequestError("No token is left to choose from: the bans and constraints of this request exclude all.")
    return Step(token.id, token.logprob, alternatives, drawn_logprob, drawn_from)


def _alternatives(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Alternative, ...]:
    return tuple(map(Alternative, ids, logprobs))


# on the host


def _sample_greedy(logprobs: Array, scores: Array, processors: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
    """For rows that need no draw and report no alternatives. numpy is quicker than torch for such small operations."""
    ids: list[int] = scores.argmax(-1).tolist()
    found = (_SampledToken(i, float(logprobs[row, i]), float(scores[row, i])) for row, i in enumerate(ids))
    return [_step(token, processor) for token, processor in zip(found, processors, strict=True)]


def _sample_row(logprobs: Array, scores: Tensor, processor: LogitsProcessor, unchanged: bool) -> Step | PalaverError:
    """`unchanged`: whether the scores are the logits."""
    sampling, values = processor.sampling, scores.numpy()
    count = min(sampling.logprobs, len(values))
    by_shortlist = processor.do_sample and 0 < sampling.top_k < SHORTLIST and (count or len(values) > 4 * SHORTLIST)
    best = _Best.of(scores, max(count, sampling.top_k + 1 if by_shortlist else 0))
    candidates: Candidates | None = None
    if processor.do_sample:
        candidates = _filter_shortlist(best, sampling) if by_shortlist else None
        candidates = candidates or filter_scores(values, sampling)
        token_id = _inverse_transform(candidates, processor.uniform())
    else:
        forced = processor.reply.forced_id
        token_id = int(values.argmax()) if forced is None else forced
    token = _SampledToken(token_id, float(logprobs[token_id]), float(values[token_id]))
    if not count:
        return _step(token, processor)
    raw_ids = best.ids[:count] if unchanged else _Best.of(torch.from_numpy(logprobs), count).ids
    likeliest = best.ids[:count].tolist()
    drawn = _drawn_logprobs([token_id, *likeliest], scores, candidates)
    alternatives = _alternatives(raw_ids.tolist(), logprobs[raw_ids].tolist())
    return _step(token, processor, alternatives, drawn[0], _alternatives(likeliest, drawn[1:]))


class _Best(NamedTuple):
    """The likeliest tokens of a row, best first."""

    ids: Array
    values: Array

    @classmethod
    def of(cls, row: Tensor, count: int) -> _Best:
        if not count:
            return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
        top = row.topk(min(count, len(row)))
        return cls(top.indices.numpy(), top.values.numpy())


def _drawn_logprobs(token_ids: list[int], scores: Tensor, candidates: Candidates | None) -> list[float]:
    """Log-probabilities after all options; minus infinity for tokens that the filters removed. For a greedy request
    those of the scores."""
    if candidates is None:
        found_logprobs: list[float] = scores.log_softmax(-1).numpy()[token_ids].tolist()
        return found_logprobs
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


def _filter_shortlist(best: _Best, sampling: Sampling) -> Candidates | None:
    """As `filter_scores`, from the likeliest tokens alone. None if others may count too."""
    k, (ids, values) = sampling.top_k, best
    if k >= len(values) or values[k] == values[k - 1] or np.isnan(values[0]):
        return None
    order = ids[:k].argsort()
    return ids[:k][order], _weights(values[:k][order], sampling)


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


# on CUDA


@cache
def _kernels() -> ModuleType | None:
    """None where Triton isn't installed."""
    try:
        from palaver.engines.core import sampling_kernels
    except ImportError:
        return None
    return sampling_kernels


def sample_on_device(
    logits: Tensor, scores: Tensor, processors: Sequence[LogitsProcessor], kernels: ModuleType | None
) -> list[Step | PalaverError]:
    """With the kernels of `sampling_kernels`, or with torch's operations where there are none."""
    if kernels is None:
        rows = zip(logits, scores, processors, strict=True)
        return [_sample_device_row(row, own, processor) for row, own, processor in rows]
    settings = torch.tensor([_kernel_settings(p, kernels.MAX_TOP_K) for p in processors], dtype=torch.float64)
    results = kernels.sample_rows(logits, scores, settings.to(logits.device, non_blocking=True)).tolist()
    return [
        _read_result(result, processor, kernels)
        if result[kernels.STATUS] != kernels.UNDECIDED and processor.sampling.top_k <= kernels.MAX_TOP_K
        else _sample_device_row(logits[row], scores[row], processor)
        for row, (result, processor) in enumerate(zip(results, processors, strict=True))
    ]


def _kernel_settings(processor: LogitsProcessor, max_top_k: int) -> tuple[float, ...]:
    sampling, forced = processor.sampling, processor.reply.forced_id
    if not processor.do_sample:
        return (0, 0, 1, 0, 0, -1 if forced is None else forced)
    top_k = min(sampling.top_k, max_top_k)
    return (1 / sampling.temperature, top_k, sampling.top_p, sampling.min_p, processor.uniform(), -1)


def _read_result(result: list[float], processor: LogitsProcessor, kernels: ModuleType) -> Step | PalaverError:
    score = -torch.inf if result[kernels.STATUS] == kernels.NONE_LEFT else 0.0
    token = _SampledToken(int(result[kernels.TOKEN]), result[kernels.LOGPROB], score)
    count = processor.sampling.logprobs
    if not count:
        return _step(token, processor)
    starts = range(kernels.LISTS, kernels.WIDTH, kernels.REPORTED)
    ids, logprobs, drawn_ids, drawn_logprobs = (result[start : start + count] for start in starts)
    return _step(
        token,
        processor,
        _alternatives(list(map(int, ids)), logprobs),
        result[kernels.DRAWN_LOGPROB],
        _alternatives(list(map(int, drawn_ids)), drawn_logprobs),
    )


def _sample_device_row(logits: Tensor, scores: Tensor, processor: LogitsProcessor) -> Step | PalaverError:
    """With torch's operations, for what the kernels leave undecided, such as ties and wide filters."""
    count = min(processor.sampling.logprobs, len(scores))
    if processor.do_sample:
        weights = _filter_on_device(scores, processor.sampling)
        cumulative = weights.cumsum(0)
        drawn = torch.searchsorted(cumulative, processor.uniform() * cumulative[-1:], right=True)
        token_id = drawn.minimum(weights.nonzero().max()) if weights.any() else drawn.clamp(max=0)
        logprobs_after = (weights / cumulative[-1]).log()
    else:
        forced = processor.reply.forced_id
        token_id = scores.argmax()[None] if forced is None else torch.tensor([forced], device=scores.device)
        logprobs_after = scores.double().log_softmax(-1)
    logprobs = logits.double().log_softmax(-1)
    values = torch.cat((token_id.double(), logprobs[token_id], scores[token_id].double(), logprobs_after[token_id]))
    found, logprob, score, drawn_logprob = values.tolist()
    token = _SampledToken(int(found), logprob, score)
    if not count:
        return _step(token, processor)
    raw, own = logprobs.topk(count), scores.topk(count).indices
    return _step(
        token,
        processor,
        _alternatives(raw.indices.tolist(), raw.values.tolist()),
        drawn_logprob,
        _alternatives(own.tolist(), logprobs_after[own].tolist()),
    )


def _filter_on_device(scores: Tensor, sampling: Sampling) -> Tensor:
    """The weight of each token; 0 for those that the filters remove. As `filter_scores`."""
    weights = scores.double() / sampling.temperature
    weights = (weights - weights.max()).exp()
    if 0 < sampling.top_k < len(scores):
        weights = weights * ~(scores < scores.topk(sampling.top_k).values[-1])
    if sampling.top_p < 1:
        ordered = weights.sort(descending=True).values
        cumulative = ordered.cumsum(0)
        place = torch.searchsorted(cumulative, sampling.top_p * cumulative[-1:])
        weights = weights * (weights >= ordered[place.clamp(max=len(ordered) - 1)])
    if sampling.min_p > 0:
        weights = weights * (weights >= sampling.min_p)
    return weights
