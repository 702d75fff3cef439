"""One reply in the making, as the worker's thread sees it."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import torch
from torch import Tensor

from palaver.engines.core.generation import TorchGeneration
from palaver.engines.core.grammar import AnswerGrammar, ReplyGrammar
from palaver.engines.core.logits_processors import BannedStrings, SpokenText, TokenHealing
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.rng import uniform
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.sampling import Sampling


class LogitsProcessor:
    """The options of one reply and what they have to remember, restored from the tokens said before."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        choice: int,
        reply: ReplyState,
        size: int,
        banned: BannedStrings | None = None,
        guide: AnswerGrammar | ReplyGrammar | None = None,
        unspoken: SpokenText | None = None,
    ) -> None:
        _check_ids(sampling, size)
        self.sampling = sampling
        self.reply = reply
        self._choice = choice
        self._context = prompt.context_ids
        self._banned = banned
        self._guide = guide
        self._unspoken = unspoken
        self._mending: TokenHealing | None = None
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

    def mends(self, mending: TokenHealing | None) -> None:
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


BLOCK = 64
"""Prompts are compared by a hash of everything up to each multiple of so many tokens."""


class SequenceState:
    """The tokens of one generation and how many of them the model has computed."""

    def __init__(
        self, generation: TorchGeneration, chooser: LogitsProcessor, mending: TokenHealing | None = None
    ) -> None:
        self.generation = generation
        self.chooser = chooser
        self._mending = mending
        self._replayed = 0
        self.restored = False
        """Whether the reply is in the state after all tokens said before."""
        self.prompt_tokens = len(generation.prompt)
        self.tokens = [*generation.prompt.context_ids, *generation.prompt.reply_ids]
        self.computed = 0
        self.cached = 0
        self.owner = generation.prompt.owner
        self.space = (generation.prompt.owner, generation.prompt.adapter)
        """What is computed for it is shared within this alone."""
        self.conversation = generation.prompt.conversation
        self.filled = False
        """Whether all of the prompt but its last token has been computed, once."""
        self.kept = False
        """Whether what was computed of its prompt is kept for others."""
        self.logits: Tensor | None = None
        """Those after all of its tokens, where they are known without a pass."""
        self.awaited: SequenceState | None = None
        """While it waits: the running sequence that computes most of what this one lacks."""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    def restore(self, most: int) -> None:
        """Takes up to so many more of the tokens said before."""
        said = self.generation.prompt.reply_ids[self._replayed : self._replayed + most]
        for token_id in said:
            self.chooser.take(token_id)
        self._replayed += len(said)
        if self._replayed == len(self.generation.prompt.reply_ids):
            self.chooser.mends(self._mending)
            self.restored = True

    def common(self, other: SequenceState) -> int:
        """How many prompt tokens both begin with. Takes a few steps even for long prompts."""
        ours, theirs = self._hashes, other._hashes
        blocks = bisect_left(range(min(len(ours), len(theirs))), True, key=lambda block: ours[block] != theirs[block])
        start = blocks * BLOCK
        one = self.tokens[start : min(start + BLOCK, self.prompt_tokens)]
        two = other.tokens[start : min(start + BLOCK, other.prompt_tokens)]
        pairs = zip(one, two, strict=False)
        return start + next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))

    @cached_property
    def _hashes(self) -> list[int]:
        """After each whole block of the prompt, of all tokens so far."""
        hashes: list[int] = []
        for end in range(BLOCK, self.prompt_tokens + 1, BLOCK):
            before = hashes[-1] if hashes else 0
            hashes.append(hash((before, *self.tokens[end - BLOCK : end])))
        return hashes

    def take(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.chooser.take(token_id)
