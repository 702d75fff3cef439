"""One block of a reply while it is denoised: which tokens are masked, and which of them a step shows.

A step takes the logits of the masked tokens, chooses a token for each, and shows the surest of them. The others stay
masked. A random number depends on seed, choice, the token's position in the reply and the step alone, so a block is
the same when it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from palaver.engines.core.rng import uniform
from palaver.generation import Alternative, Draft, Step
from palaver.sampling import Sampling

STREAM = 1_000
"""The random numbers of step s are stream STREAM + s; lower streams are those of the other engines."""
FORCED_LOGPROB = 0.0
"""Of a token that was given: it could be no other."""


@dataclass(frozen=True, slots=True)
class BlockRules:
    """What decides the tokens of a reply's blocks besides the logits."""

    sampling: Sampling
    choice: int
    steps: int
    mask_id: int | None
    bias: Tensor
    """Added to all logits: the request's biases, minus infinity for banned tokens and for the mask."""
    end_ids: Tensor
    """Tokens that end the reply: they are banned before `min_tokens`, and less likely by `end_penalty`."""


class Block:
    """The tokens of one block, `start` tokens into the reply. Some may be given."""

    def __init__(self, start: int, length: int, given: Sequence[int | None], rules: BlockRules) -> None:
        self.start = start
        self._rules = rules
        self.tokens: list[int | None] = [*given[:length], *[None] * (length - len(given))]
        """None: still masked."""
        self.fixed = tuple(takewhile(lambda id: id is not None, self.tokens))
        """The first tokens, if they are given."""
        self.results = [None if id is None else Step(id, FORCED_LOGPROB) for id in self.tokens]
        self._confidence = [0.0 if id is None else 1.0 for id in self.tokens]
        self._steps = max(1, min(rules.steps, self.tokens.count(None)))
        self.step = 0

    @property
    def done(self) -> bool:
        return None not in self.tokens

    @property
    def ids(self) -> list[int]:
        """The tokens as the model reads them."""
        mask = self._rules.mask_id
        assert mask is not None
        return [mask if token is None else token for token in self.tokens]

    def draft(self) -> Draft:
        return Draft(self.start, tuple(self.tokens), tuple(round(value, 4) for value in self._confidence))

    def denoise(self, logits: Tensor) -> None:
        """One step: `logits` has a row for each token of the block."""
        masked = [at for at, token in enumerate(self.tokens) if token is None]
        rows = self._biased(logits[torch.tensor(masked, device=logits.device)], masked)
        chosen = self._choose(rows, masked)
        logprobs = rows.log_softmax(-1)
        picked = logprobs.gather(1, chosen[:, None])[:, 0]
        surest = self._order(logprobs, picked)[: max(1, len(masked) // (self._steps - self.step))]
        shares = picked.exp().tolist()
        for row, at in enumerate(masked):
            self._confidence[at] = shares[row]
        raw = logits[torch.tensor([masked[row] for row in surest], device=logits.device)].log_softmax(-1)
        for row, line in zip(surest, raw, strict=True):
            self._show(masked[row], int(chosen[row]), line, float(picked[row]))
        self.step += 1

    def _biased(self, rows: Tensor, masked: list[int]) -> Tensor:
        rows = rows + self._rules.bias
        if (penalty := self._rules.sampling.end_penalty) != 1:
            ends = rows[:, self._rules.end_ids]
            rows[:, self._rules.end_ids] = torch.where(ends > 0, ends / penalty, ends * penalty)
        early = [row for row, at in enumerate(masked) if self.start + at < self._rules.sampling.min_tokens]
        if early:
            ends = self._rules.end_ids
            rows[torch.tensor(early, device=rows.device)[:, None], ends[None]] = -torch.inf
        return rows

    def _choose(self, rows: Tensor, masked: list[int]) -> Tensor:
        """The likeliest token of each row or, above temperature 0, one drawn by its share."""
        sampling = self._rules.sampling
        if sampling.temperature == 0:
            return rows.argmax(-1)
        sums = (rows.double() / sampling.temperature).softmax(-1).cumsum(-1)
        drawn = [uniform(sampling.seed, self._rules.choice, self.start + at, STREAM + self.step) for at in masked]
        targets = torch.tensor(drawn, dtype=torch.double, device=rows.device)[:, None] * sums[:, -1:]
        found = torch.searchsorted(sums, targets, right=True)[:, 0]
        last = rows.shape[1] - 1 - rows.isfinite().flip(1).int().argmax(1)
        return torch.minimum(found, last)

    def _order(self, logprobs: Tensor, picked: Tensor) -> list[int]:
        """The rows, surest first; of equally sure ones the first."""
        if self._rules.sampling.remasking == "entropy":
            score = -torch.where(logprobs.isfinite(), logprobs.exp() * logprobs, 0.0).sum(-1)
        else:
            score = -picked
        order: list[int] = score.argsort(stable=True).tolist()
        return order

    def _show(self, at: int, token_id: int, raw: Tensor, drawn: float) -> None:
        self.tokens[at] = token_id
        self.results[at] = make_step(token_id, raw, drawn, self._rules.sampling.logprobs)


def make_step(token_id: int, raw: Tensor, drawn: float, alternatives: int) -> Step:
    """The step of a token with its log-probability in `raw`, and `drawn` after all sampling parameters."""
    logprob = float(raw[token_id])
    if not alternatives:
        return Step(token_id, logprob)
    best = raw.topk(min(alternatives, len(raw)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    likeliest = tuple(Alternative(id, value) for id, value in pairs)
    return Step(token_id, logprob, likeliest, drawn, (Alternative(token_id, drawn),))
