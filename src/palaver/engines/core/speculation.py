"""Speculation: draft tokens are looked up in the text so far and verified in one pass.

The next token of a sequence depends on its text, its settings and its seed alone. So a draft never changes a reply: it
is accepted where it is the token that is sampled anyway, and the tokens behind the first other one are dropped. What
is gained is time, since a pass over a few tokens costs little more than one over a single token."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
"""Tokens that must stand elsewhere in the text for those behind them to be a draft."""
MAX_INDEXED = 16_384
"""Tokens of a prompt that are searched, the last ones."""
DRAFT_LENGTHS = (3, 7, 15)
"""Tokens of a draft: more while whole drafts are accepted. With the token before them a multiple of four rows, which
compiled steps compute together."""
MAX_ROWS = 16
"""Rows of a pass with drafts: a larger pass costs more for each row than it gains."""
WORTH = 2
"""Accepted tokens from which a draft has gained more than it cost."""
MIN_PAUSE, MAX_PAUSE = 4, 128
"""The tokens that a sequence is decoded without drafts after one was rejected."""


class DraftLookup:
    """The drafts of one sequence: what followed the last tokens where they stood before, adapted to its success."""

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` of the sequence, which grow."""
        self._token_ids = token_ids
        self._indexed = max(NGRAM, len(token_ids) - MAX_INDEXED)
        self._following: dict[tuple[int, ...], int] = {}
        """By the tokens before it, the latest position behind them."""
        self._level = 0
        self._rejections = 0
        self._pause = 0

    def propose(self, max_tokens: int) -> Sequence[int]:
        """The tokens that may come next, at most `max_tokens`; none where it is better to do without."""
        if self._pause:
            self._pause -= 1
            return ()
        self._index()
        start = self._following.get(tuple(self._token_ids[-NGRAM:]))
        if start is None:
            return ()
        return self._token_ids[start : start + min(max_tokens, DRAFT_LENGTHS[self._level])]

    def record(self, proposed: int, accepted: int) -> None:
        """Longer drafts after one that was accepted as a whole; a pause, twice as long each time, after a failure."""
        if accepted == proposed:
            self._level, self._rejections = min(self._level + 1, len(DRAFT_LENGTHS) - 1), 0
        elif accepted >= WORTH:
            self._level, self._rejections = max(0, self._level - 1), 0
        else:
            self._level = 0
            self._rejections += accepted == 0
            self._pause = min(MAX_PAUSE, MIN_PAUSE << self._rejections)

    def _index(self) -> None:
        ids = self._token_ids
        for position in range(self._indexed, len(ids)):
            self._following[tuple(ids[position - NGRAM : position])] = position
        self._indexed = max(self._indexed, len(ids))
