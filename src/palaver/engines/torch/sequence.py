"""One reply in the making, as the worker's thread sees it."""

from __future__ import annotations

from palaver.engines.torch.chooser import Chooser
from palaver.engines.torch.generation import Generation


class Sequence:
    """The tokens of one generation and how many of them the model has computed."""

    def __init__(self, generation: Generation, chooser: Chooser) -> None:
        self.generation = generation
        self.chooser = chooser
        self.prompt_tokens = len(generation.prompt)
        self.tokens = [*generation.prompt.context_ids, *generation.prompt.reply_ids]
        self.computed = 0
        self.cached = 0
        self.space = (generation.prompt.owner, generation.prompt.adapter)
        """What is computed for it is shared within this alone."""
        self.conversation = generation.prompt.conversation
        self.filled = False
        """Whether all of the prompt but its last token has been computed, once."""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    def common(self, other: Sequence) -> int:
        """How many tokens both begin with."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(other.tokens)))

    def take(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.chooser.take(token_id)
