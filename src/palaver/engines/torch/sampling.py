"""From logits to tokens: what each reply asked for, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from palaver.engines.torch.chooser import Chooser
from palaver.engines.torch.drawing import Array, draw, kept
from palaver.errors import EngineError, PalaverError, RequestError
from palaver.generation import Alternative, Step

SAMPLER_VERSION = 1
"""Raised when the same logits, settings and seed may give another token than before."""

Rows: TypeAlias = Tensor | Array


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token for each row, and how it was rated."""

    ids: list[int]
    logprobs: list[float]
    """The model's own, before any option."""
    ratings: list[float]
    """After all options but the draw; minus infinity where every token is forbidden."""
    scores: Tensor
    """What it was rated by, all tokens of each row."""


def choose(logits: Tensor, choosers: Sequence[Chooser]) -> list[Step | PalaverError]:
    """The next token of each row, or why there is none. Rows don't depend on each other."""
    logprobs = logits.float().log_softmax(-1)
    plain = not any(chooser.draws or chooser.adjusts or chooser.reply.forced is not None for chooser in choosers)
    chosen = _likeliest(logprobs) if plain else _as_asked(logits.float(), logprobs, choosers)
    return [_step(chooser, logprobs, row, chosen) for row, chooser in enumerate(choosers)]


def _likeliest(logprobs: Tensor) -> Chosen:
    rows = _quick(logprobs)
    ids: list[int] = rows.argmax(-1).tolist()
    values = _values_at(rows, ids)
    return Chosen(ids, values, values, logprobs)


def _as_asked(logits: Tensor, logprobs: Tensor, choosers: Sequence[Chooser]) -> Chosen:
    scores = _adjusted(logits, choosers)
    ids = _choose_ids(scores, choosers)
    return Chosen(ids, _values_at(_quick(logprobs), ids), _values_at(_quick(scores), ids), scores)


def _quick(rows: Tensor) -> Rows:
    """The same memory as plain arrays on the CPU, where they are several times as quick for so little."""
    return rows.numpy() if rows.device.type == "cpu" else rows


def _values_at(rows: Rows, ids: list[int]) -> list[float]:
    """The value of one token in each row."""
    if not isinstance(rows, Tensor):
        return [float(rows[row, token_id]) for row, token_id in enumerate(ids)]
    picked: list[float] = rows.gather(-1, torch.tensor(ids, device=rows.device)[:, None])[:, 0].tolist()
    return picked


def _adjusted(logits: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """The logits with every option applied that comes before the draw; the model's own stay as they are."""
    if not any(chooser.adjusts for chooser in choosers):
        return logits
    scores = logits.clone()
    for row, chooser in enumerate(choosers):
        if chooser.adjusts:
            chooser.adjust(scores[row])
    return scores


def _choose_ids(scores: Tensor, choosers: Sequence[Chooser]) -> list[int]:
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


def _draw(scores: Tensor, choosers: Sequence[Chooser]) -> list[int]:
    return draw(scores, [chooser.sampling for chooser in choosers], [chooser.uniform() for chooser in choosers])


def _step(chooser: Chooser, logprobs: Tensor, row: int, chosen: Chosen) -> Step | PalaverError:
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


def _drawn_from(scores: Tensor, chooser: Chooser) -> Tensor:
    """The log-probabilities after all options; where nothing is drawn, those of the adjusted scores."""
    if not chooser.draws:
        return scores.log_softmax(-1)
    ids, weights = kept(scores.cpu().numpy(), chooser.sampling)
    drawn = np.zeros(scores.shape[0])
    drawn[ids] = weights / weights.sum()
    return torch.from_numpy(drawn).log()


def _alternatives(logprobs: Tensor, count: int) -> tuple[Alternative, ...]:
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Alternative(token_id, logprob) for token_id, logprob in pairs)
