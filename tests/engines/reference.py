"""The engine's oracle: no cache, no batch, no tensors in the choice of a token. Slow and plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.rng import uniform
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines.tiny import VOCABULARY

MARGIN = 1e-4
"""How close to a boundary rounding may decide: see `Reference.close`."""


@dataclass
class Reference:
    """A reply by the oracle, and the positions at which rounding might have decided."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    close: set[int] = field(default_factory=set)
    finish: str = ""

    def agrees(self, ids: Sequence[int]) -> bool:
        """Whether these are the same tokens, up to the first one at which rounding may have decided."""
        if list(ids) == self.ids:
            return True
        pairs = zip(ids, self.ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(self.ids)))
        return first in self.close


def reference(model: Any, prompt: Prompt, sampling: Sampling, choice: int = 0) -> Reference:
    """The whole reply from the beginning, one full forward pass for each token."""
    limit = model.config.get_text_config().max_position_embeddings
    ends = frozenset({model.config.get_text_config().eos_token_id} - {None})
    reply = ReplyState(Prompt(prompt.context_ids, phases=prompt.phases), sampling, VOCABULARY, ends, limit)
    out = Reference()
    while reply.ended is None:
        logits = _logits(model, [*prompt.context_ids, *reply.token_ids])
        scores = _adjust(logits, list(prompt.context_ids), reply, sampling)
        token_id, margin = choose(scores, sampling, uniform(sampling.seed, choice, len(reply.token_ids)))
        if reply.forced_id is not None:
            token_id, margin = reply.forced_id, math.inf
        if margin < MARGIN:
            out.close.add(len(reply.token_ids))
        norm = math.log(sum(math.exp(x - max(logits)) for x in logits)) + max(logits)
        out.logprobs.append(logits[token_id] - norm)
        reply.append_token(token_id)
    out.ids, out.finish = reply.token_ids, reply.ended.finish.value
    return out


@torch.inference_mode()
def _logits(model: Any, ids: Sequence[int]) -> list[float]:
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
    return [float(x) for x in logits]


def _adjust(logits: Sequence[float], context: list[int], reply: ReplyState, sampling: Sampling) -> list[float]:
    scores = list(logits)
    for i in {*context, *reply.token_ids}:
        scores[i] = _scale(scores[i], sampling.repetition_penalty)
    for i in set(reply.token_ids):
        scores[i] -= sampling.presence_penalty + sampling.frequency_penalty * reply.token_ids.count(i)
    for i in reply.stop_token_ids:
        scores[i] = _scale(scores[i], sampling.end_penalty)
    for i, bias in sampling.logit_bias:
        scores[i] += bias
    said = b"".join(VOCABULARY[i] for i in reply.token_ids)
    for i, text in enumerate(VOCABULARY[:256]):
        if any((said + text).endswith(banned.encode()) for banned in sampling.banned_strings):
            scores[i] = -math.inf
    early = reply.stop_token_ids if len(reply.token_ids) < sampling.min_tokens else ()
    for i in (*sampling.banned_ids, *early):
        scores[i] = -math.inf
    return scores


def _scale(score: float, penalty: float) -> float:
    return score / penalty if score > 0 else score * penalty


def choose(scores: Sequence[float], sampling: Sampling, random: float) -> tuple[int, float]:
    """The token by the scores after all options, and the distance to the nearest boundary of the choice: another best
    score, the ends of the interval that was drawn, or the edge of a filter."""
    if sampling.temperature == 0:
        best = sorted(scores, reverse=True)
        return list(scores).index(best[0]), best[0] - best[1]
    kept, margin = _filter([x / sampling.temperature for x in scores], sampling)
    edges = [(token_id, weight) for token_id, weight in enumerate(kept) if weight > 0]
    target = random * sum(kept)
    edge = 0.0
    for place, (token_id, weight) in enumerate(edges):
        if place > 0:
            margin = min(margin, abs(edge - target))
        edge += weight
        if target < edge or place == len(edges) - 1:
            return token_id, min(margin, edge - target) if place < len(edges) - 1 else margin
    raise AssertionError("a filter keeps at least one token")


def _filter(scores: list[float], sampling: Sampling) -> tuple[list[float], float]:
    """The probabilities that are kept, and the distance to the nearest edge of a filter."""
    order = sorted(scores, reverse=True)
    margin = math.inf
    if 0 < sampling.top_k < len(order):
        edge = order[sampling.top_k - 1]
        margin = edge - order[sampling.top_k] if edge > -math.inf else math.inf
        scores = [x if x >= edge else -math.inf for x in scores]
    weights = [math.exp(x - order[0]) for x in scores]
    total = sum(weights)
    weights = [x / total for x in weights]
    if sampling.top_p < 1:
        edge, distance = _top_p(weights, sampling.top_p)
        margin = min(margin, distance)
        weights = [x if x >= edge else 0.0 for x in weights]
    floor = sampling.min_p * max(weights)
    if floor > 0:
        margin = min(margin, *(abs(x - floor) / floor for x in weights))
    weights = [x if x >= floor else 0.0 for x in weights]
    total = sum(weights)
    return [x / total for x in weights], margin


def _top_p(weights: list[float], top_p: float) -> tuple[float, float]:
    total, margin = 0.0, math.inf
    for weight in sorted(weights, reverse=True):
        total += weight
        margin = min(margin, abs(total - top_p))
        if total >= top_p:
            return weight, margin
    return 0.0, 0.0
