"""The prefix cache: the states of sequences that ended, by their tokens; least recently used ones go first.

A copy of a state shares its arrays until it is written to, and most states can be cut at any token. So a sequence
starts from the state with the longest common prefix, whether its sequence still runs or not.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from palaver.engines.core.kv_cache import common_prefix_length
from palaver.engines.core.sampler import Logits
from palaver.engines.mlx.model import SequenceStates

MAX_CONVERSATIONS = 16
"""An entry that more conversations use is shared by all, so that the set of names stays bounded."""
MAX_LOGITS = 4
"""Rows of logits in an entry: for the last prompts of a conversation, should their replies be generated again."""


@dataclass(eq=False, slots=True)
class CacheEntry:
    """The prefix keys of a sequence's tokens, and their state."""

    space: Hashable
    tokens: array[int]
    state: SequenceStates | None
    """None while a running sequence's state is merged with others."""
    uses: dict[str, int] = field(default_factory=dict)
    """How many of the tokens each conversation uses. "" are unnamed requests, which `forget` does not end."""
    logits: dict[int, Logits] = field(default_factory=dict)
    """The logits after some numbers of tokens: where prompts ended."""

    @property
    def nbytes(self) -> int:
        state = 0 if self.state is None else self.state.nbytes
        return state + sum(row.nbytes for row in self.logits.values())

    @property
    def is_complete(self) -> bool:
        """Whether the state holds all of the tokens."""
        return self.state is not None and self.state.length == len(self.tokens)

    def copy(self, state: SequenceStates) -> CacheEntry:
        """The same tokens with a copy of their state."""
        return CacheEntry(self.space, self.tokens[:], state.copy(), dict(self.uses), dict(self.logits))

    def add_logits(self, tokens: int, logits: Logits) -> None:
        """Keeps the logits after so many tokens, and those of the prompts before it that are closest."""
        self.logits[tokens] = logits
        for length in sorted(self.logits)[:-MAX_LOGITS]:
            del self.logits[length]

    def add_use(self, conversation: str, tokens: int) -> None:
        if conversation not in self.uses and len(self.uses) >= MAX_CONVERSATIONS:
            conversation = ""
        self.uses[conversation] = max(tokens, self.uses.get(conversation, 0))

    def add_uses(self, other: CacheEntry) -> None:
        for conversation, tokens in other.uses.items():
            self.add_use(conversation, min(tokens, len(self.tokens)))

    def usable_tokens(self, keys: array[int]) -> int:
        """How many of the first keys a sequence can start from: all or none of a state that can't be cut."""
        common = common_prefix_length(self.tokens, keys)
        whole = common == len(self.tokens)
        return common if whole or self.state is None or self.state.can_truncate else 0

    def truncate(self, tokens: int) -> None:
        """Cuts tokens, logits and uses, and the state, which must allow it. After a failed pass it may have fewer."""
        self.tokens = self.tokens[:tokens]
        self.logits = {length: row for length, row in self.logits.items() if length <= tokens}
        self.uses = {name: min(used, tokens) for name, used in self.uses.items()}
        if self.state is not None:
            self.state.truncate(min(tokens, self.state.length))


class StateCache:
    """Entries of ended sequences."""

    def __init__(self) -> None:
        self._entries: list[CacheEntry] = []
        """Least recently used first."""
        self.nbytes = 0
        self.evictions = 0

    def find(
        self, space: Hashable, keys: Sequence[int], running: Iterable[CacheEntry] = ()
    ) -> tuple[CacheEntry | None, int]:
        """The entry with the longest prefix of these tokens, and its length. Changes nothing."""
        wanted, best, most = array("q", keys), None, 0
        for entry in (*reversed(self._entries), *running):
            tokens = entry.usable_tokens(wanted) if entry.space == space else 0
            if tokens > most:
                best, most = entry, tokens
        return best, most

    def insert(self, entry: CacheEntry) -> None:
        """Adds an entry. It replaces the entries that it contains, unless it can't be cut to their lengths."""
        assert entry.state is not None
        for other in list(self._entries):
            contained = other.space == entry.space and common_prefix_length(other.tokens, entry.tokens) == len(
                other.tokens
            )
            if contained and (entry.state.can_truncate or len(other.tokens) == len(entry.tokens)):
                entry.add_uses(other)
                entry.logits = other.logits | entry.logits
                self.remove(other)
        self._entries.append(entry)
        self.nbytes += entry.nbytes

    def touch(self, entry: CacheEntry) -> None:
        """Makes an entry of the cache the most recently used one."""
        self._entries.remove(entry)
        self._entries.append(entry)

    def remove(self, entry: CacheEntry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes

    def evict(self) -> bool:
        """Drops the least recently used entry. Returns False if there is none."""
        if not self._entries:
            return False
        self.remove(self._entries[0])
        self.evictions += 1
        return True

    def forget(self, conversation: str) -> None:
        """Drops the tokens that only this conversation uses."""
        for entry in [entry for entry in self._entries if conversation in entry.uses]:
            assert entry.state is not None
            del entry.uses[conversation]
            used = max(entry.uses.values(), default=0)
            if used == len(entry.tokens):
                continue
            if not used or not entry.state.can_truncate:
                self.remove(entry)
                continue
            self.nbytes -= entry.nbytes
            entry.truncate(used)
            entry.state.compact()
            self.nbytes += entry.nbytes

    def __contains__(self, entry: CacheEntry) -> bool:
        return any(other is entry for other in self._entries)
