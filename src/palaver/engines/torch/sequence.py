"""One reply in the making, as the worker's thread sees it."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

from torch import Tensor

from palaver.engines.torch.chooser import Chooser
from palaver.engines.torch.generation import Generation
from palaver.engines.torch.mending import Mending

BLOCK = 64
"""Prompts are compared by a hash of everything up to each multiple of so many tokens."""


class Sequence:
    """The tokens of one generation and how many of them the model has computed."""

    def __init__(self, generation: Generation, chooser: Chooser, mending: Mending | None = None) -> None:
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
        self.awaited: Sequence | None = None
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

    def common(self, other: Sequence) -> int:
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
