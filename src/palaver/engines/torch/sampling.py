"""From logits to tokens: what each reply asked for, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palaver.engines.torch.chooser import Chooser
from palaver.errors import EngineError, PalaverError, RequestError
from palaver.generation import Alternative, Step

SHORTLIST = 1024
"""So many of the likeliest tokens nearly always reach top_p; sorting a whole vocabulary is slow."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of a draw, a row each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


@torch.inference_mode()
def choose(logits: Tensor, choosers: Sequence[Chooser]) -> list[Step | PalaverError]:
    """The next token of each row, or why there is none. Rows don't depend on each other."""
    logits = logits.float()
    scores = _adjusted(logits, choosers)
    ids = _choose_ids(scores, choosers)
    norms = logits.logsumexp(-1)
    chosen = logits.gather(-1, ids[:, None])[:, 0] - norms
    best = scores.gather(-1, ids[:, None])[:, 0]
    table = torch.stack((chosen, best), 1).tolist()
    return [
        _step(chooser, logits[row], norms[row], token_id, logprob, score)
        for row, (chooser, token_id, (logprob, score)) in enumerate(zip(choosers, ids.tolist(), table, strict=True))
    ]


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
        return _draw(scores, choosers)
    ids = scores.argmax(-1)
    if drawn:
        rows = torch.tensor(drawn, device=scores.device)
        ids[rows] = _draw(scores[rows], [choosers[row] for row in drawn])
    for row, chooser in enumerate(choosers):
        forced = chooser.reply.forced
        if forced is not None:
            ids[row] = forced
    return ids


def _draw(scores: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """Inverse transform sampling in the order of the vocabulary: a tiny change of a score moves each boundary
    a tiny bit, so it changes the token only when the random number lies that close to one."""
    filters = _filters(choosers, scores.device)
    weights = _kept(scores.double() / filters.temperature, filters, choosers)
    edges = weights.cumsum(-1)
    targets = filters.uniform * edges[:, -1:]
    ids = torch.searchsorted(edges, targets, right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(ids, last)


def _kept(scores: Tensor, filters: Filters, choosers: Sequence[Chooser]) -> Tensor:
    """The probabilities, 0 where a filter removes the token. Ties at a filter's edge are kept together."""
    samplings = [chooser.sampling for chooser in choosers]
    if any(s.top_k for s in samplings):
        scores = _top_k(scores, filters.top_k)
    weights = scores.softmax(-1)
    if any(s.top_p < 1 for s in samplings):
        weights = weights * (weights >= _top_p_edge(weights, filters.top_p))
    if any(s.min_p > 0 for s in samplings):
        weights = weights * (weights >= weights.amax(-1, keepdim=True) * filters.min_p)
    return weights


def _top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    size = scores.shape[-1]
    ks = torch.where(top_k == 0, size, top_k.clamp(max=size))
    largest = int(top_k.clamp(max=size).max())
    best = scores.topk(largest, -1).values
    edge = best.gather(-1, (ks.clamp(max=largest) - 1))
    return scores.masked_fill((scores < edge) & (ks < size), -torch.inf)


def _top_p_edge(weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability that is still needed to reach top_p."""
    best = weights.topk(min(SHORTLIST, weights.shape[-1]), -1).values
    if bool((best.sum(-1, keepdim=True) < top_p).any()):
        best = weights.sort(-1, descending=True).values
    reached = best.cumsum(-1) >= top_p
    at = torch.where(reached.any(-1), reached.to(torch.uint8).argmax(-1), best.shape[-1] - 1)
    edge = best.gather(-1, at[:, None])
    return torch.where(top_p < 1, edge, 0.0)


def _filters(choosers: Sequence[Chooser], device: torch.device) -> Filters:
    samplings = [chooser.sampling for chooser in choosers]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    return Filters(
        temperature=column([s.temperature for s in samplings]),
        top_k=torch.tensor([s.top_k for s in samplings], device=device)[:, None],
        top_p=column([s.top_p for s in samplings]),
        min_p=column([s.min_p for s in samplings]),
        uniform=column([chooser.uniform() for chooser in choosers]),
    )


def _step(
    chooser: Chooser, logits: Tensor, norm: Tensor, token_id: int, logprob: float, score: float
) -> Step | PalaverError:
    if logprob != logprob:
        return EngineError("The model computed something that is not a number, so no token could be chosen.")
    if score == -torch.inf and chooser.reply.forced is None:
        return RequestError("No token is left to choose from: the bans and constraints of this request exclude all.")
    count = chooser.sampling.logprobs
    return Step(token_id, logprob, _alternatives(logits, norm, count) if count else ())


def _alternatives(logits: Tensor, norm: Tensor, count: int) -> tuple[Alternative, ...]:
    best = logits.topk(min(count, logits.shape[-1]))
    pairs = zip(best.indices.tolist(), (best.values - norm).tolist(), strict=True)
    return tuple(Alternative(token_id, logprob) for token_id, logprob in pairs)
