"""Text that is never said: which tokens would complete it, given what was said before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from palaver.phases import Vocabulary


class Spelling:
    """A vocabulary sorted by its bytes: which tokens begin with, or hold, a text. Made once for a model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._order = sorted((text, token_id) for token_id, text in enumerate(vocabulary) if text)

    def beginning_with(self, text: bytes) -> list[int]:
        at = bisect_left(self._order, (text, -1))
        found = []
        while at < len(self._order) and self._order[at][0].startswith(text):
            found.append(self._order[at][1])
            at += 1
        return found

    def spelling_exactly(self, text: bytes) -> list[int]:
        at = bisect_left(self._order, (text, -1))
        found = []
        while at < len(self._order) and self._order[at][0] == text:
            found.append(self._order[at][1])
            at += 1
        return found

    def holding(self, text: bytes) -> list[int]:
        return [token_id for spelled, token_id in self._order if text in spelled]


class BannedText:
    """For one reply. Control tokens are no text: they are never banned here and break up what is around them."""

    def __init__(self, strings: Iterable[str], spelling: Spelling, control: frozenset[int]) -> None:
        self._texts = [string.encode() for string in strings]
        self._spelling = spelling
        self._control = control
        self._reach = max((len(text) for text in self._texts), default=0)
        self._whole = {i for text in self._texts for i in spelling.holding(text)} - control

    def ids(self, said: Sequence[int]) -> list[int]:
        """Tokens that would complete a banned text after these."""
        tail = self.tail(said)
        found = set(self._whole)
        for text in self._texts:
            for size in range(1, min(len(text), len(tail) + 1)):
                if tail.endswith(text[:size]):
                    found.update(self._spelling.beginning_with(text[size:]))
        return sorted(found - self._control)

    def tail(self, said: Sequence[int]) -> bytes:
        """As much of what was said as the beginning of a banned text may be in."""
        tail = b""
        for token_id in reversed(said):
            if token_id in self._control or len(tail) >= self._reach:
                break
            if token_id < len(self._spelling.vocabulary):
                tail = self._spelling.vocabulary[token_id] + tail
        return tail
