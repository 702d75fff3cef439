"""The prefix cache over llama.cpp's sequences: slots in the context, and saved states in the host's memory.

A sequence runs in a slot. When it ends, its tokens stay in the slot until another sequence needs it; then the state is
saved to the host's memory, least recently used states first out. A new sequence starts from the slot or state that has
the most of its first tokens. The states of conversations are stored in files too (`StateFiles`), for the time after a
restart.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.core.sampler import Logits
from palaver.engines.llamacpp.context import Bytes
from palaver.engines.llamacpp.state_files import KEY_TYPE, StateFiles, StoredState

MAX_CONVERSATIONS = 16
"""An entry that more conversations use is shared by all, so that the set of names stays bounded."""
LOGITS_SHARE = 8
"""The part of the host's memory that logits after prompts may take."""
MIN_TAIL = 32
"""Tokens that another branch would lose from which on a state is saved before it is cut."""
MIN_STORED = 64
"""Tokens from which on a state in a file is worth writing and reading."""
_COMPARED = 256


class SequenceMemory(Protocol):
    """What the cache needs of `Context`."""

    def truncate(self, sequence: int, tokens: int) -> bool: ...

    def can_truncate(self, sequence: int, tokens: int, copied: bool = False) -> bool: ...

    def saves_all(self, tokens: int) -> bool: ...

    def copy(self, source: int, target: int) -> None: ...

    def save(self, sequence: int) -> Bytes: ...

    def restore(self, sequence: int, state: Bytes) -> bool: ...


@dataclass(eq=False, slots=True)
class _Entry:
    """Tokens whose state is in the cache."""

    space: Hashable = None
    tokens: array[int] = field(default_factory=lambda: array(KEY_TYPE))
    uses: dict[str, int] = field(default_factory=dict)
    """How many of the tokens each conversation uses. "" are unnamed requests, which `forget` does not end."""
    last_use: int = 0

    def add_use(self, conversation: str, tokens: int) -> None:
        if len(self.uses) >= MAX_CONVERSATIONS:
            conversation = ""
        self.uses[conversation] = max(tokens, self.uses.get(conversation, 0))

    def cut_uses(self, tokens: int) -> None:
        """The tokens after these are gone."""
        self.uses = {name: min(used, tokens) for name, used in self.uses.items()}

    def forget(self, conversation: str) -> int:
        """How many of the tokens others still use."""
        self.uses.pop(conversation, None)
        return max(self.uses.values(), default=0)


@dataclass(eq=False, slots=True)
class CachedSequence(_Entry):
    """A sequence of the context."""

    id: int = 0
    running: bool = False
    conversation: str = ""
    """Of the latest request."""
    stored: bool = True
    """Whether its tokens are in a file, or need not be."""


@dataclass(eq=False, slots=True)
class _SavedState(_Entry):
    state: Bytes | None = None

    @property
    def nbytes(self) -> int:
        assert self.state is not None
        return self.state.nbytes + self.tokens.itemsize * len(self.tokens)


@dataclass(eq=False, slots=True)
class _FileEntry(_Entry):
    """A state in a file."""

    stored: StoredState | None = None
    state: Bytes | None = None
    """Once it is read."""


class NoSlot(Exception):
    """All slots are running."""


class SequenceCache:
    def __init__(
        self, memory: SequenceMemory, slots: int, truncates: bool, host_bytes: int, files: StateFiles | None = None
    ) -> None:
        """`truncates`: whether a state can be cut to its first tokens; recurrent ones can't."""
        self._memory = memory
        self._files = files
        self._slots = [CachedSequence(id=number) for number in range(slots)]
        self._saved: list[_SavedState] = []
        self._logits: OrderedDict[tuple[Hashable, bytes], tuple[Logits, str]] = OrderedDict()
        """The logits after prompts, and the conversation of each."""
        self._truncates = truncates
        self._host_bytes = host_bytes
        self._clock = itertools.count(1)
        self.evictions = 0

    @property
    def saved_bytes(self) -> int:
        return sum(entry.nbytes for entry in list(self._saved))

    @property
    def idle_tokens(self) -> int:
        return sum(len(slot.tokens) for slot in self._slots if not slot.running)

    def count_cached(self, space: Hashable, keys: Sequence[int]) -> int:
        """How many of the first tokens are in the cache. Changes nothing."""
        return self._best(space, array(KEY_TYPE, keys))[1]

    def allocate(self, space: Hashable, keys: Sequence[int], conversation: str = "") -> tuple[CachedSequence, int]:
        """A slot, and how many of the first tokens it holds. Raises NoSlot."""
        wanted = array(KEY_TYPE, keys)
        best, tokens = self._best(space, wanted)
        while isinstance(best, _FileEntry) and not self._read(best):
            best, tokens = self._best(space, wanted)
        slot = self._start_from(best, tokens)
        if tokens and len(slot.tokens) < tokens:  # a saved state that could not be restored
            tokens = 0
        if self._truncates or not tokens:
            self._truncate(slot, tokens)
        slot.space, slot.running, slot.tokens = space, True, wanted[:tokens]
        slot.conversation, slot.stored = conversation, False
        slot.add_use(conversation, tokens)
        slot.last_use = next(self._clock)
        return slot, tokens

    def advance(self, slot: CachedSequence, ids: Sequence[int]) -> None:
        """These tokens were computed in a running slot."""
        slot.tokens.extend(ids)

    def cut(self, slot: CachedSequence, tokens: int) -> None:
        """Removes all tokens of a running slot after the first `tokens`; also in the context, which may have more."""
        cut = self._memory.truncate(slot.id, tokens)
        assert cut, "only states that can be cut have drafts"
        del slot.tokens[tokens:]

    def save_running(self, slot: CachedSequence, conversation: str) -> None:
        """Saves the state of a running slot that can't be cut back to its present tokens later."""
        if not self._truncates:
            slot.add_use(conversation, len(slot.tokens))
            self._save(slot)

    def release(self, slot: CachedSequence, conversation: str) -> None:
        """The sequence of a slot has ended. Its tokens stay cached."""
        slot.running = False
        slot.add_use(conversation, len(slot.tokens))
        slot.last_use = next(self._clock)

    def store_idle(self) -> bool:
        """Writes the state of one slot to a file. Returns False if there is none left to write."""
        return any(self._store(slot) for slot in self._slots if not slot.running)

    def store_all(self) -> None:
        """Writes the states of all slots to files, also of sequences that were running when the engine was closed."""
        for slot in self._slots:
            if not slot.running or (slot.tokens and self._memory.truncate(slot.id, len(slot.tokens))):
                self._store(slot)

    def _store(self, slot: CachedSequence, state: Bytes | None = None) -> bool:
        done, slot.stored = slot.stored, True
        if self._files is None or done or not slot.conversation or len(slot.tokens) < MIN_STORED:
            return False
        assert isinstance(slot.space, tuple)
        state = self._memory.save(slot.id) if state is None else state
        return self._files.write(slot.space, slot.conversation, slot.tokens, state)

    def drop(self, slot: CachedSequence) -> None:
        """Empties a slot whose state is not known. Its sequence can't go on, but has the slot until it is released."""
        self._clear(slot)

    def evict_idle(self) -> bool:
        """Saves and empties the slot that was not used for the longest time. Returns False if all are running."""
        idle = [slot for slot in self._slots if not slot.running and slot.tokens]
        if not idle:
            return False
        self._evict(min(idle, key=lambda slot: slot.last_use))
        return True

    def insert_logits(self, space: Hashable, keys: Sequence[int], logits: Logits, conversation: str) -> None:
        """Caches the logits after all of these tokens."""
        if logits.nbytes * LOGITS_SHARE > self._host_bytes:
            return
        self._logits[space, array(KEY_TYPE, keys).tobytes()] = (logits.copy(), conversation)
        while sum(row.nbytes for row, _ in self._logits.values()) * LOGITS_SHARE > self._host_bytes:
            self._logits.popitem(last=False)

    def find_logits(self, space: Hashable, keys: Sequence[int]) -> Logits | None:
        """The logits after all of these tokens, if their state is cached too."""
        key = (space, array(KEY_TYPE, keys).tobytes())
        if key not in self._logits or self.count_cached(space, keys) < len(keys):
            return None
        self._logits.move_to_end(key)
        return self._logits[key][0]

    def forget(self, conversation: str) -> None:
        """Evicts the tokens that only this conversation uses. Running sequences are not affected."""
        if not conversation:
            return
        for key in [key for key, (_, user) in self._logits.items() if user == conversation]:
            del self._logits[key]
        if self._files is not None:
            self._files.forget(conversation)
        for slot in self._slots:
            slot.stored = slot.stored or slot.conversation == conversation
            if not slot.running and slot.tokens and conversation in slot.uses:
                self._truncate(slot, self._usable(slot, slot.forget(conversation)))
        for entry in [entry for entry in self._saved if conversation in entry.uses]:
            tokens = self._usable(entry, entry.forget(conversation))
            entry.tokens = entry.tokens[:tokens]
            if not tokens:
                self._saved.remove(entry)

    def statistics(self, limit_bytes: int, token_bytes: int) -> CacheStatistics:
        """Of the memory; the runner counts the tokens."""
        saved = self.saved_bytes + sum(row.nbytes for row, _ in list(self._logits.values()))
        kept = saved + self.idle_tokens * token_bytes
        running = sum(len(slot.tokens) for slot in self._slots if slot.running) * token_bytes
        return CacheStatistics(limit_bytes, kept + running, kept, evictions=self.evictions)

    def _usable(self, entry: _Entry, tokens: int) -> int:
        """How many of the first tokens can be used: all or none of a state that can't be cut."""
        if self._truncates and isinstance(entry, CachedSequence):
            usable = self._memory.can_truncate(entry.id, tokens, copied=entry.running)
        else:
            whole = tokens == len(entry.tokens)
            usable = whole or (self._truncates and self._memory.saves_all(len(entry.tokens)))
        return tokens if usable else 0

    def _entries(self) -> Iterator[_Entry]:
        """In the order in which they are preferred: idle slots, saved states, running slots, files."""
        yield from (slot for slot in self._slots if not slot.running)
        yield from self._saved
        if self._truncates:
            yield from (slot for slot in self._slots if slot.running)
        for stored in self._files.entries() if self._files is not None else ():
            yield _FileEntry(stored.space, stored.tokens, {stored.conversation: len(stored.tokens)}, stored=stored)

    def _best(self, space: Hashable, keys: array[int]) -> tuple[_Entry | None, int]:
        """The entry with the longest prefix of these tokens, and its length."""
        best, most = None, 0
        for entry in self._entries():
            if entry.space == space and len(entry.tokens):
                tokens = self._usable(entry, common_prefix(entry.tokens, keys))
                if tokens > most + (MIN_STORED if isinstance(entry, _FileEntry) else 0):
                    best, most = entry, tokens
        return best, most

    def _start_from(self, best: _Entry | None, tokens: int) -> CachedSequence:
        """A slot with the state of an entry, which may hold more than the tokens that are wanted."""
        if isinstance(best, CachedSequence) and not best.running:
            if len(best.tokens) - tokens >= MIN_TAIL:  # another branch may need them
                self._save(best)
            return best
        slot = self._take_slot()
        if isinstance(best, CachedSequence):
            self._memory.copy(best.id, slot.id)
            slot.tokens, slot.uses = best.tokens[:], dict(best.uses)
            slot.cut_uses(tokens)
        elif isinstance(best, _SavedState | _FileEntry):
            assert best.state is not None
            best.last_use = next(self._clock)
            if self._memory.restore(slot.id, best.state):
                slot.tokens, slot.uses = best.tokens[:], dict(best.uses)
        return slot

    def _read(self, entry: _FileEntry) -> bool:
        """Reads the state of a file. Returns False if there is none that can be used."""
        assert self._files is not None
        assert entry.stored is not None
        entry.state = self._files.read(entry.stored)
        return entry.state is not None

    def _take_slot(self) -> CachedSequence:
        """An empty slot. The first ones are preferred: llama.cpp computes neighbours together."""
        for slot in self._slots:
            if not slot.running and not slot.tokens:
                return slot
        if not self.evict_idle():
            raise NoSlot
        return self._take_slot()

    def _evict(self, slot: CachedSequence) -> None:
        self._save(slot)
        self._clear(slot)
        self.evictions += 1

    def _clear(self, slot: CachedSequence) -> None:
        self._memory.truncate(slot.id, 0)
        slot.tokens, slot.uses, slot.stored = array(KEY_TYPE), {}, True

    def _truncate(self, slot: CachedSequence, tokens: int) -> None:
        """Cuts a slot to its first tokens; also in the context, where a restored state may hold more."""
        if tokens == 0:
            self._clear(slot)
            return
        cut = self._memory.truncate(slot.id, tokens)
        assert cut or tokens == len(slot.tokens)
        slot.tokens = slot.tokens[:tokens]
        slot.cut_uses(tokens)

    def _save(self, slot: CachedSequence) -> None:
        """Copies the state of a slot to the host's memory, unless a saved state has all of its tokens."""
        for entry in self._saved:
            common = self._usable(entry, common_prefix(entry.tokens, slot.tokens))
            if entry.space == slot.space and common == len(slot.tokens):
                for name, used in slot.uses.items():
                    entry.add_use(name, used)
                return
        state = self._memory.save(slot.id)
        self._store(slot, state)
        if state.nbytes > self._host_bytes:
            return
        self._drop_contained(slot)
        saved = _SavedState(slot.space, slot.tokens[:], dict(slot.uses), next(self._clock), state)
        self._saved.append(saved)
        while self.saved_bytes > self._host_bytes:
            oldest = min(self._saved, key=lambda entry: entry.last_use)
            self._saved.remove(oldest)
            self.evictions += 1

    def _drop_contained(self, slot: CachedSequence) -> None:
        """Drops saved states that a slot contains: the slot is about to be saved with more tokens."""
        for entry in list(self._saved):
            contained = entry.space == slot.space and common_prefix(entry.tokens, slot.tokens) == len(entry.tokens)
            if self._truncates and contained and self._memory.saves_all(len(slot.tokens)):
                self._saved.remove(entry)
                for name, used in entry.uses.items():
                    slot.add_use(name, used)


def common_prefix(one: array[int], two: array[int]) -> int:
    """How many items both begin with."""
    limit = min(len(one), len(two))
    for start in range(0, limit, _COMPARED):
        end = min(start + _COMPARED, limit)
        if one[start:end] != two[start:end]:
            return next(place for place in range(start, end) if one[place] != two[place])
    return limit
