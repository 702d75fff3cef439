"""From logits to tokens: what each reply asked for, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palaver.engines.torch.chooser import Chooser
from palaver.engines.torch.drawing import Filters, distribution, draw
from palaver.errors import EngineError, PalaverError, RequestError
from palaver.generation import Alternative, Step


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


@torch.inference_mode()
def choose(logits: Tensor, choosers: Sequence[Chooser]) -> list[Step | PalaverError]:
    """The next token of each row, or why there is none. Rows don't depend on each other."""
    logprobs = logits.float().log_softmax(-1)
    plain = not any(chooser.draws or chooser.adjusts or chooser.reply.forced is not None for chooser in choosers)
    chosen = _likeliest(logprobs) if plain else _as_asked(logits.float(), logprobs, choosers)
    return [_step(chooser, logprobs, row, chosen) for row, chooser in enumerate(choosers)]


def _likeliest(logprobs: Tensor) -> Chosen:
    best, ids = logprobs.max(-1)
    values = best.tolist()
    return Chosen(ids.tolist(), values, values, logprobs)


def _as_asked(logits: Tensor, logprobs: Tensor, choosers: Sequence[Chooser]) -> Chosen:
    scores = _adjusted(logits, choosers)
    ids = _choose_ids(scores, choosers)
    own = logprobs.gather(-1, ids[:, None])[:, 0]
    rated = scores.gather(-1, ids[:, None])[:, 0]
    return Chosen(ids.tolist(), own.tolist(), rated.tolist(), scores)


def _adjusted(logits: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """The logits with every option applied that comes before the draw; the model's own stay as they are."""
    if not any(chooser.adjusts for chooser in choosers):
        return logits
    scores = logits.clone()
    for row, chooser in enumerate(choosers):
        if chooser.adjusts:
            chooser.adjust(scores[row])
    return scores


def _choose_ids(scores: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    drawn = [row for row, chooser in enumerate(choosers) if chooser.draws]
    if len(drawn) == len(choosers):
        return draw(scores, _filters(choosers, scores.device))
    ids = scores.argmax(-1)
    if drawn:
        rows = torch.tensor(drawn, device=scores.device)
        ids[rows] = draw(scores[rows], _filters([choosers[row] for row in drawn], scores.device))
    for row, chooser in enumerate(choosers):
        forced = chooser.reply.forced
        if forced is not None:
            ids[row] = forced
    return ids


def _filters(choosers: Sequence[Chooser], device: torch.device) -> Filters:
    samplings = [chooser.sampling for chooser in choosers]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    return Filters(
        temperature=column([s.temperature for s in samplings]).float(),
        top_k=[s.top_k for s in samplings],
        top_p=column([s.top_p for s in samplings]) if any(s.top_p < 1 for s in samplings) else None,
        min_p=column([s.min_p for s in samplings]).float() if any(s.min_p > 0 for s in samplings) else None,
        uniform=column([chooser.uniform() for chooser in choosers]),
    )


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
    return distribution(scores[None], _filters([chooser], scores.device))[0].log()


def _alternatives(logprobs: Tensor, count: int) -> tuple[Alternative, ...]:
    best = logprobs.topk(min(count, logprobs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Alternative(token_id, logprob) for token_id, logprob in pairs)
