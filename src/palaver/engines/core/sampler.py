"""From logits to tokens: the logits of a batch, the filters of the draw, and the selection of a token from a row in the
host's memory.

A token is drawn by inverse transform in vocabulary order, with a random number that depends on the seed and on the
token's position alone. Without a filter the sums of blocks find the block, and only that one is summed token by token;
with one, the tokens that it keeps are few, and the filters work on them in float64. The order of sums is fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.generation import PendingStep
from palaver.engines.core.logits_changes import Ids, Scores
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.errors import EngineError, PalaverError, RequestError
from palaver.generation import Alternative, Step
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
    return has_rare_filter(sampling) or sampling.top_p < 1 or sampling.min_p > 0 or 0 < sampling.top_k < size


def has_rare_filter(sampling: Sampling) -> bool:
    """Whether the draw takes more than temperature, top_k, top_p and min_p."""
    shape = sampling.dynatemp_range > 0 or sampling.xtc_probability > 0
    return shape or sampling.typical_p < 1 or sampling.top_a > 0


def filter_candidates(
    candidates: Candidates, sampling: Sampling, all_tokens: Distribution | None = None, xtc_uniform: float = 1.0
) -> Candidates:
    """Applies all filters after temperature and top_k: typical_p, top_p, min_p, top_a, XTC, dynamic temperature. Tokens
    that are equally likely are kept or removed together. `all_tokens`: their distribution, if the candidates are not
    all; these must include all that the filters keep. `xtc_uniform`: the random number that decides if XTC applies."""
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
    ordered = np.sort(weights[weights > 0])[::-1]
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


SAMPLER_VERSION = 2
"""Raised when the same logits, settings and seed may give another token than before."""
BLOCK = 256
"""Sums run over blocks of tokens, and columns of at most so many tokens have maxima."""
SHORTLIST = 1024
"""Up to this top_k the likeliest tokens are looked for in the blocks with the greatest maxima."""
LOWEST = np.float32(-1e30)
"""In place of minus infinity, where its product with a weight of 0 must be 0."""
SMALL_VOCABULARY = 1 << 14
"""Up to this size rows are computed together: the calls cost more than the numbers."""
BATCH_ROWS = 4
"""A batch of rows costs as much as so many single ones. Of a draft that fails most are sampled in vain."""
NEGLIGIBLE = (1e-2, 1e-4, 1e-6)
"""Tokens this much less likely than the likeliest one are looked at only if the others don't decide."""


TYPICAL_EXCESS = (2.0, 6.0)
"""By how much the information of tokens that `typical_p` looks at first exceeds the expected one, in nats."""
ROUNDING = 1e-5
"""By how much the weight of a token may differ between two ways to compute it, with room to spare."""


def _split_columns(size: int) -> tuple[int, int]:
    """Tokens are looked for by the maxima of columns: how many tokens a column has, and how many columns there are."""
    depth = max(1, min(size // BLOCK, BLOCK))
    return depth, size // depth


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
    if token.score == -math.inf and processor.reply.forced_id is None:
        return RequestError("No token can be sampled: the bans and constraints of this request exclude all of them.")
    return Step(token.id, token.logprob, alternatives, drawn_logprob, drawn_from)


def not_a_number() -> EngineError:
    return EngineError("The model computed values that are not numbers, so no token could be sampled.")


def make_alternatives(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Alternative, ...]:
    return tuple(map(Alternative, ids, logprobs))


def sample_rows(logits: Scores, processors: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
    """The next token of each row, or the error that prevents one. Does not change the rows."""
    with np.errstate(invalid="ignore"):
        small = len(processors) > 1 and logits.shape[1] <= SMALL_VOCABULARY
        if small and not any(map(_needs_own_pass, processors)):
            return _sample_greedy(logits, processors)
        steps = _sample_batches(logits, processors) if small else {}
        return [
            steps.get(row) or _sample_row(logits[row], processor)  # a step is true
            for row, processor in enumerate(processors)
        ]


def _sample_batches(logits: Scores, processors: Sequence[LogitsProcessor]) -> dict[int, Step]:
    """The steps of rows that are sampled with others, by row."""
    batches: dict[tuple[float, ...], list[int]] = {}
    for row, processor in enumerate(processors):
        if _needs_own_pass(processor) and _can_batch(processor):
            one = processor.sampling
            batches.setdefault((one.temperature, one.top_k, one.top_p, one.min_p, one.logprobs), []).append(row)
    steps: dict[int, Step] = {}
    for rows in batches.values():
        if len(rows) > 1:
            uniforms = [processors[row].uniform() for row in rows]
            scores = logits if len(rows) == len(logits) else logits[rows]
            found = _sample_batch(scores, processors[rows[0]].sampling, uniforms)
            steps |= {row: step for row, step in zip(rows, found, strict=True) if step is not None}
    return steps


def _can_batch(processor: LogitsProcessor) -> bool:
    sampling = processor.sampling
    return (
        processor.draws_freely and not has_rare_filter(sampling) and _can_batch_by(sampling, processor.vocabulary_size)
    )


def sample_ahead(logits: Scores, processor: LogitsProcessor) -> Sequence[Step | PalaverError | None]:
    """The next tokens of one reply, a row each, as if each were the one that the next row was computed with. None, or
    missing, where a token has to be sampled by itself, once those before it are known."""
    if logits.shape[1] > SMALL_VOCABULARY:
        return []
    with np.errstate(invalid="ignore"):
        if not _needs_own_pass(processor):
            return _sample_greedy(logits, [processor] * len(logits))
        if len(logits) <= BATCH_ROWS or not _can_batch(processor):
            return []
        return _sample_batch(logits, processor.sampling, [processor.uniform(ahead) for ahead in range(len(logits))])


def _needs_own_pass(processor: LogitsProcessor) -> bool:
    sampling = processor.sampling
    return not processor.draws_freely or sampling.temperature > 0 or sampling.logprobs > 0


def _sample_greedy(logits: Scores, processors: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
    """For rows that need no draw and report no alternatives: all of them at once."""
    ids: list[int] = logits.argmax(1).tolist()
    tops = logits.max(1)
    sums: list[float] = np.exp(logits - tops[:, None]).sum(1).tolist()
    logprobs = [-math.log(total) for total in sums]  # as for a row alone: the bits must not depend on the batch
    tokens = (SampledToken(*found) for found in zip(ids, logprobs, tops.tolist(), strict=True))
    return [make_step(token, processor) for token, processor in zip(tokens, processors, strict=True)]


def _sample_greedy_row(logits: Scores, processor: LogitsProcessor) -> Step | PalaverError:
    """As `_sample_greedy`, for one row of a large vocabulary."""
    token_id = int(logits.argmax())
    weights = logits - logits[token_id]
    logprob = -math.log(np.exp(weights, out=weights).sum())
    return make_step(SampledToken(token_id, logprob, float(logits[token_id])), processor)


def _sample_row(logits: Scores, processor: LogitsProcessor) -> Step | PalaverError:
    if not _needs_own_pass(processor):
        return _sample_greedy_row(logits, processor)
    raw = own = _Row(logits)
    if math.isnan(raw.log_sum):
        return not_a_number()
    if processor.is_active:
        own = _Row(logits.copy())
        processor.changes().apply(own.scores)
    count = min(processor.sampling.logprobs, len(logits))
    if processor.do_sample and own.top > -math.inf:
        token_id, after = _draw(own, processor, count)
    else:
        forced = processor.reply.forced_id
        token_id, after = int(own.scores.argmax()) if forced is None else forced, None
    token = SampledToken(token_id, float(logits[token_id]) - raw.log_sum, float(own.scores[token_id]))
    if not count or token.score == -math.inf:
        return make_step(token, processor)
    raw_ids, own_ids = raw.likeliest(count).tolist(), own.likeliest(count).tolist()
    *drawn, drawn_logprob = (after or _Drawn(1.0, own.log_sum)).logprobs(own.scores, [*own_ids, token_id])
    alternatives = make_alternatives(raw_ids, [value - raw.log_sum for value in logits[raw_ids].tolist()])
    return make_step(token, processor, alternatives, drawn_logprob, make_alternatives(own_ids, drawn))


class _Row:
    """The scores of one row, and what is computed of them once."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._maxima: Scores | None = None
        self._exponentials: dict[float, Scores] = {}
        self._sums: dict[float, Weights] = {}
        self._top: float | None = None
        self._log_sum: float | None = None
        self._best: Ids = np.empty(0, dtype=np.int64)

    @property
    def maxima(self) -> Scores:
        """Of the tokens in each of `columns`, and of the rest."""
        if self._maxima is None:
            depth, columns = _split_columns(len(self.scores))
            maxima = self.scores[: depth * columns].reshape(depth, columns).max(0)
            rest = self.scores[depth * columns :]
            self._maxima = np.append(maxima, rest.max()) if len(rest) else maxima
        return self._maxima

    @property
    def top(self) -> float:
        if self._top is None:
            self._top = float(self.maxima.max())
        return self._top

    @property
    def log_sum(self) -> float:
        """NaN if the row has a NaN, or nothing above minus infinity."""
        if self._log_sum is None:
            self._log_sum = self.top + float(np.log(self.block_sums(1.0).sum()))
        return self._log_sum

    def exponentials(self, temperature: float) -> Scores:
        """Weights relative to the likeliest token, in blocks of which the last is filled with zeros."""
        if temperature not in self._exponentials:
            size = len(self.scores)
            weights = np.empty((-(-size // BLOCK), BLOCK), dtype=np.float32)
            flat = weights.reshape(-1)
            np.subtract(self.scores, np.float32(self.top), out=flat[:size])
            if temperature != 1:
                flat[:size] *= np.float32(1 / temperature)
            np.exp(flat[:size], out=flat[:size])
            flat[size:] = 0
            self._exponentials = {temperature: weights}  # only the last one is needed again
        return self._exponentials[temperature]

    def block_sums(self, temperature: float) -> Weights:
        if temperature not in self._sums:
            self._sums[temperature] = self.exponentials(temperature).sum(1).astype(np.float64)
        return self._sums[temperature]

    def distribution(self, temperature: float) -> Distribution:
        """Of all tokens, with its entropy."""
        total = float(self.block_sums(temperature).sum())
        weights = self.exponentials(temperature).reshape(-1)[: len(self.scores)]
        logs = (np.maximum(self.scores, LOWEST) - np.float32(self.top)) / np.float32(temperature)
        return Distribution(total, math.log(total) - float(np.multiply(weights, logs, dtype=np.float64).sum()) / total)

    def likeliest(self, count: int) -> Ids:
        """The likeliest tokens, best first; among equals the lower id comes first."""
        count = min(count, len(self.scores))
        if len(self._best) < count:
            self._best = self._find_likeliest(count)
        return self._best[:count]

    def _find_likeliest(self, count: int) -> Ids:
        found = self._reaching(count)
        if len(found) > 4 * count:  # sorting takes longer
            values = self.scores[found]
            found = found[values >= np.partition(values, -count)[-count]]
        best = found[np.argsort(-self.scores[found], kind="stable")][:count]
        if len(best) < count:  # all others are minus infinity
            others = np.flatnonzero(self.scores[: count + len(best)] == -np.inf)
            best = np.concatenate((best, others[: count - len(best)]))
        return best

    def _reaching(self, count: int) -> Ids:
        """The ids of at least `count` tokens, the likeliest among them, or of all above minus infinity: in ascending
        order. Selecting among all tokens would take long where most of them are equal."""
        depth, columns = _split_columns(len(self.scores))
        least = -np.inf
        if count <= columns:
            maxima = self.maxima[:columns]
            least = np.partition(maxima, -count)[-count]
        if least == -np.inf:
            return np.flatnonzero(self.scores > -np.inf)
        if len(self.scores) <= SMALL_VOCABULARY:
            return np.flatnonzero(self.scores >= least)
        likely = np.flatnonzero(maxima >= least)
        ids = np.add.outer(np.arange(0, depth * columns, columns), likely).ravel()
        ids = np.concatenate((ids, np.arange(depth * columns, len(self.scores))))
        return np.sort(ids[self.scores[ids] >= least])


class _Drawn(NamedTuple):
    """The distribution that a token was drawn from, where nothing was filtered."""

    temperature: float
    log_sum: float
    """Of the scores divided by the temperature."""

    def logprobs(self, scores: Scores, ids: Sequence[int]) -> list[float]:
        return [value / self.temperature - self.log_sum for value in scores[ids].tolist()]


class _DrawnFiltered(NamedTuple):
    candidates: Candidates

    def logprobs(self, scores: Scores, ids: Sequence[int]) -> list[float]:
        """Minus infinity for tokens that the filters removed."""
        own, weights = self.candidates.ids, self.candidates.weights
        places = np.searchsorted(own, ids).tolist()
        found = [
            float(weights[place]) if place < len(own) and own[place] == token_id else 0.0
            for place, token_id in zip(places, ids, strict=True)
        ]
        log_sum = math.log(weights.sum())
        return [math.log(weight) - log_sum if weight > 0 else -math.inf for weight in found]


def _draw(row: _Row, processor: LogitsProcessor, count: int) -> tuple[int, _Drawn | _DrawnFiltered]:
    """A token, and the distribution that it was drawn from. `count`: how many likely tokens are reported."""
    sampling = processor.sampling
    if not has_filter(sampling, len(row.scores)):
        return _draw_from_all(row, sampling.temperature, processor.uniform())
    first, all_tokens = _preselect(row, sampling, count)
    candidates = filter_candidates(first, sampling, all_tokens, processor.xtc_uniform())
    cumulative = candidates.weights.cumsum()
    index = int(cumulative.searchsorted(processor.uniform() * cumulative[-1], side="right"))
    if index == len(cumulative):  # by rounding
        index = int(np.flatnonzero(candidates.weights)[-1])
    return int(candidates.ids[index]), _DrawnFiltered(candidates)


def _draw_from_all(row: _Row, temperature: float, uniform: float) -> tuple[int, _Drawn]:
    sums = row.block_sums(temperature)
    cumulative = sums.cumsum()
    target = uniform * cumulative[-1]
    block = int(cumulative.searchsorted(target, side="right"))
    if block == len(cumulative):  # by rounding
        block = int(np.flatnonzero(sums)[-1])
    weights = row.exponentials(temperature)[block]
    rest = target - (cumulative[block - 1] if block else 0.0)
    index = int(weights.cumsum(dtype=np.float64).searchsorted(rest, side="right"))
    if index == len(weights):  # the block's own sum was rounded
        index = int(np.flatnonzero(weights)[-1])
    return block * BLOCK + index, _Drawn(temperature, row.top / temperature + math.log(cumulative[-1]))


def _preselect(row: _Row, sampling: Sampling, count: int) -> tuple[Candidates, Distribution | None]:
    """The tokens that may pass the filters, and the distribution of all tokens where they are not all of these."""
    scores, temperature = row.scores, sampling.filter_temperature
    if 0 < sampling.top_k < len(scores):
        return Candidates.of(_top_k_ids(row, sampling.top_k, count), scores, temperature), None
    if sampling.typical_p < 1:
        return _preselect_typical(row, temperature, sampling.typical_p)
    total = float(row.block_sums(temperature).sum())
    for least in _least_weights(sampling, total):
        ids = np.flatnonzero(scores >= row.top + temperature * math.log(least))
        candidates = Candidates.of(ids, scores, temperature)
        if sampling.top_p == 1 or candidates.weights.sum() >= sampling.top_p * total:
            return candidates, Distribution(total)
    return Candidates.of(np.flatnonzero(scores > -np.inf), scores, temperature), None


def _preselect_typical(row: _Row, temperature: float, typical_p: float) -> tuple[Candidates, Distribution | None]:
    """Tokens whose information exceeds the expected one by little: the others are less typical than all of these."""
    everything = row.distribution(temperature)
    for excess in TYPICAL_EXCESS:
        log_least = math.log(everything.total) - everything.entropy - excess
        ids = np.flatnonzero(row.scores >= row.top + temperature * log_least)
        if not len(ids):
            continue
        candidates = Candidates.of(ids, row.scores, temperature)
        near = np.abs(everything.information(candidates.weights) - everything.entropy) <= excess * (1 - ROUNDING)
        if candidates.weights[near].sum() >= typical_p * everything.total:
            return candidates, everything
    return Candidates.of(np.flatnonzero(row.scores > -np.inf), row.scores, temperature), None


def _least_weights(sampling: Sampling, total: float) -> Sequence[float]:
    """Weights below which no token passes the filters; for top_p guesses, as the tokens above may not reach it."""
    if sampling.top_p < 1:
        return NEGLIGIBLE
    weight = sampling.min_p or sampling.top_a / total
    return (weight * (1 - ROUNDING),) if weight > NEGLIGIBLE[-1] else ()


def _top_k_ids(row: _Row, top_k: int, count: int) -> Ids:
    """In ascending order. Tokens as likely as the last one are kept too."""
    if top_k < SHORTLIST:
        best = row.likeliest(max(count, top_k + 1))
        scores = row.scores[best]
        if scores[top_k] < scores[top_k - 1]:
            return np.sort(best[:top_k])
        if scores[top_k - 1] == -np.inf:
            left = np.count_nonzero(scores > -np.inf)  # sums of two have the same bits without all the zeros
            return np.sort(best[:left]) if left <= 2 else np.arange(len(row.scores))
        return np.flatnonzero(row.scores >= scores[top_k - 1])
    return np.flatnonzero(row.scores >= np.partition(row.scores, -top_k)[-top_k])


SampledStep = Step | PendingStep | PalaverError


def _can_batch_by(sampling: Sampling, size: int) -> bool:
    """Whether `_sample_batch` takes these settings: those without a filter that looks at all tokens. Filters beside
    top_k, top_p and min_p are the caller's to exclude."""
    _, columns = _split_columns(size)
    if max(sampling.top_k, sampling.logprobs) >= columns:
        return False
    return sampling.temperature == 0 or sampling.top_k > 0 or (sampling.top_p == 1 and sampling.min_p == 0)


def _sample_batch(logits: Scores, sampling: Sampling, uniforms: Sequence[float]) -> list[Step | None]:
    """The next token of each row, with the random number of each. None for rows that have to be sampled by themselves:
    with equals at the edge of a filter, with sums at the edge of rounding, or with nothing to choose from."""
    rows = _Rows(logits)
    drawn = _choose_rows(rows, sampling, np.array(uniforms))
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
    """Several rows of a small vocabulary with the same settings: the calls cost more than the numbers. A row has the
    bits that it has by itself (`_Row`): each number is computed alike, and sums run along rows."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._likeliest: Ids | None = None
        self._weights: dict[float, Scores] = {}
        self._sums: dict[float, NDArray[np.float64]] = {}

    @cached_property
    def _maxima(self) -> Scores:
        depth, columns = _split_columns(self.scores.shape[1])
        return self.scores[:, : depth * columns].reshape(len(self.scores), depth, columns).max(1)

    @cached_property
    def tops(self) -> Scores:
        rest = self.scores[:, self._maxima.shape[1] * _split_columns(self.scores.shape[1])[0] :]
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


def _choose_rows(rows: _Rows, sampling: Sampling, uniforms: NDArray[np.float64]) -> _DrawnRows:
    if sampling.temperature == 0:
        enough = rows.has_likeliest(max(1, sampling.logprobs))
        return _DrawnRows(rows.scores.argmax(1), enough, 1.0, rows.log_sums)
    if 0 < sampling.top_k < rows.scores.shape[1]:
        return _draw_rows_from_top(rows, sampling, uniforms)
    return _draw_rows_from_all(rows, sampling.temperature, uniforms, sampling.logprobs)


def _draw_rows_from_all(rows: _Rows, temperature: float, uniforms: NDArray[np.float64], count: int) -> _DrawnRows:
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


def _draw_rows_from_top(rows: _Rows, sampling: Sampling, uniforms: NDArray[np.float64]) -> _DrawnRows:
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


class NextPass(Protocol):
    """The pass after the tokens that are being sampled. It may start before the host has read them."""

    def start(self, tokens: object) -> None:
        """Called once the tokens are chosen, with one for each row in the memory of the runner."""
        ...

    def drop(self, row: int) -> None:
        """Called after `start` if the row has another token after all, or none."""
        ...


class Logits(Protocol):
    """The logits after the last token of each sequence of a batch."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Logits:
        """A batch of this row alone, in the same memory."""
        ...

    def select(self, rows: Sequence[int]) -> Logits:
        """A batch of these rows, copied."""
        ...

    def joined(self, others: Sequence[Logits]) -> Logits:
        """A batch of these rows and those of others of the same kind, copied."""
        ...

    def copy(self) -> Logits:
        """The same logits in memory of their own: a runner may overwrite its own in its next pass."""
        ...

    @property
    def nbytes(self) -> int: ...

    def sample_ahead(self, row: int, count: int, processor: LogitsProcessor) -> Sequence[SampledStep | None]:
        """The tokens of `count` rows from this one on, which belong to one reply, if every token is the one that the
        next row was computed with. None, or missing, where a token has to be sampled once those before it are known.
        Holds for as long as the processor `draws_freely`."""
        ...

    def sample(self, processors: Sequence[LogitsProcessor], next_pass: NextPass | None = None) -> Sequence[SampledStep]:
        """The next token of each row, or the error that prevents one. Rows are independent of each other.

        `next_pass` is given for logits of runners that run ahead. It may overwrite these logits.
        """
        ...


class HostLogits:
    """Logits in the host's memory: a float32 array, a row for each sequence."""

    def __init__(self, array: Scores) -> None:
        assert array.ndim == 2
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def row(self, index: int) -> HostLogits:
        return HostLogits(self.array[index : index + 1])

    def select(self, rows: Sequence[int]) -> HostLogits:
        return HostLogits(self.array[list(rows)])

    def joined(self, others: Sequence[Logits]) -> HostLogits:
        arrays = [other.array for other in others if isinstance(other, HostLogits)]
        assert len(arrays) == len(others), "logits of one runner are of one kind"
        return HostLogits(np.concatenate([self.array, *arrays]))

    def copy(self) -> HostLogits:
        return HostLogits(self.array.copy())

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def sample_ahead(self, row: int, count: int, processor: LogitsProcessor) -> Sequence[SampledStep | None]:
        return sample_ahead(self.array[row : row + count], processor)

    def sample(
        self, processors: Sequence[LogitsProcessor], next_pass: NextPass | None = None
    ) -> list[Step | PalaverError]:
        return sample_rows(self.array, processors)
