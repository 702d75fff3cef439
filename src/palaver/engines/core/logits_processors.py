"""Text that is never said: which tokens would complete it, given what was said before."""

from __future__ import annotations

import re
import threading
import unicodedata
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.reply_state import ReplyState
from palaver.phases import Phase, Phases, State, Vocabulary

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


class VocabularyIndex:
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


class BannedStrings:
    """For one reply. Control tokens are no text: they are never banned here and break up what is around them."""

    def __init__(self, strings: Iterable[str], spelling: VocabularyIndex, control: frozenset[int]) -> None:
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


_MARKS = frozenset('*#`~_^|\\/<>=&@()[]{}"')
_OTHERS = frozenset("“”„‟‘‚‛«»‹›「」『』〝〞〟〈〉《》【】〔〕〖〗〘〙〚〛•‣◦▪▫●○■□◆◇★☆※")
"""Marks without a plain form. The apostrophe is none of them."""
_WIDE_FORMS = (range(0x80, 0x10000), range(0x1F100, 0x1F200))


@cache
def unspeakable_characters() -> frozenset[str]:
    """Marks of Markdown and of code, brackets and quotation marks, in all their forms: full-width, small, enclosed."""
    return _MARKS | _OTHERS | {chr(code) for codes in _WIDE_FORMS for code in codes if _is_a_form(chr(code))}


def _is_a_form(character: str) -> bool:
    return not _MARKS.isdisjoint(unicodedata.normalize("NFKC", character))


_KEPT = 64
"""How many sets of tokens are remembered; a model's format has only a few states."""


class ExitMarkers(NamedTuple):
    """The text that leads out of a state: at its beginning, and after something visible was said."""

    first: tuple[bytes, ...]
    after: tuple[bytes, ...]


class UnspeakableTokens:
    """A vocabulary's tokens that are unfit for speech. Made once for a model."""

    def __init__(self, spelling: VocabularyIndex) -> None:
        self.spelling = spelling
        unfit = [character.encode() for character in unspeakable_characters()]
        self._pattern = re.compile(b"|".join(map(re.escape, unfit)))
        self._ids = [i for i, text in enumerate(spelling.vocabulary) if self._pattern.search(text)]
        self._rests = _rests(unfit)
        self._completing: dict[bytes, list[int]] = {}
        self._banned: dict[tuple[ExitMarkers, frozenset[int], int], Tensor] = {}

    def banned(self, markers: ExitMarkers, control: frozenset[int], size: int) -> Tensor:
        """All but control tokens and those that begin a marker."""
        key = (markers, control, size)
        if key not in self._banned:
            if len(self._banned) >= _KEPT:
                self._banned.clear()
            text = self.spelling.vocabulary
            found = [i for i in self._ids if i < size and i not in control and not self._begins(text[i], markers)]
            self._banned[key] = torch.tensor(found, dtype=torch.long)
        return self._banned[key]

    def completing(self, tail: bytes) -> list[int]:
        """Tokens that complete an unfit character which the text has begun: some are written byte by byte."""
        for size in range(1, min(len(tail), 3) + 1):
            begun = tail[-size:]
            if begun in self._rests:
                if begun not in self._completing:
                    rests = self._rests[begun]
                    self._completing[begun] = [i for rest in rests for i in self.spelling.beginning_with(rest)]
                return self._completing[begun]
        return []

    def holds(self, text: bytes) -> bool:
        return self._pattern.search(text) is not None

    def _begins(self, text: bytes, markers: ExitMarkers) -> bool:
        """Whether all that is unfit in the text belongs to a marker, whole or begun."""
        unfit = self._pattern.search(text)
        assert unfit is not None
        for at in range(unfit.start() + 1):
            rest, where = text[at:], markers.after if text[:at].strip() else markers.first
            if any(marker.startswith(rest) or rest.startswith(marker) for marker in where):
                return True
        return False


class SpokenText:
    """For one reply."""

    def __init__(self, phases: Phases, control: frozenset[int], tokens: UnspeakableTokens) -> None:
        self._phases = phases
        self._control = control
        self._tokens = tokens
        self._banned: dict[int, Tensor] = {}
        """By state."""

    def forbid(self, scores: Tensor, reply: ReplyState) -> None:
        state = self._phases.states[reply.state]
        if not self._is_spoken(state):
            return
        if self._tokens.holds(reply.held):
            self._go_on(scores, state, reply.held)
            return
        scores.index_fill_(0, self._ids(reply.state, scores), -torch.inf)
        tail = self._tail(reply.ids)
        if tail and tail[-1] >= 0x80 and (completing := self._tokens.completing(tail)):
            scores[[i for i in completing if i < scores.shape[0]]] = -torch.inf

    def _ids(self, place: int, scores: Tensor) -> Tensor:
        if place not in self._banned:
            markers = self._markers(self._phases.states[place])
            found = self._tokens.banned(markers, self._control, scores.shape[0])
            self._banned[place] = found.to(scores.device)
        return self._banned[place]

    def _is_spoken(self, state: State) -> bool:
        """Whether what is said now is answer, or becomes answer where it is no marker."""
        if state.phase is Phase.CONTROL and state.other is not None:
            return self._phases.states[state.other].phase is Phase.ANSWER
        return state.phase is Phase.ANSWER

    def _markers(self, state: State) -> ExitMarkers:
        after = state if state.other is None else self._phases.states[state.other]
        return ExitMarkers(_texts(state), _texts(after))

    def _go_on(self, scores: Tensor, state: State, held: bytes) -> None:
        """What is held back is unfit as text, so it must become the marker that it has begun."""
        rests = [marker[len(held) :] for marker in _texts(state) if marker.startswith(held)]
        spelling = self._tokens.spelling
        allowed = {i for rest in rests for i in spelling.beginning_with(rest)}
        begun = (rest[:size] for rest in rests for size in range(1, len(rest)))
        allowed.update(i for text in begun for i in spelling.spelling_exactly(text))
        kept = torch.tensor(sorted(i for i in allowed - self._control if i < scores.shape[0]), dtype=torch.long)
        values = scores[kept]
        scores.fill_(-torch.inf)
        scores[kept] = values

    def _tail(self, said: Sequence[int]) -> bytes:
        """The last bytes of text, as many as a character may have begun with."""
        tail = b""
        vocabulary = self._tokens.spelling.vocabulary
        for token_id in reversed(said):
            if len(tail) >= 3 or token_id in self._control or token_id >= len(vocabulary):
                break
            tail = vocabulary[token_id] + tail
        return tail


def _texts(state: State) -> tuple[bytes, ...]:
    return tuple(trigger.marker for trigger in state.triggers if isinstance(trigger.marker, bytes))


def _rests(characters: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """What is left of each character, by how it begins."""
    found: dict[bytes, list[bytes]] = {}
    for character in characters:
        for size in range(1, len(character)):
            found.setdefault(character[:size], []).append(character[size:])
    return found


class TokenHealing:
    """The bytes that a reply has to write first. Control tokens spell nothing here."""

    def __init__(self, healing: bytes, spelling: VocabularyIndex, control: frozenset[int]) -> None:
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
