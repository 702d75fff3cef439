"""Requests in the worker's thread: the tokens of each, and the split of a step's prefill budget between prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.media import ProcessedMedia, integer_keys, prefix_keys
from palaver.engines.core.sampler import Logits
from palaver.engines.core.speculation import DraftLookup
from palaver.engines.core.token_masks import TokenHealing

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
        media = generation.prompt.media
        self.prefix_keys: list[Any] = prefix_keys(self.token_ids, media) if media else self.token_ids
        """What stands at each position, for the prefix cache: the token ids, or keys of media."""
        self.media: dict[str, ProcessedMedia] = {}
        """The media that are not computed yet, by key. The runner sets them."""
        self.unsplit: tuple[tuple[int, int], ...] = ()
        """Starts and ends of tokens that must be computed in one pass, because they see each other."""
        self.computed_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens that came from the prefix cache."""
        self.owner = generation.prompt.owner
        self.space = (generation.prompt.owner, generation.prompt.adapter)
        """Cached prefixes are shared only between sequences of the same space."""
        self.conversation = generation.prompt.conversation
        self.replays = False
        """Whether tokens of the reply that are not in the cache are computed one at a time, as they were generated."""
        self.prefilled = False
        """Whether the prompt, except for its last token, has been computed once."""
        self.prompt_cached = False
        """Whether the prompt is in the prefix cache."""
        self.cached_logits: Logits | None = None
        """The logits after all tokens, a batch of one row, if the prefix cache had them."""
        self.drafts: DraftLookup | None = None
        """Where drafts are verified: what it has to offer as one."""
        self.waits_for: SequenceState | None = None
        """While waiting: the running sequence that computes most of the tokens this one lacks."""

    @property
    def integer_keys(self) -> list[int]:
        """The prefix keys of all tokens, as integers."""
        return self.token_ids if self.prefix_keys is self.token_ids else integer_keys(self.prefix_keys)

    @property
    def pending_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def prefill_tokens(self) -> int:
        """How many of the pending tokens are computed in chunks, before the others are decoded one by one."""
        if self.replays:
            return max(0, len(self.generation.prompt.context_ids) - self.computed_tokens)
        return max(0, self.pending_tokens - 1)

    def start(self, max_replayed: int) -> None:
        """Call once its memory is allocated. `max_replayed`: as in `Runner`."""
        replayed = len(self.token_ids) - max(self.computed_tokens, len(self.generation.prompt.context_ids))
        self.replays = 1 < replayed <= max_replayed

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
        one = self.prefix_keys[start : min(start + BLOCK_SIZE, self.prompt_tokens)]
        two = other.prefix_keys[start : min(start + BLOCK_SIZE, other.prompt_tokens)]
        pairs = zip(one, two, strict=False)
        return start + next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))

    @cached_property
    def _prefix_hashes(self) -> list[int]:
        """One hash for each whole block of the prompt, over all tokens up to its end."""
        hashes: list[int] = []
        for end in range(BLOCK_SIZE, self.prompt_tokens + 1, BLOCK_SIZE):
            before = hashes[-1] if hashes else 0
            hashes.append(hash((before, *self.prefix_keys[end - BLOCK_SIZE : end])))
        return hashes

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.prefix_keys is not self.token_ids:
            self.prefix_keys.append(token_id)
        self.processor.append_token(token_id)


MaxChunk = Callable[[SequenceState], int | None]


def split_prefill_budget(
    prefilling: Sequence[SequenceState], budget: int, max_chunk: MaxChunk
) -> list[tuple[SequenceState, int]]:
    """How many prompt tokens of each sequence a step computes.

    The oldest sequence gets at least half of the budget, so that it completes; the shortest ones get the rest first.
    """
    if not prefilling:
        return []
    oldest = prefilling[0]
    shares = {oldest: min(oldest.prefill_tokens, max(1, budget // 2))}
    left = budget - shares[oldest]
    for sequence in [*sorted(prefilling[1:], key=lambda s: s.prefill_tokens), oldest]:
        if left > 0:
            more = min(sequence.prefill_tokens - shares.get(sequence, 0), left)
            shares[sequence] = shares.get(sequence, 0) + more
            left -= more
    return [(sequence, _chunk_size(count, sequence, max_chunk)) for sequence, count in shares.items() if count > 0]


def _chunk_size(count: int, sequence: SequenceState, max_chunk: MaxChunk) -> int:
    """A runner's limit replaces the budget: a model may need its prompt in one piece, or one token at a time."""
    limit = max_chunk(sequence)
    count = count if limit is None else min(limit, sequence.prefill_tokens)
    return align_chunk(sequence.computed_tokens, count, sequence.unsplit)


def align_chunk(start: int, count: int, unsplit: Sequence[tuple[int, int]]) -> int:
    """The size of a chunk that ends inside of no unsplit tokens: it ends before them or, if it starts with them, after
    them."""
    for first, end in unsplit:
        if first < start + count < end:
            return first - start if first > start else end - start
    return count
