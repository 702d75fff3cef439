"""Masks over the logits of one reply: banned strings, characters unfit for speech, and token healing.

All of them find tokens by their text, through one sorted index of the vocabulary."""

from __future__ import annotations

import re
import threading
import unicodedata
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from palaver.engines.core.logits_changes import Ids, LogitsChanges, Mask
from palaver.engines.core.reply_state import ReplyState
from palaver.phases import Phase, Phases, State, Vocabulary

MAX_CACHED_IDS = 1 << 22
"""Token ids that the cache of completions may hold."""
MAX_CACHED_PREFIXES = 256
"""Sets of banned ids that one reply caches, by the banned prefix it ends with."""
MAX_CACHED_STATES = 64
"""Sets of unspeakable ids that are cached; a model's format has only a few states."""


@dataclass(frozen=True, slots=True)
class Completions:
    """The tokens that can complete a text: those that contain it, and those that continue a part of it."""

    containing: Ids
    """Tokens that contain the whole text."""
    by_prefix: tuple[tuple[bytes, Ids], ...]
    """Prefixes of the text, each with the tokens that begin with the rest of it."""

    @property
    def size(self) -> int:
        return 1 + len(self.containing) + sum(1 + len(ids) for _, ids in self.by_prefix)


class VocabularyIndex:
    """A vocabulary sorted by its bytes: finds the tokens that begin with, equal or contain a text. Made once a model.

    Safe to use from several threads.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        order = sorted((token_id for token_id, text in enumerate(vocabulary) if text), key=vocabulary.__getitem__)
        self._texts = [vocabulary[token_id] for token_id in order]
        self._ids: Ids = np.array(order, dtype=np.int64)
        self._longest = max(map(len, self._texts), default=0)
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(self._texts), dtype=np.uint8)
        """All texts, concatenated."""
        self._ends = np.cumsum([len(text) for text in self._texts], dtype=np.int64)
        """Where each text ends in `_bytes`."""
        self._frequencies = np.bincount(self._bytes, minlength=256)
        self._cache: OrderedDict[bytes, Completions] = OrderedDict()
        self._cached_ids = 0
        self._lock = threading.Lock()

    def starting_with(self, text: bytes) -> list[int]:
        return self._starting_with(text).tolist()

    def equal_to(self, text: bytes) -> list[int]:
        start = bisect_left(self._texts, text)
        end = start
        while end < len(self._texts) and self._texts[end] == text:
            end += 1
        return self._ids[start:end].tolist()

    def completions(self, text: bytes) -> Completions:
        """Cached by text: looking up a long one takes milliseconds."""
        with self._lock:
            if text in self._cache:
                self._cache.move_to_end(text)
                return self._cache[text]
        found = Completions(self._containing(text), tuple(self._continuing(text)))
        with self._lock:
            if text not in self._cache:
                self._cache[text] = found
                self._cached_ids += found.size
            while self._cached_ids > MAX_CACHED_IDS and len(self._cache) > 1:
                self._cached_ids -= self._cache.popitem(last=False)[1].size
        return found

    def _starting_with(self, text: bytes) -> Ids:
        start = bisect_left(self._texts, text)
        if start == len(self._texts) or not self._texts[start].startswith(text):
            return self._ids[:0]
        after = text.rstrip(b"\xff")  # the first text behind all that start with this one
        end = bisect_left(self._texts, after[:-1] + bytes([after[-1] + 1])) if after else len(self._texts)
        return self._ids[start:end]

    def _continuing(self, text: bytes) -> Iterable[tuple[bytes, Ids]]:
        for size in range(max(1, len(text) - self._longest), len(text)):
            ids = self._starting_with(text[size:])
            if len(ids):
                yield text[:size], ids

    def _containing(self, text: bytes) -> Ids:
        """Searches all tokens at once, for the text's rarest byte first."""
        size = len(text)
        if size > self._longest:
            return self._ids[:0]
        pattern = np.frombuffer(text, dtype=np.uint8)
        rarest = int(self._frequencies[pattern].argmin())
        starts = np.flatnonzero(self._bytes == pattern[rarest]) - rarest
        starts = starts[(starts >= 0) & (starts <= len(self._bytes) - size)]
        for offset, byte in enumerate(pattern):
            if offset != rarest and len(starts):
                starts = starts[self._bytes[starts + offset] == byte]
        tokens = self._ends.searchsorted(starts, side="right")
        inside = starts + size <= self._ends[tokens]
        found: Ids = self._ids[np.unique(tokens[inside])]
        return found


class BannedStrings:
    """The banned strings of one reply. Control tokens are no text: they are never banned and interrupt a string."""

    def __init__(self, strings: Iterable[str], index: VocabularyIndex, control: frozenset[int]) -> None:
        self._strings = sorted({string.encode() for string in strings})
        self._index = index
        self._control = control
        self._longest = max((len(string) for string in self._strings), default=0)
        completions = [index.completions(string) for string in self._strings]
        self._containing: Mask = np.zeros(len(index.vocabulary), dtype=np.bool_)
        """For each token, whether it contains a banned string."""
        for completion in completions:
            self._containing[completion.containing] = True
        self._by_prefix = [pair for completion in completions for pair in completion.by_prefix]
        self._prefix = b""
        """The longest suffix of the reply that is a prefix of a banned string."""
        self._token_count = 0
        """The reply's length at which `_prefix` was computed."""
        self._cache: dict[bytes, Ids] = {}

    def banned_ids(self, token_ids: Sequence[int]) -> Ids:
        """Tokens that would complete a banned string after these ones. Fast if the reply has grown by one token."""
        if len(token_ids) == self._token_count + 1:
            self._prefix = self._prefix_after(token_ids[-1])
        elif len(token_ids) != self._token_count:
            self._prefix = self._longest_prefix(self.tail(token_ids))
        self._token_count = len(token_ids)
        if self._prefix not in self._cache:
            if len(self._cache) >= MAX_CACHED_PREFIXES:
                self._cache.clear()
            self._cache[self._prefix] = self._completing_ids()
        return self._cache[self._prefix]

    def tail(self, token_ids: Sequence[int]) -> bytes:
        """The end of the text, long enough to hold any prefix of a banned string."""
        pieces: list[bytes] = []
        size = 0
        for token_id in reversed(token_ids):
            if token_id in self._control or size >= self._longest:
                break
            pieces.append(self._text(token_id))
            size += len(pieces[-1])
        return b"".join(reversed(pieces))

    def _prefix_after(self, token_id: int) -> bytes:
        return b"" if token_id in self._control else self._longest_prefix(self._prefix + self._text(token_id))

    def _longest_prefix(self, text: bytes) -> bytes:
        """The longest suffix of the text that is a prefix of a banned string."""
        text = text[-self._longest :]
        while text and not self._is_prefix(text):
            text = text[1:]
        return text

    def _is_prefix(self, text: bytes) -> bool:
        at = bisect_left(self._strings, text)
        return at < len(self._strings) and self._strings[at].startswith(text)

    def _completing_ids(self) -> Ids:
        banned = self._containing.copy()
        for prefix, ids in self._by_prefix:
            if self._prefix.endswith(prefix):
                banned[ids] = True
        banned[[token_id for token_id in self._control if token_id < len(banned)]] = False
        return np.flatnonzero(banned)

    def _text(self, token_id: int) -> bytes:
        vocabulary = self._index.vocabulary
        return vocabulary[token_id] if token_id < len(vocabulary) else b""


_ASCII_MARKS = frozenset('*#`~_^|\\/<>=&@()[]{}"')
_OTHER_MARKS = frozenset("“”„‟‘‚‛«»‹›「」『』〝〞〟〈〉《》【】〔〕〖〗〘〙〚〛•‣◦▪▫●○■□◆◇★☆※")
"""Marks without an ASCII form. The apostrophe is none of them."""
_VARIANT_RANGES = (range(0x80, 0x10000), range(0x1F100, 0x1F200))


@cache
def unspeakable_characters() -> frozenset[str]:
    """Marks of Markdown and of code, brackets and quotation marks, in all their forms: full-width, small, enclosed."""
    variants = {chr(code) for codes in _VARIANT_RANGES for code in codes if _is_variant(chr(code))}
    return _ASCII_MARKS | _OTHER_MARKS | variants


def _is_variant(character: str) -> bool:
    return not _ASCII_MARKS.isdisjoint(unicodedata.normalize("NFKC", character))


class ExitMarkers(NamedTuple):
    """The text markers that lead out of a state: at its beginning, and after visible text."""

    first: tuple[bytes, ...]
    after: tuple[bytes, ...]


class UnspeakableTokens:
    """A vocabulary's tokens that are unfit for speech. Made once a model."""

    def __init__(self, index: VocabularyIndex) -> None:
        self.index = index
        characters = [character.encode() for character in unspeakable_characters()]
        self._pattern = re.compile(b"|".join(map(re.escape, characters)))
        self._ids = [i for i, text in enumerate(index.vocabulary) if self._pattern.search(text)]
        self._rests = _rests_by_prefix(characters)
        self._completing: dict[bytes, list[int]] = {}
        self._cache: dict[tuple[ExitMarkers, frozenset[int], int], Ids] = {}

    def banned_ids(self, markers: ExitMarkers, control: frozenset[int], size: int) -> Ids:
        """All unspeakable tokens, except for control tokens and those that begin a marker."""
        key = (markers, control, size)
        if key not in self._cache:
            if len(self._cache) >= MAX_CACHED_STATES:
                self._cache.clear()
            text = self.index.vocabulary
            banned = [i for i in self._ids if i < size and i not in control and not self._begins(text[i], markers)]
            self._cache[key] = np.array(banned, dtype=np.int64)
        return self._cache[key]

    def completing_ids(self, tail: bytes) -> list[int]:
        """Tokens that complete an unspeakable character whose first bytes end the text."""
        for size in range(1, min(len(tail), 3) + 1):
            prefix = tail[-size:]
            if prefix in self._rests:
                if prefix not in self._completing:
                    rests = self._rests[prefix]
                    self._completing[prefix] = [i for rest in rests for i in self.index.starting_with(rest)]
                return self._completing[prefix]
        return []

    def contains(self, text: bytes) -> bool:
        """Whether the text contains an unspeakable character."""
        return self._pattern.search(text) is not None

    def _begins(self, text: bytes, markers: ExitMarkers) -> bool:
        """Whether all unspeakable characters of the text belong to a marker, whole or begun."""
        unspeakable = self._pattern.search(text)
        assert unspeakable is not None
        for start in range(unspeakable.start() + 1):
            rest, possible = text[start:], markers.after if text[:start].strip() else markers.first
            if any(marker.startswith(rest) or rest.startswith(marker) for marker in possible):
                return True
        return False


class SpokenText:
    """Keeps unspeakable characters out of the answer of one reply."""

    def __init__(self, phases: Phases, control: frozenset[int], tokens: UnspeakableTokens) -> None:
        self._phases = phases
        self._control = control
        self._tokens = tokens
        self._banned: dict[int, Ids] = {}
        """By state."""

    def apply_mask(self, changes: LogitsChanges, reply: ReplyState) -> None:
        state = self._phases.states[reply.state]
        if not self._is_spoken(state):
            return
        if self._tokens.contains(reply.buffered):
            self._force_marker(changes, state, reply.buffered)
            return
        changes.banned.append(self._banned_ids(reply.state, changes.size))
        tail = self._tail(reply.token_ids)
        if tail and tail[-1] >= 0x80 and (completing := self._tokens.completing_ids(tail)):
            changes.ban(completing)

    def _banned_ids(self, state: int, size: int) -> Ids:
        if state not in self._banned:
            markers = self._exit_markers(self._phases.states[state])
            self._banned[state] = self._tokens.banned_ids(markers, self._control, size)
        return self._banned[state]

    def _is_spoken(self, state: State) -> bool:
        """Whether text in this state is answer, or becomes answer if it is no marker."""
        if state.phase is Phase.CONTROL and state.other is not None:
            return self._phases.states[state.other].phase is Phase.ANSWER
        return state.phase is Phase.ANSWER

    def _exit_markers(self, state: State) -> ExitMarkers:
        after = state if state.other is None else self._phases.states[state.other]
        return ExitMarkers(_text_markers(state), _text_markers(after))

    def _force_marker(self, changes: LogitsChanges, state: State, buffered: bytes) -> None:
        """Allows only tokens that complete the begun marker: as text, its first bytes would be unspeakable."""
        rests = [marker[len(buffered) :] for marker in _text_markers(state) if marker.startswith(buffered)]
        index = self._tokens.index
        allowed = {i for rest in rests for i in index.starting_with(rest)}
        parts = (rest[:size] for rest in rests for size in range(1, len(rest)))
        allowed.update(i for part in parts for i in index.equal_to(part))
        changes.allow_only_ids(allowed - self._control)

    def _tail(self, token_ids: Sequence[int]) -> bytes:
        """The last bytes of the text: at least as many as an incomplete character can have."""
        tail = b""
        vocabulary = self._tokens.index.vocabulary
        for token_id in reversed(token_ids):
            if len(tail) >= 3 or token_id in self._control or token_id >= len(vocabulary):
                break
            tail = vocabulary[token_id] + tail
        return tail


def _text_markers(state: State) -> tuple[bytes, ...]:
    return tuple(trigger.marker for trigger in state.triggers if isinstance(trigger.marker, bytes))


def _rests_by_prefix(characters: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """For each incomplete character, the bytes that complete it."""
    rests: dict[bytes, list[bytes]] = {}
    for character in characters:
        for size in range(1, len(character)):
            rests.setdefault(character[:size], []).append(character[size:])
    return rests


class TokenHealing:
    """The bytes that a continued reply must write first. Control tokens are no text here."""

    def __init__(self, healing: bytes, index: VocabularyIndex, control: frozenset[int]) -> None:
        self.remaining = healing
        self._index = index
        self._control = control

    def allowed_ids(self) -> list[int]:
        """Tokens that write a prefix of the remaining bytes, or all of them and more."""
        allowed = set(self._index.starting_with(self.remaining))
        for size in range(1, len(self.remaining)):
            allowed.update(self._index.equal_to(self.remaining[:size]))
        return sorted(allowed - self._control)

    def accept_token(self, token_id: int) -> None:
        text = self._index.vocabulary[token_id]
        self.remaining = self.remaining[len(text) :] if self.remaining.startswith(text) else b""
