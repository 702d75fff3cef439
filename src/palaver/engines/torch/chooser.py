"""What one reply asks of its next token: the options that change the model's scores before one is picked."""

from __future__ import annotations

import torch
from torch import Tensor

from palaver.engines.reply import Reply
from palaver.engines.torch.banned import BannedText
from palaver.engines.torch.dice import uniform
from palaver.engines.torch.guide import Guide
from palaver.engines.torch.holding import Holding
from palaver.engines.torch.mending import Mending
from palaver.engines.torch.unspoken import Unspoken
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.sampling import Sampling


class Chooser:
    """The options of one reply and what they have to remember, restored from the tokens said before."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        choice: int,
        reply: Reply,
        size: int,
        banned: BannedText | None = None,
        guide: Guide | Holding | None = None,
        unspoken: Unspoken | None = None,
    ) -> None:
        _check_ids(sampling, size)
        self.sampling = sampling
        self.reply = reply
        self._choice = choice
        self._context = prompt.context_ids
        self._banned = banned
        self._guide = guide
        self._unspoken = unspoken
        self._mending: Mending | None = None
        self._size = size
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._never: Tensor | None = None
        self._biases: tuple[Tensor, Tensor] | None = None
        self._closers: dict[int, Tensor] = {}
        """By the state of the reply."""
        holds = (banned, guide, unspoken)
        self._always = _always_adjusts(sampling) or any(one is not None for one in holds)

    @property
    def draws(self) -> bool:
        return self.sampling.temperature > 0 and self.reply.forced is None

    @property
    def adjusts(self) -> bool:
        return self._always or self._mends or len(self.reply.ids) < self.sampling.min_tokens

    @property
    def _mends(self) -> bool:
        return self._mending is not None and bool(self._mending.left)

    def mends(self, mending: Mending | None) -> None:
        """From here on the reply first writes the bytes that were cut off at its seam."""
        self._mending = mending

    def uniform(self) -> float:
        return uniform(self.sampling.seed, self._choice, len(self.reply.ids))

    def take(self, token_id: int) -> None:
        forced = self.reply.forced == token_id
        self.reply.take(token_id)
        if self._guide is not None:
            self._guide.take(token_id, self.reply, forced)
        if self._mending is not None and self._mending.left:
            self._mending.take(token_id)
        if self._counts is not None and self._seen is not None:
            self._counts[token_id] += 1
            self._seen[token_id] = True

    def adjust(self, scores: Tensor) -> None:
        """Changes the scores in place, in the order the transformers library has for what both know."""
        if self._guide is not None:
            self._guide.forbid(scores, self.reply)
        sampling = self.sampling
        if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
            self._penalise(scores)
        if sampling.end_penalty != 1:
            self._penalise_end(scores)
        if sampling.logit_bias:
            scores.index_add_(0, *self._bias(scores))
        self._forbid(scores)

    def _penalise(self, scores: Tensor) -> None:
        counts, seen = self._history(scores.device)
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            scores.copy_(torch.where(seen, _scaled(scores, sampling.repetition_penalty), scores))
        if sampling.presence_penalty:
            scores.sub_(sampling.presence_penalty * (counts > 0))
        if sampling.frequency_penalty:
            scores.sub_(sampling.frequency_penalty * counts)

    def _history(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How often each token was said in the reply, and whether it is in the context or the reply."""
        if self._counts is None or self._seen is None:
            said = torch.tensor(self.reply.ids, dtype=torch.long, device=device)
            self._counts = torch.bincount(said, minlength=self._size).to(torch.float32)
            self._seen = self._counts > 0
            self._seen[torch.tensor(self._context, dtype=torch.long, device=device)] = True
        return self._counts, self._seen

    def _penalise_end(self, scores: Tensor) -> None:
        ends = self._closing_ids(scores.device)
        scores[ends] = _scaled(scores[ends], self.sampling.end_penalty)

    def _forbid(self, scores: Tensor) -> None:
        if self.sampling.banned_ids:
            scores.index_fill_(0, self._banned_ids(scores.device), -torch.inf)
        if self._banned is not None:
            scores.index_fill_(0, self._banned.ids(self.reply.ids, scores.device), -torch.inf)
        if self._unspoken is not None and not self._mends:
            self._unspoken.forbid(scores, self.reply)
        if len(self.reply.ids) < self.sampling.min_tokens:
            scores.index_fill_(0, self._closing_ids(scores.device), -torch.inf)
        if self._mending is not None and self._mending.left:
            allowed = torch.tensor(self._mending.allowed(), dtype=torch.long, device=scores.device)
            kept = scores[allowed]
            scores.fill_(-torch.inf)
            scores[allowed] = kept

    def _bias(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and what is added to their scores."""
        if self._biases is None:
            ids, values = zip(*self.sampling.logit_bias, strict=True)
            self._biases = (
                torch.tensor(ids, device=scores.device),
                torch.tensor(values, dtype=scores.dtype, device=scores.device),
            )
        return self._biases

    def _closing_ids(self, device: torch.device) -> Tensor:
        """What would end the reply if it came next."""
        state = self.reply.state
        if state not in self._closers:
            found = [token_id for token_id in self.reply.closers if token_id < self._size]
            self._closers[state] = torch.tensor(found, dtype=torch.long, device=device)
        return self._closers[state]

    def _banned_ids(self, device: torch.device) -> Tensor:
        if self._never is None:
            self._never = torch.tensor(self.sampling.banned_ids, device=device)
        return self._never


def _scaled(scores: Tensor, penalty: float) -> Tensor:
    """Less likely by `penalty`, whatever the sign of the score."""
    return torch.where(scores > 0, scores / penalty, scores * penalty)


def _always_adjusts(sampling: Sampling) -> bool:
    neutral = Sampling()
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "end_penalty", "logit_bias", "banned_ids")
    return any(getattr(sampling, name) != getattr(neutral, name) for name in names)


def _check_ids(sampling: Sampling, size: int) -> None:
    named = {"logit_bias": [i for i, _ in sampling.logit_bias], "banned_ids": sampling.banned_ids}
    for name, ids in named.items():
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < size:
                raise BadParameter(name, token_id, f"token ids here go from 0 to {size - 1}")
