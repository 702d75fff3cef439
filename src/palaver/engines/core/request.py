"""One request in the worker's thread: its tokens, and how many of them are computed."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.logits import Logits
from palaver.engines.core.logits_processors import TokenHealing
from palaver.engines.core.processor import LogitsProcessor

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
        self.cached_logits: Logits | None = None
        """The logits after all tokens, a batch of one row, if the prefix cache had them."""
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
