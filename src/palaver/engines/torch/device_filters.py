"""The filters that the sampling kernels lack, for a whole batch on a device: one row of results for each request.

torch's operations on all rows at once, in float64. The rules are those of `core/sampler.py`; what a row doesn't ask for
is neutral in its settings, and what no row asks for is left out. Nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.torch.device_changes import to_device

REPORTED = 20
"""Alternatives in a row of results."""
TOKEN, LOGPROB, DRAWN_LOGPROB, STATUS, LISTS = range(5)
"""Columns of the results. After them four lists: ids and log-probabilities before filtering, and the same after it.
The last column is the logarithm of the sum of the logits' exponentials."""
DECIDED, UNDECIDED, NONE_LEFT = range(3)
WIDTH = LISTS + 4 * REPORTED + 1


def sample_rows(logits: Tensor, scores: Tensor, processors: Sequence[LogitsProcessor], reported: int) -> Tensor:
    """A row for each request: the token, its log-probability before and after all options, and the status; then four
    lists of `reported` numbers: ids and log-probabilities of the likeliest tokens before the options, and after them.
    The last column is the logarithm of the sum of exponentials.

    `logits` are the model's own, `scores` those after penalties, biases and bans. A row with a NaN has the
    log-probability NaN."""
    settings = _Settings(processors, logits)
    weights = torch.where(settings.draws, _filter(scores, settings), _weights(scores, torch.ones_like(settings.top_p)))
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, settings.uniform * total, right=True)
    places = torch.arange(scores.shape[1], device=scores.device)
    last = torch.where(weights > 0, places, 0).amax(1, keepdim=True)  # the sum may be rounded down to the draw
    greedy = torch.where(settings.forced < 0, scores.argmax(1, keepdim=True), settings.forced)
    token = torch.where(settings.draws, drawn.minimum(last), greedy)
    log_sum = logits.double().logsumexp(1, keepdim=True)
    before, after = logits.double() - log_sum, (weights / total).log()
    count = min(reported, scores.shape[1])
    raw, own = before.topk(count, 1), scores.topk(count, 1).indices
    none_left = (scores.gather(1, token) == -torch.inf) & (settings.forced < 0)
    status = torch.where(none_left, NONE_LEFT, DECIDED)
    lists = (raw.indices, raw.values, own, after.gather(1, own))
    missing = (0, reported - count)
    columns = [token, before.gather(1, token), after.gather(1, token), status]
    columns += [*(torch.nn.functional.pad(found.double(), missing) for found in lists), log_sum]
    return torch.cat([column.double() for column in columns], 1)


class _Settings:
    """A column for each option, on the device, and whether any row asks for it."""

    def __init__(self, processors: Sequence[LogitsProcessor], like: Tensor) -> None:
        own = [processor.sampling for processor in processors]
        size = like.shape[1]
        top_k = [sampling.top_k if 0 < sampling.top_k < size else size for sampling in own]
        xtc = [p.xtc_uniform() < p.sampling.xtc_probability if p.do_sample else False for p in processors]
        forced = [-1 if p.reply.forced_id is None else p.reply.forced_id for p in processors]
        table = np.array(
            [
                [processor.do_sample for processor in processors],
                forced,
                [processor.uniform() if processor.do_sample else 0.0 for processor in processors],
                [sampling.filter_temperature if sampling.temperature > 0 else 1.0 for sampling in own],
                top_k,
                [sampling.typical_p for sampling in own],
                [sampling.top_p for sampling in own],
                [sampling.min_p for sampling in own],
                [sampling.top_a for sampling in own],
                xtc,
                [sampling.xtc_threshold for sampling in own],
                [sampling.dynatemp_range > 0 for sampling in own],
                [sampling.dynamic_temperature(0.0) for sampling in own],
                [sampling.dynamic_temperature(1.0) for sampling in own],
                [sampling.dynatemp_exponent for sampling in own],
            ],
            dtype=np.float64,
        )
        columns = to_device(table, like.device)[:, :, None].unbind(0)
        self.draws, self.forced = columns[0] > 0, columns[1].long()
        self.uniform, self.temperature = columns[2], columns[3]
        self.top_k = columns[4].long() if min(top_k) < size else None
        self.typical_p = columns[5] if any(sampling.typical_p < 1 for sampling in own) else None
        self.top_p = columns[6]
        self.has_top_p = any(sampling.top_p < 1 for sampling in own)
        self.min_p = columns[7] if any(sampling.min_p > 0 for sampling in own) else None
        self.top_a = columns[8] if any(sampling.top_a > 0 for sampling in own) else None
        self.xtc = columns[9] > 0 if any(xtc) else None
        self.xtc_threshold = columns[10]
        self.dynamic = columns[11] > 0 if any(sampling.dynatemp_range > 0 for sampling in own) else None
        self.lowest, self.highest, self.exponent = columns[12:]


def _filter(scores: Tensor, settings: _Settings) -> Tensor:
    """The weight of each token; 0 for those that the filters remove."""
    weights = _weights(scores, settings.temperature)
    if settings.top_k is not None:
        ordered = scores.sort(1, descending=True).values
        weights = weights * ~(scores < ordered.gather(1, settings.top_k - 1))
    if settings.typical_p is not None:
        weights = _typical(weights, settings.typical_p)
    if settings.has_top_p:
        ordered = weights.sort(1, descending=True).values
        cumulative = ordered.cumsum(1)
        place = torch.searchsorted(cumulative, settings.top_p * cumulative[:, -1:])
        least = ordered.gather(1, place.clamp(max=ordered.shape[1] - 1))
        weights = weights * ((weights >= least) | (settings.top_p >= 1))
    if settings.min_p is not None:
        weights = weights * (weights >= settings.min_p * weights.amax(1, keepdim=True))
    if settings.top_a is not None:
        least = settings.top_a * weights.amax(1, keepdim=True) ** 2 / weights.sum(1, keepdim=True)
        weights = weights * (weights >= least)
    if settings.xtc is not None:
        choices = (weights >= settings.xtc_threshold * weights.sum(1, keepdim=True)) & (weights > 0)
        least = torch.where(choices, weights, torch.inf).amin(1, keepdim=True)
        applies = settings.xtc & (choices.sum(1, keepdim=True) > 1)
        weights = torch.where(applies & (weights > least), 0.0, weights)
    if settings.dynamic is not None:
        weights = torch.where(settings.dynamic, _dynamic_temperature(scores, weights, settings), weights)
    return weights


def _weights(scores: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities relative to the likeliest token."""
    weights = scores.double() / temperature
    return (weights - weights.amax(1, keepdim=True)).exp()


def _typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    shares = weights / weights.sum(1, keepdim=True)
    distance = (-shares.log() - torch.special.entr(shares).sum(1, keepdim=True)).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    last = torch.searchsorted(shares.gather(1, order).cumsum(1), typical_p)
    most = ordered.gather(1, last.clamp(max=ordered.shape[1] - 1))
    return weights * ((distance <= most) | (typical_p >= 1))


def _dynamic_temperature(scores: Tensor, weights: Tensor, settings: _Settings) -> Tensor:
    """The entropy of the tokens that are left decides the temperature; a single one stays as it is."""
    count = weights.count_nonzero(1).double()[:, None]
    entropy = torch.special.entr(weights / weights.sum(1, keepdim=True)).sum(1, keepdim=True)
    evenness = (entropy / count.clamp(min=2).log()).clamp(0, 1)
    temperature = settings.lowest + (settings.highest - settings.lowest) * evenness**settings.exponent
    left = torch.where(weights > 0, scores.double(), -torch.inf)
    coldest = (left == left.amax(1, keepdim=True)).double()
    warm = torch.where(temperature > 0, _weights(left, temperature.clamp(min=1e-300)), coldest)
    return torch.where(count < 2, weights, warm)
