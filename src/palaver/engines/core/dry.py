"""DRY ("don't repeat yourself"): the penalty of tokens that would prolong a repetition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from palaver.engines.core.logits_changes import Ids, Scores
from palaver.engines.core.token_masks import VocabularyIndex
from palaver.sampling import Sampling

MAX_REPETITION = 128
"""Tokens. A longer repetition has the penalty of this one, which is out of reach for any useful base."""
MAX_PENALTY = 1e30


class DryPenalty:
    """DRY ("don't repeat yourself"): the tokens of one request, and how long a repetition ends at each of them.

    If the last n tokens stood in the text before, the token that followed them there gets the penalty
    `multiplier * base ** (n - allowed_length)`, from `allowed_length` tokens on. A repetition never reaches across a
    sequence breaker."""

    def __init__(self, sampling: Sampling, index: VocabularyIndex, size: int) -> None:
        self._sampling = sampling
        self._index = index
        self._breakers = [text.encode() for text in sampling.dry_sequence_breakers]
        self._breaking = np.zeros(size, dtype=np.bool_)
        """By token id: whether it contains a breaker. Such tokens are never penalised."""
        for breaker in self._breakers:
            containing = index.completions(breaker).containing
            self._breaking[containing[containing < size]] = True
        self._tail = b""
        self._ids: Ids = np.zeros(64, dtype=np.int64)
        self._count = 0
        self._since_break = 0
        """Tokens behind the last sequence breaker."""
        self._ends: Ids = np.zeros(0, dtype=np.int64)
        """Earlier positions of the last token, ascending."""
        self._lengths: Ids = np.zeros(0, dtype=np.int64)
        """How many tokens up to each of these positions are those that the text ends with."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends many tokens at once."""
        self._reserve(len(token_ids))
        self._ids[self._count : self._count + len(token_ids)] = token_ids
        self._count += len(token_ids)
        self._note_breaks(token_ids)
        self._ends, self._lengths = self._compare()

    def append(self, token_id: int) -> None:
        self._reserve(1)
        self._ids[self._count] = token_id
        self._count += 1
        self._note_breaks((token_id,))
        ends = np.flatnonzero(self._ids[: self._count - 1] == token_id)
        before = np.searchsorted(self._ends, ends - 1)
        known = before < len(self._ends)
        known[known] = self._ends[before[known]] == ends[known] - 1
        lengths = np.ones(len(ends), dtype=np.int64)
        lengths[known] += self._lengths[before[known]]
        self._ends, self._lengths = ends, np.minimum(lengths, MAX_REPETITION)

    def penalties(self) -> tuple[Ids, Scores]:
        """Token ids, each once, and what is added to their scores."""
        sampling = self._sampling
        reach = self._count if sampling.dry_penalty_last_n < 0 else min(self._count, sampling.dry_penalty_last_n)
        within = self._ends - (self._count - reach) + 1
        lengths = np.minimum(np.minimum(self._lengths, within), self._since_break)
        repeated = lengths >= sampling.dry_allowed_length
        following, lengths = self._ids[self._ends[repeated] + 1], lengths[repeated]
        free = ~self._breaking[following]
        ids, places = np.unique(following[free], return_inverse=True)
        longest = np.zeros(len(ids), dtype=np.int64)
        np.maximum.at(longest, places, lengths[free])
        growth = np.float64(sampling.dry_base) ** (longest - sampling.dry_allowed_length)
        return ids, -np.minimum(sampling.dry_multiplier * growth, MAX_PENALTY).astype(np.float32)

    def _compare(self) -> tuple[Ids, Ids]:
        """The earlier positions of the last token and the lengths of their repetitions, from the beginning."""
        if self._count < 2:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        ids, last = self._ids[: self._count], self._count - 1
        ends = np.flatnonzero(ids[:last] == ids[last])
        lengths = np.zeros(len(ends), dtype=np.int64)
        matching = np.arange(len(ends))
        for offset in range(min(MAX_REPETITION, last)):
            matching = matching[ends[matching] >= offset]
            matching = matching[ids[ends[matching] - offset] == ids[last - offset]]
            if not len(matching):
                break
            lengths[matching] = offset + 1
        return ends, lengths

    def _note_breaks(self, token_ids: Iterable[int]) -> None:
        longest = max(map(len, self._breakers), default=0)
        for token_id in token_ids:
            text = self._index.vocabulary[token_id] if token_id < len(self._index.vocabulary) else b""
            broken = any(breaker in _end(self._tail, len(breaker) - 1) + text for breaker in self._breakers)
            self._since_break = 0 if broken else self._since_break + 1
            self._tail = _end(self._tail + text, longest)

    def _reserve(self, more: int) -> None:
        if self._count + more > len(self._ids):
            self._ids = np.resize(self._ids, 2 * (self._count + more))


def _end(text: bytes, size: int) -> bytes:
    return text[-size:] if size else b""
