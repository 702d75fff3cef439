"""From logits to tokens: what each reply asked for, for all rows of a step at once."""

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

SHORTLIST = 1024
"""So many of the likeliest tokens nearly always hold all that filters keep; a whole vocabulary is slow to sort."""

Array = NDArray[Any]
Kept = tuple[Sequence[int] | Array, Array]
"""Token ids in ascending order, and what each weighs."""


def draw_tokens(scores: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """A token id for each row; any, where a row holds no number."""
    with np.errstate(invalid="ignore"):
        if scores.device.type == "cpu":
            rows = scores.numpy()
            return [_pick(filter_scores(row, s), u) for row, s, u in zip(rows, samplings, uniforms, strict=True)]
        return _draw_from_afar(scores, samplings, uniforms)


def _draw_from_afar(scores: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """Fetches the likeliest of each row from the device, and a whole row only where it takes that."""
    short = scores.topk(min(SHORTLIST, scores.shape[-1]), -1)
    values, ids = short.values.cpu().numpy(), short.indices.cpu().numpy()
    out = []
    for row, (sampling, uniform) in enumerate(zip(samplings, uniforms, strict=True)):
        few = _kept_of_few(values[row], ids[row], sampling)
        out.append(_pick(filter_scores(scores[row].cpu().numpy(), sampling) if few is None else few, uniform))
    return out


def filter_scores(scores: Array, sampling: Sampling) -> Kept:
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


SAMPLER_VERSION = 1
"""Raised when the same logits, settings and seed may give another token than before."""

Rows: TypeAlias = Tensor | Array


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token for each row, and how it was rated."""

    ids: list[int]
    logprobs: list[float]
    """The model's own, before any option."""
    ratings: list[float]
    """After all options but the draw; minus infinity where every token is forbidden."""
    scores: Tensor
    """What it was rated by, all tokens of each row."""


def sample(logits: Tensor, choosers: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
    """The next token of each row, or why there is none. Rows don't depend on each other."""
    logprobs = logits.float().log_softmax(-1)
    plain = not any(chooser.draws or chooser.adjusts or chooser.reply.forced is not None for chooser in choosers)
    chosen = _likeliest(logprobs) if plain else _as_asked(logits.float(), logprobs, choosers)
    return [_step(chooser, logprobs, row, chosen) for row, chooser in enumerate(choosers)]


def _likeliest(logprobs: Tensor) -> SampledTokens:
    rows = _quick(logprobs)
    ids: list[int] = rows.argmax(-1).tolist()
    values = _values_at(rows, ids)
    return SampledTokens(ids, values, values, logprobs)


def _as_asked(logits: Tensor, logprobs: Tensor, choosers: Sequence[LogitsProcessor]) -> SampledTokens:
    scores = _adjusted(logits, choosers)
    ids = _choose_ids(scores, choosers)
    return SampledTokens(ids, _values_at(_quick(logprobs), ids), _values_at(_quick(scores), ids), scores)


def _quick(rows: Tensor) -> Rows:
    """The same memory as plain arrays on the CPU, where they are several times as quick for so little."""
    return rows.numpy() if rows.device.type == "cpu" else rows


def _values_at(rows: Rows, ids: list[int]) -> list[float]:
    """The value of one token in each row."""
    if not isinstance(rows, Tensor):
        return [float(rows[row, token_id]) for row, token_id in enumerate(ids)]
    picked: list[float] = rows.gather(-1, torch.tensor(ids, device=rows.device)[:, None])[:, 0].tolist()
    return picked


def _adjusted(logits: Tensor, choosers: Sequence[LogitsProcessor]) -> Tensor:
    """The logits with every option applied that comes before the draw; the model's own stay as they are."""
    if not any(chooser.adjusts for chooser in choosers):
        return logits
    scores = logits.clone()
    for row, chooser in enumerate(choosers):
        if chooser.adjusts:
            chooser.adjust(scores[row])
    return scores


def _choose_ids(scores: Tensor, choosers: Sequence[LogitsProcessor]) -> list[int]:
    drawn = [row for row, chooser in enumerate(choosers) if chooser.draws]
    if len(drawn) == len(choosers):
        return _draw(scores, choosers)
    ids: list[int] = _quick(scores).argmax(-1).tolist()
    if drawn:
        picked = _draw(scores[drawn], [choosers[row] for row in drawn])
        for row, token_id in zip(drawn, picked, strict=True):
            ids[row] = token_id
    forced = (chooser.reply.forced for chooser in choosers)
    return [best if must is None else must for best, must in zip(ids, forced, strict=True)]


def _draw(scores: Tensor, choosers: Sequence[LogitsProcessor]) -> list[int]:
    return draw_tokens(scores, [chooser.sampling for chooser in choosers], [chooser.uniform() for chooser in choosers])


def _step(chooser: LogitsProcessor, logprobs: Tensor, row: int, chosen: SampledTokens) -> Step | PalaverError:
    logprob = chosen.logprobs[row]
    if logprob != logprob:
        return EngineError("The model computed something that is not a number, so no token could be chosen.")
    if chosen.ratings[row] == -torch.inf and chooser.reply.forced is None:
        return RequestError("No token is left to choose from: the bans and constraints of this request exclude all.")
    count = chooser.sampling.logprobs
    if count == 0:
        return Step(chosen.ids[row], logprob)
    drawn = _drawn_from(chosen.scores[row], chooser)
    return Step(
        chosen.ids[row],
        logprob,
        _alternatives(logprobs[row], count),
        float(drawn[chosen.ids[row]]),
        _alternatives(drawn, count),
    )


def _drawn_from(scores: Tensor, chooser: LogitsProcessor) -> Tensor:
    """The log-probabilities after all options; where nothing is drawn, those of the adjusted scores."""
    if not chooser.draws:
        return scores.log_softmax(-1)
    ids, weights = filter_scores(scores.cpu().numpy(), chooser.sampling)
    drawn = np.zeros(scores.shape[0])
    drawn[ids] = weights / weights.sum()
    return torch.from_numpy(drawn).log()


def _alternatives(logprobs: Tensor, count: int) -> tuple[Alternative, ...]:
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Alternative(token_id, logprob) for token_id, logprob in pairs)
