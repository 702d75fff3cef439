"""The engine's oracle: no cache, no batch, no tensors in the choice of a token. Slow and plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from palaver.engines.core.generation import ReplyState
from palaver.engines.core.processor import uniform
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
        token_id, close = _choose(scores, sampling, uniform(sampling.seed, choice, len(reply.token_ids)))
        if reply.forced_id is not None:
            token_id, close = reply.forced_id, False
        if close:
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


def _choose(scores: list[float], sampling: Sampling, random: float) -> tuple[int, bool]:
    if sampling.temperature == 0:
        best = sorted(scores, reverse=True)
        return scores.index(best[0]), best[0] - best[1] < MARGIN
    kept, close = _filter([x / sampling.temperature for x in scores], sampling)
    target = random * sum(kept)
    edge = 0.0
    for token_id, weight in enumerate(kept):
        close |= weight > 0 and abs(edge - target) < MARGIN
        edge += weight
        if target < edge:
            return token_id, close or edge - target < MARGIN
    raise AssertionError("the random number is below 1")


def _filter(scores: list[float], sampling: Sampling) -> tuple[list[float], bool]:
    """The probabilities that are kept, and whether a filter's edge is too close to call."""
    order = sorted(scores, reverse=True)
    close = False
    if sampling.top_k:
        edge = order[min(sampling.top_k, len(order)) - 1]
        close |= sampling.top_k < len(order) and edge - order[sampling.top_k] < MARGIN
        scores = [x if x >= edge else -math.inf for x in scores]
    weights = [math.exp(x - order[0]) for x in scores]
    weights = [x / sum(weights) for x in weights]
    if sampling.top_p < 1:
        edge, near = _top_p(weights, sampling.top_p)
        close |= near
        weights = [x if x >= edge else 0.0 for x in weights]
    floor = sampling.min_p * max(weights)
    close |= sampling.min_p > 0 and any(abs(x - floor) < MARGIN * floor for x in weights)
    weights = [x if x >= floor else 0.0 for x in weights]
    return [x / sum(weights) for x in weights], close


def _top_p(weights: list[float], top_p: float) -> tuple[float, bool]:
    total, close = 0.0, False
    for weight in sorted(weights, reverse=True):
        total += weight
        close |= abs(total - top_p) < MARGIN
        if total >= top_p:
            return weight, close
    return 0.0, True
