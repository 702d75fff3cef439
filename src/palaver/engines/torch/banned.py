"""Text that is never said: which tokens would complete it, given what was said before."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.phases import Vocabulary

REMEMBERED_IDS = 1 << 22
"""How many token ids are remembered of texts that were looked for."""
REMEMBERED_STATES = 256
"""The same for what a reply has begun of its banned texts."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Completions:
    """How tokens can complete a text: by holding all of it, or from where a part of it was said."""

    whole: Ids
    """Tokens that hold it."""
    rests: tuple[tuple[bytes, Ids], ...]
    """A beginning of the text, and the tokens that begin with all the rest of it."""

    @property
    def size(self) -> int:
        return 1 + len(self.whole) + sum(1 + len(ids) for _, ids in self.rests)


class Spelling:
    """A vocabulary sorted by its bytes: which tokens begin with, or hold, a text. Made once for a model.

    Safe to use from several threads.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        order = sorted((token_id for token_id, text in enumerate(vocabulary) if text), key=vocabulary.__getitem__)
        self._texts = [vocabulary[token_id] for token_id in order]
        self._ids: Ids = np.array(order, dtype=np.int64)
        self._longest = max(map(len, self._texts), default=0)
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(self._texts), dtype=np.uint8)
        """All texts in one piece, and where each of them ends."""
        self._ends = np.cumsum([len(text) for text in self._texts], dtype=np.int64)
        self._frequencies = np.bincount(self._bytes, minlength=256)
        self._known: OrderedDict[bytes, Completions] = OrderedDict()
        self._remembered = 0
        self._lock = threading.Lock()

    def beginning_with(self, text: bytes) -> list[int]:
        return self._beginning_with(text).tolist()

    def spelling_exactly(self, text: bytes) -> list[int]:
        at = bisect_left(self._texts, text)
        end = at
        while end < len(self._texts) and self._texts[end] == text:
            end += 1
        return self._ids[at:end].tolist()

    def completions(self, text: bytes) -> Completions:
        """Remembered by text: a long one takes milliseconds to look up."""
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
                return self._known[text]
        found = Completions(self._holding(text), tuple(self._rests(text)))
        with self._lock:
            if text not in self._known:
                self._known[text] = found
                self._remembered += found.size
            while self._remembered > REMEMBERED_IDS and len(self._known) > 1:
                self._remembered -= self._known.popitem(last=False)[1].size
        return found

    def _beginning_with(self, text: bytes) -> Ids:
        at = bisect_left(self._texts, text)
        if at == len(self._texts) or not self._texts[at].startswith(text):
            return self._ids[:0]
        after = text.rstrip(b"\xff")  # the first text behind all that begin so
        end = bisect_left(self._texts, after[:-1] + bytes([after[-1] + 1])) if after else len(self._texts)
        return self._ids[at:end]

    def _rests(self, text: bytes) -> Iterable[tuple[bytes, Ids]]:
        for size in range(max(1, len(text) - self._longest), len(text)):
            ids = self._beginning_with(text[size:])
            if len(ids):
                yield text[:size], ids

    def _holding(self, text: bytes) -> Ids:
        """Looks at all tokens at once, for the text's rarest byte first."""
        size = len(text)
        if size > self._longest:
            return self._ids[:0]
        wanted = np.frombuffer(text, dtype=np.uint8)
        rarest = int(self._frequencies[wanted].argmin())
        places = np.flatnonzero(self._bytes == wanted[rarest]) - rarest
        places = places[(places >= 0) & (places <= len(self._bytes) - size)]
        for offset, byte in enumerate(wanted):
            if offset != rarest and len(places):
                places = places[self._bytes[places + offset] == byte]
        tokens = self._ends.searchsorted(places, side="right")
        inside = places + size <= self._ends[tokens]
        found: Ids = self._ids[np.unique(tokens[inside])]
        return found


class BannedText:
    """For one reply. Control tokens are no text: they are never banned here and break up what is around them."""

    def __init__(self, strings: Iterable[str], spelling: Spelling, control: frozenset[int]) -> None:
        self._texts = sorted({string.encode() for string in strings})
        self._spelling = spelling
        self._control = control
        self._reach = max((len(text) for text in self._texts), default=0)
        known = [spelling.completions(text) for text in self._texts]
        self._whole: NDArray[np.bool_] = np.zeros(len(spelling.vocabulary), dtype=np.bool_)
        """Of each token, whether it holds a banned text."""
        for completions in known:
            self._whole[completions.whole] = True
        self._rests = [rest for completions in known for rest in completions.rests]
        self._begun = b""
        self._read = 0
        """So many tokens of the reply are in what was begun."""
        self._by_begun: dict[bytes, Tensor] = {}

    def ids(self, said: Sequence[int], device: Any = "cpu") -> Tensor:
        """Tokens that would complete a banned text after these. Quick where the reply has only grown by a token."""
        if len(said) == self._read + 1:
            self._begun = self._after(said[-1])
        elif len(said) != self._read:
            self._begun = self._longest_beginning(self.tail(said))
        self._read = len(said)
        if self._begun not in self._by_begun:
            if len(self._by_begun) >= REMEMBERED_STATES:
                self._by_begun.clear()
            self._by_begun[self._begun] = torch.from_numpy(self._completing()).to(device)
        return self._by_begun[self._begun]

    def tail(self, said: Sequence[int]) -> bytes:
        """As much of what was said as the beginning of a banned text may be in."""
        pieces: list[bytes] = []
        size = 0
        for token_id in reversed(said):
            if token_id in self._control or size >= self._reach:
                break
            pieces.append(self._text(token_id))
            size += len(pieces[-1])
        return b"".join(reversed(pieces))

    def _after(self, token_id: int) -> bytes:
        return b"" if token_id in self._control else self._longest_beginning(self._begun + self._text(token_id))

    def _longest_beginning(self, said: bytes) -> bytes:
        """The longest end of what was said that a banned text begins with."""
        said = said[-self._reach :]
        while said and not self._begins(said):
            said = said[1:]
        return said

    def _begins(self, said: bytes) -> bool:
        at = bisect_left(self._texts, said)
        return at < len(self._texts) and self._texts[at].startswith(said)

    def _completing(self) -> Ids:
        banned = self._whole.copy()
        for beginning, ids in self._rests:
            if self._begun.endswith(beginning):
                banned[ids] = True
        banned[[token_id for token_id in self._control if token_id < len(banned)]] = False
        return np.flatnonzero(banned)

    def _text(self, token_id: int) -> bytes:
        vocabulary = self._spelling.vocabulary
        return vocabulary[token_id] if token_id < len(vocabulary) else b""
