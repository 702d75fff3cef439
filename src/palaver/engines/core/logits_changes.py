"""What the options of one reply change in its next logits, as arrays: applied here to a row in the host's memory, and
by a runner to a whole batch where its logits are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Scores: TypeAlias = NDArray[np.float32]


class TokenMask:
    """A set of token ids: a bit for each token of the vocabulary."""

    def __init__(self, size: int, bits: bytes | None = None) -> None:
        """`size`: of the vocabulary. `bits`: the lowest bit first; missing ones are 0."""
        self.size = size
        self.bits: NDArray[np.uint8] = np.zeros(-(-size // 8), dtype=np.uint8)
        if bits is not None:
            count = min(len(bits), len(self.bits))
            self.bits[:count] = np.frombuffer(bits, dtype=np.uint8, count=count)

    @classmethod
    def of(cls, bools: Mask) -> TokenMask:
        """By token id, whether it is in the set."""
        return cls(len(bools), np.packbits(bools, bitorder="little").tobytes())

    @classmethod
    def without(cls, size: int, ids: Iterable[int]) -> TokenMask:
        """All tokens but these."""
        bools = np.ones(size, dtype=np.bool_)
        bools[[token_id for token_id in ids if token_id < size]] = False
        return cls.of(bools)

    def add(self, ids: Iterable[int]) -> None:
        """Ids beyond the vocabulary are ignored."""
        for token_id in ids:
            if token_id < self.size:
                self.bits[token_id >> 3] |= 1 << (token_id & 7)

    def intersect(self, other: TokenMask) -> None:
        self.bits &= other.bits

    def any(self) -> bool:
        return bool(self.bits.any())

    def to_bools(self) -> Mask:
        return np.unpackbits(self.bits, count=self.size, bitorder="little").view(np.bool_)


class TokenCounts:
    """How often each token is in a reply, and which ones are in its context or the reply."""

    def __init__(self, context_ids: Sequence[int], reply_ids: list[int], size: int) -> None:
        """`reply_ids` is the reply's own list, which grows; call `append` for each token that it gains."""
        self.context_ids: Ids = np.unique(np.array(context_ids, dtype=np.int64))
        self.reply_ids = reply_ids
        self.counts: Scores = np.bincount(np.array(reply_ids, dtype=np.int64), minlength=size).astype(np.float32)
        """By token id, in the reply."""
        self._seen: Mask = self.counts > 0
        self._replied = _GrowingIds(np.flatnonzero(self._seen))
        self._seen[self.context_ids] = True
        self._seen_ids = _GrowingIds(np.flatnonzero(self._seen))

    def append(self, token_id: int) -> None:
        if self.counts[token_id] == 0:
            self._replied.append(token_id)
        self.counts[token_id] += 1
        if not self._seen[token_id]:
            self._seen[token_id] = True
            self._seen_ids.append(token_id)

    @property
    def seen_ids(self) -> Ids:
        """The tokens of the context and the reply, each once."""
        return self._seen_ids.array

    @property
    def unique_reply_ids(self) -> Ids:
        return self._replied.array


class _GrowingIds:
    """An array of token ids that grows at its end."""

    def __init__(self, ids: Ids) -> None:
        self._memory: Ids = np.resize(ids, len(ids) + 64) if len(ids) else np.zeros(64, dtype=np.int64)
        self._count = len(ids)

    def append(self, token_id: int) -> None:
        if self._count == len(self._memory):
            self._memory = np.resize(self._memory, 2 * self._count)
        self._memory[self._count] = token_id
        self._count += 1

    @property
    def array(self) -> Ids:
        return self._memory[: self._count]


@dataclass(slots=True)
class LogitsChanges:
    """Applied in the order of the fields. Options that transformers has too come in its order."""

    size: int
    """Of the vocabulary."""
    counts: TokenCounts | None = None
    """Set if one of the three penalties applies."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetitions: tuple[Ids, Scores] | None = None
    """The penalties of DRY: token ids, each once, and what is added to their scores."""
    end_ids: Ids | None = None
    end_penalty: float = 1.0
    bias: tuple[Ids, Scores] | None = None
    """Token ids, each once, and what is added to their scores."""
    banned_always: Ids | None = None
    """The same for every token of the reply."""
    banned: list[Ids] = field(default_factory=list)
    allowed: TokenMask | None = None
    """None if all are allowed that are not banned."""

    @property
    def all_banned(self) -> list[Ids]:
        return self.banned if self.banned_always is None else [self.banned_always, *self.banned]

    def ban(self, ids: Iterable[int]) -> None:
        """Ids beyond the vocabulary are ignored."""
        self.banned.append(self._within(ids))

    def allow_only(self, mask: TokenMask) -> None:
        """Forbids all tokens outside of the mask, and those outside of earlier masks. Takes the mask over."""
        if self.allowed is not None:
            mask.intersect(self.allowed)
        self.allowed = mask

    def allow_only_ids(self, ids: Iterable[int]) -> None:
        mask = TokenMask(self.size)
        mask.add(ids)
        self.allow_only(mask)

    def _within(self, ids: Iterable[int]) -> Ids:
        return np.array([token_id for token_id in ids if token_id < self.size], dtype=np.int64)

    def apply(self, scores: Scores) -> None:
        """Changes a row of scores in place."""
        if self.counts is not None:
            self._apply_penalties(scores, self.counts)
        if self.repetitions is not None:
            ids, values = self.repetitions
            scores[ids] += values
        if self.end_ids is not None:
            scores[self.end_ids] = _penalised(scores[self.end_ids], self.end_penalty)
        if self.bias is not None:
            ids, values = self.bias
            scores[ids] += values
        for ids in self.all_banned:
            scores[ids] = -np.inf
        if self.allowed is not None:
            np.copyto(scores, -np.inf, where=~self.allowed.to_bools())

    def _apply_penalties(self, scores: Scores, counts: TokenCounts) -> None:
        if self.repetition_penalty != 1:
            ids = counts.seen_ids
            scores[ids] = _penalised(scores[ids], self.repetition_penalty)
        ids = counts.unique_reply_ids
        if self.presence_penalty:
            scores[ids] -= np.float32(self.presence_penalty)
        if self.frequency_penalty:
            scores[ids] -= np.float32(self.frequency_penalty) * counts.counts[ids]


def _penalised(scores: Scores, penalty: float) -> Scores:
    """Less likely by the factor `penalty`, whatever the sign of the score."""
    factor = np.float32(penalty)
    return np.where(scores > 0, scores / factor, scores * factor)
