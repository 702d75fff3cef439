"""One request in the worker's thread: its tokens, and the logits processor that holds its sampling options."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import torch
from torch import Tensor

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.grammar import AnswerGrammar, ReplyGrammar
from palaver.engines.core.logits_processors import BannedStrings, SpokenText, TokenHealing
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.rng import uniform
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.sampling import Sampling


class LogitsProcessor:
    """Applies the sampling options of one reply to its logits. Its state follows from the reply's tokens."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        choice: int,
        reply: ReplyState,
        vocabulary_size: int,
        banned_strings: BannedStrings | None = None,
        grammar: AnswerGrammar | ReplyGrammar | None = None,
        spoken_text: SpokenText | None = None,
    ) -> None:
        _check_ids(sampling, vocabulary_size)
        self.sampling = sampling
        self.reply = reply
        self._choice = choice
        self._context_ids = prompt.context_ids
        self._banned_strings = banned_strings
        self._grammar = grammar
        self._spoken_text = spoken_text
        self._healing: TokenHealing | None = None
        self._size = vocabulary_size
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._banned_id_tensor: Tensor | None = None
        self._biases: tuple[Tensor, Tensor] | None = None
        self._stop_id_tensors: dict[int, Tensor] = {}
        """By the state of the reply."""
        masks = (banned_strings, grammar, spoken_text)
        self._always_active = _changes_logits(sampling) or any(mask is not None for mask in masks)

    @property
    def do_sample(self) -> bool:
        """Whether the next token is drawn; otherwise it is forced or the likeliest one."""
        return self.sampling.temperature > 0 and self.reply.forced_id is None

    @property
    def is_active(self) -> bool:
        """Whether `apply` would change the next token's scores."""
        return self._always_active or self._is_healing or len(self.reply.token_ids) < self.sampling.min_tokens

    @property
    def _is_healing(self) -> bool:
        return self._healing is not None and bool(self._healing.remaining)

    def start_healing(self, healing: TokenHealing | None) -> None:
        """From the next token on the reply first writes the bytes that were cut off at its seam."""
        self._healing = healing

    def uniform(self) -> float:
        """The random number of the next token."""
        return uniform(self.sampling.seed, self._choice, len(self.reply.token_ids))

    def append_token(self, token_id: int) -> None:
        forced = self.reply.forced_id == token_id
        self.reply.append_token(token_id)
        if self._grammar is not None:
            self._grammar.accept_token(token_id, self.reply, forced)
        if self._healing is not None and self._healing.remaining:
            self._healing.accept_token(token_id)
        if self._counts is not None and self._seen is not None:
            self._counts[token_id] += 1
            self._seen[token_id] = True

    def apply(self, scores: Tensor) -> None:
        """Changes the scores in place. Options that transformers has too are applied in its order."""
        if self._grammar is not None:
            self._grammar.apply_mask(scores, self.reply)
        sampling = self.sampling
        if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
            self._apply_penalties(scores)
        if sampling.end_penalty != 1:
            self._apply_end_penalty(scores)
        if sampling.logit_bias:
            scores.index_add_(0, *self._bias(scores))
        self._apply_bans(scores)

    def _apply_penalties(self, scores: Tensor) -> None:
        counts, seen = self._token_counts(scores.device)
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            scores.copy_(torch.where(seen, _penalised(scores, sampling.repetition_penalty), scores))
        if sampling.presence_penalty:
            scores.sub_(sampling.presence_penalty * (counts > 0))
        if sampling.frequency_penalty:
            scores.sub_(sampling.frequency_penalty * counts)

    def _token_counts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How often each token is in the reply, and whether it is in the context or the reply."""
        if self._counts is None or self._seen is None:
            reply_ids = torch.tensor(self.reply.token_ids, dtype=torch.long, device=device)
            self._counts = torch.bincount(reply_ids, minlength=self._size).to(torch.float32)
            self._seen = self._counts > 0
            self._seen[torch.tensor(self._context_ids, dtype=torch.long, device=device)] = True
        return self._counts, self._seen

    def _apply_end_penalty(self, scores: Tensor) -> None:
        ends = self._stop_ids(scores.device)
        scores[ends] = _penalised(scores[ends], self.sampling.end_penalty)

    def _apply_bans(self, scores: Tensor) -> None:
        if self.sampling.banned_ids:
            scores.index_fill_(0, self._banned_ids(scores.device), -torch.inf)
        if self._banned_strings is not None:
            scores.index_fill_(0, self._banned_strings.banned_ids(self.reply.token_ids, scores.device), -torch.inf)
        if self._spoken_text is not None and not self._is_healing:
            self._spoken_text.apply_mask(scores, self.reply)
        if len(self.reply.token_ids) < self.sampling.min_tokens:
            scores.index_fill_(0, self._stop_ids(scores.device), -torch.inf)
        if self._healing is not None and self._healing.remaining:
            allowed = torch.tensor(self._healing.allowed_ids(), dtype=torch.long, device=scores.device)
            allowed_scores = scores[allowed]
            scores.fill_(-torch.inf)
            scores[allowed] = allowed_scores

    def _bias(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids, and the biases that are added to their scores."""
        if self._biases is None:
            ids, values = zip(*self.sampling.logit_bias, strict=True)
            self._biases = (
                torch.tensor(ids, device=scores.device),
                torch.tensor(values, dtype=scores.dtype, device=scores.device),
            )
        return self._biases

    def _stop_ids(self, device: torch.device) -> Tensor:
        """The token ids that would end the reply now."""
        state = self.reply.state
        if state not in self._stop_id_tensors:
            ids = [token_id for token_id in self.reply.stop_token_ids if token_id < self._size]
            self._stop_id_tensors[state] = torch.tensor(ids, dtype=torch.long, device=device)
        return self._stop_id_tensors[state]

    def _banned_ids(self, device: torch.device) -> Tensor:
        if self._banned_id_tensor is None:
            self._banned_id_tensor = torch.tensor(self.sampling.banned_ids, device=device)
        return self._banned_id_tensor


def _penalised(scores: Tensor, penalty: float) -> Tensor:
    """Less likely by the factor `penalty`, whatever the sign of the score."""
    return torch.where(scores > 0, scores / penalty, scores * penalty)


def _changes_logits(sampling: Sampling) -> bool:
    neutral = Sampling()
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "end_penalty", "logit_bias", "banned_ids")
    return any(getattr(sampling, name) != getattr(neutral, name) for name in names)


def _check_ids(sampling: Sampling, size: int) -> None:
    ids_by_option = {"logit_bias": [i for i, _ in sampling.logit_bias], "banned_ids": sampling.banned_ids}
    for name, ids in ids_by_option.items():
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < size:
                raise BadParameter(name, token_id, f"token ids here go from 0 to {size - 1}")


BLOCK_SIZE = 64
"""Prompts are compared by hashes of their prefixes, one at each multiple of this many tokens."""


class SequenceState:
    """The tokens of one request, and how many of them the model has computed."""

    def __init__(
        self, generation: LocalGeneration, processor: LogitsProcessor, healing: TokenHealing | None = None
    ) -> None:
        self.generation = generation
        self.processor = processor
        self._healing = healing
        self._replayed = 0
        self.restored = False
        """Whether the processor has seen all tokens of a continued reply."""
        self.prompt_tokens = len(generation.prompt)
        self.token_ids = [*generation.prompt.context_ids, *generation.prompt.reply_ids]
        self.computed_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens that came from the prefix cache."""
        self.owner = generation.prompt.owner
        self.space = (generation.prompt.owner, generation.prompt.adapter)
        """Cached prefixes are shared only between sequences of the same space."""
        self.conversation = generation.prompt.conversation
        self.prefilled = False
        """Whether the prompt, except for its last token, has been computed once."""
        self.prompt_cached = False
        """Whether the prompt is in the prefix cache."""
        self.cached_logits: Tensor | None = None
        """The logits after all tokens, if the prefix cache had them."""
        self.waits_for: SequenceState | None = None
        """While waiting: the running sequence that computes most of the tokens this one lacks."""

    @property
    def pending_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    def restore(self, max_tokens: int) -> None:
        """Replays up to `max_tokens` more tokens of a continued reply."""
        reply_ids = self.generation.prompt.reply_ids[self._replayed : self._replayed + max_tokens]
        for token_id in reply_ids:
            self.processor.append_token(token_id)
        self._replayed += len(reply_ids)
        if self._replayed == len(self.generation.prompt.reply_ids):
            self.processor.start_healing(self._healing)
            self.restored = True

    def common_prefix(self, other: SequenceState) -> int:
        """How many prompt tokens both begin with. Takes a few comparisons even for long prompts."""
        ours, theirs = self._prefix_hashes, other._prefix_hashes
        blocks = bisect_left(range(min(len(ours), len(theirs))), True, key=lambda block: ours[block] != theirs[block])
        start = blocks * BLOCK_SIZE
        one = self.token_ids[start : min(start + BLOCK_SIZE, self.prompt_tokens)]
        two = other.token_ids[start : min(start + BLOCK_SIZE, other.prompt_tokens)]
        pairs = zip(one, two, strict=False)
        return start + next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))

    @cached_property
    def _prefix_hashes(self) -> list[int]:
        """One hash for each whole block of the prompt, over all tokens up to its end."""
        hashes: list[int] = []
        for end in range(BLOCK_SIZE, self.prompt_tokens + 1, BLOCK_SIZE):
            before = hashes[-1] if hashes else 0
            hashes.append(hash((before, *self.token_ids[end - BLOCK_SIZE : end])))
        return hashes

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.processor.append_token(token_id)
