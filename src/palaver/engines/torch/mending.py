"""Healing a seam: a reply begun as text may end inside a token, so its last bytes are written again, by any tokens."""

from __future__ import annotations

from palaver.engines.torch.banned import Spelling


class Mending:
    """The bytes that a reply has to write first. Control tokens spell nothing here."""

    def __init__(self, healing: bytes, spelling: Spelling, control: frozenset[int]) -> None:
        self.left = healing
        self._spelling = spelling
        self._control = control

    def allowed(self) -> list[int]:
        """Tokens that write a beginning of what is left, or all of it and go on."""
        found = set(self._spelling.beginning_with(self.left))
        for size in range(1, len(self.left)):
            found.update(self._spelling.spelling_exactly(self.left[:size]))
        return sorted(found - self._control)

    def take(self, token_id: int) -> None:
        written = self._spelling.vocabulary[token_id]
        self.left = self.left[len(written) :] if self.left.startswith(written) else b""
