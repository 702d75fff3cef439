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

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    def take(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.chooser.take(token_id)
