"""Token healing: a reply given as text may end inside of what the model would write as one token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

from palaver.phases import Vocabulary


class Healer:
    """Cuts the end off a begun reply that some token of the vocabulary would go beyond."""

    def __init__(self, vocabulary: Vocabulary, control: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._control = frozenset(control)
        words = (data for token_id, data in enumerate(vocabulary) if token_id not in self._control)
        self._words = sorted(set(words))
        self._longest = max(map(len, self._words), default=0)

    def heal(self, ids: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
        """The ids that stay, and the bytes of those cut off, which must be written first."""
        tail, cut, healing = b"", len(ids), b""
        for place in range(len(ids) - 1, -1, -1):
            tail = self._vocabulary[ids[place]] + tail
            if ids[place] in self._control or len(tail) >= self._longest:
                break
            if self._extends(tail):
                cut, healing = place, tail
        return tuple(ids[:cut]), healing

    def _extends(self, tail: bytes) -> bool:
        """Whether some token begins with these bytes and goes on."""
        at = bisect_left(self._words, tail + b"\0")
        return at < len(self._words) and self._words[at].startswith(tail)
