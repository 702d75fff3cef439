"""A small model that drafts the next tokens of a large one. It has a runner of its own, and with that a prefix cache. A
draft is what it finds likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.kv_cache import common_prefix_length
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import HEADROOM, AheadPass, Runner
from palaver.engines.core.sampler import Logits
from palaver.errors import CacheFull, PalaverError
from palaver.generation import Prompt
from palaver.sampling import Sampling

CHUNK = 128
"""Tokens of a prompt that it computes in a step: the replies that run wait for it."""
UNKNOWN = 0
"""The token in place of those that only the large model has."""
GREEDY = Sampling(temperature=0)


@dataclass(slots=True)
class _Text:
    """What the draft model has of a sequence."""

    own: SequenceState
    """For its runner: the tokens of the sequence, and behind them those that were drafted last."""
    confirmed: int
    """The first tokens that both are known to have."""

    def follow(self, token_ids: Sequence[int], shared_tokens: int) -> None:
        """Takes over the tokens of the sequence, and drops what it has gone on without."""
        own, new = self.own, _known(token_ids[self.confirmed :], shared_tokens)
        drafted = own.token_ids[self.confirmed :]
        same = self.confirmed + common_prefix_length(drafted, new)
        own.computed_tokens = min(own.computed_tokens, same, len(token_ids) - 1)
        own.token_ids[self.confirmed :] = new
        self.confirmed = len(token_ids)


class RunnerDraftModel:
    """A `DraftModel` over any runner."""

    def __init__(self, runner: Runner, context_length: int, vocabulary_size: int, shared_tokens: int) -> None:
        """`context_length`, `vocabulary_size`: of the draft model. `shared_tokens`: the first of its vocabulary, which
        are those of the large model. Each may have further ones."""
        self._runner = runner
        self._context_length = context_length
        self._vocabulary_size = vocabulary_size
        self._shared_tokens = min(vocabulary_size, shared_tokens)
        self._texts: dict[SequenceState, _Text | None] = {}
        """None for those that there is no memory for."""

    @property
    def statistics(self) -> CacheStatistics:
        return self._runner.statistics

    def propose(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts of at most so many tokens. Empty where more than a chunk of earlier tokens is still to be computed."""
        wanted = {one: length for one, length in zip(sequences, lengths, strict=True) if length > 0}
        drafts: dict[SequenceState, list[int]] = {one: [] for one in sequences}
        following, logits = self._compute([one for one in wanted if self._follows(one)])
        for number in range(1, max(wanted.values(), default=0) + 1):
            if logits is None:
                break
            ahead = self._ahead(following) if number < max(wanted[one] for one in following) else None
            tokens = self._sample(following, logits, ahead)
            for one, token_id in tokens.items():
                drafts[one].append(token_id)
            following = [one for one in following if one in tokens]
            if ahead is None or ahead.logits is None:
                following, logits = self._compute([one for one in following if number < wanted[one]])
            else:
                logits = None if ahead.dropped else ahead.logits
        return [self._shared(drafts[one])[: wanted.get(one, 0)] for one in sequences]

    def release(self, sequence: SequenceState) -> None:
        text = self._texts.pop(sequence, None)
        if text is not None:
            text.follow(sequence.token_ids, self._shared_tokens)
            self._runner.release(text.own)

    def forget(self, conversation: str) -> None:
        self._runner.forget(conversation)

    def _follows(self, sequence: SequenceState) -> bool:
        """Brings what it has of the sequence up to date. Returns False for sequences that get no drafts."""
        ids = sequence.token_ids
        if len(ids) + HEADROOM > self._context_length or sequence.prefix_keys is not ids:  # it does not see media
            return False
        if sequence not in self._texts:
            self._texts[sequence] = self._begin(sequence)
        text = self._texts[sequence]
        if text is not None:
            text.follow(ids, self._shared_tokens)
        return text is not None

    def _begin(self, sequence: SequenceState) -> _Text | None:
        prompt, ids = sequence.generation.prompt, _known(sequence.token_ids, self._shared_tokens)
        prompt = Prompt(tuple(ids), owner=prompt.owner, adapter=prompt.adapter, conversation=prompt.conversation)
        reply = ReplyState(prompt, GREEDY, vocabulary=())
        processor = LogitsProcessor(prompt, GREEDY, 0, reply, self._vocabulary_size)
        own = SequenceState(LocalGeneration(prompt, GREEDY, 0, lambda _: None), processor)
        try:
            self._runner.allocate(own)
        except CacheFull:
            return None
        return _Text(own, len(ids))

    def _compute(self, sequences: Sequence[SequenceState]) -> tuple[list[SequenceState], Logits | None]:
        """Computes the next tokens of each, at most a chunk. Returns those that it has all tokens of, and their
        logits."""
        if not sequences:
            return [], None
        own = [self._own(one) for one in sequences]
        counts = [min(CHUNK, one.pending_tokens, self._runner.max_chunk(one) or CHUNK) for one in own]
        try:
            logits = self._runner.run(own, counts)
        except CacheFull:
            self._drop(sequences[-1])
            return self._compute(sequences[:-1])
        rows = [row for row, one in enumerate(own) if not one.pending_tokens]
        if not rows:
            return [], None
        return [sequences[row] for row in rows], logits if len(rows) == len(own) else logits.select(rows)

    def _sample(
        self, sequences: Sequence[SequenceState], logits: Logits, ahead: AheadPass | None
    ) -> dict[SequenceState, int]:
        """The likeliest next token of each, which its text goes on with."""
        steps = logits.sample([self._own(one).processor for one in sequences], ahead)
        found = {}
        for one, step in zip(sequences, steps, strict=True):
            if not isinstance(step, PalaverError):
                found[one] = step.token_id
                self._own(one).token_ids.append(step.token_id)
        return found

    def _shared(self, draft: list[int]) -> list[int]:
        """Up to the first token that the large model lacks."""
        return list(takewhile(lambda token_id: token_id < self._shared_tokens, draft))

    def _ahead(self, sequences: Sequence[SequenceState]) -> AheadPass | None:
        """The pass over the next token of each, where the runner starts it before the host has read them."""
        run_ahead = self._runner.run_ahead
        return None if run_ahead is None else AheadPass(run_ahead, [self._own(one) for one in sequences], [])

    def _own(self, sequence: SequenceState) -> SequenceState:
        text = self._texts[sequence]
        assert text is not None
        return text.own

    def _drop(self, sequence: SequenceState) -> None:
        """There is no room for it: it gets no drafts any more."""
        text, self._texts[sequence] = self._texts[sequence], None
        if text is not None:
            self._runner.release(text.own)


def _known(token_ids: Sequence[int], shared_tokens: int) -> list[int]:
    return [token_id if token_id < shared_tokens else UNKNOWN for token_id in token_ids]
