"""Contexts of earlier requests, kept for those that begin with the same tokens. The least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.diffusion.model import ContextKeyValues

CHUNK = 128
"""Tokens of a context that are read in one pass. Chunks start at multiples of it, so that their bits depend on the text
alone, whatever was cached."""


@dataclass(frozen=True, slots=True)
class CachedContext:
    space: tuple[str, str]
    """Owner and adapter: others never see it."""
    conversation: str
    ids: tuple[int, ...]
    context: ContextKeyValues
    logits: Tensor | None
    """After the last token."""


class ContextCache:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[tuple[tuple[str, str], tuple[int, ...]], CachedContext] = OrderedDict()
        self._bytes = self._prompt_tokens = self._hit_tokens = self._evictions = 0

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            self._limit_bytes, self._bytes, self._bytes, self._prompt_tokens, self._hit_tokens, self._evictions
        )

    def take(self, space: tuple[str, str], ids: tuple[int, ...]) -> ContextKeyValues:
        """A context of the longest cached beginning of these tokens; an empty one if there is none.

        Whole chunks are reused, or the whole context: other beginnings were computed with other neighbours.
        """
        self._prompt_tokens += len(ids)
        same = self._entries.get((space, ids))
        if same is not None:
            self._entries.move_to_end((space, ids))
            self._hit_tokens += len(ids)
            found = same.context.copy(len(ids))
            found.last_logits = same.logits
            return found
        matches = [(self._reusable(entry, ids), key) for key, entry in self._entries.items() if entry.space == space]
        count, key = max(matches, key=lambda match: match[0], default=(0, None))
        if not count or key is None:
            return ContextKeyValues()
        self._entries.move_to_end(key)
        self._hit_tokens += count
        return self._entries[key].context.copy(count)

    def _reusable(self, entry: CachedContext, ids: tuple[int, ...]) -> int:
        common = _common_prefix(entry.ids, ids)
        return min(common, len(ids) - 1) // CHUNK * CHUNK

    def put(self, entry: CachedContext) -> None:
        key = (entry.space, entry.ids)
        if key in self._entries:
            self._drop(key)
        self._entries[key] = entry
        self._bytes += entry.context.nbytes
        while self._bytes > self._limit_bytes and self._entries:
            self._evictions += 1
            self._drop(next(iter(self._entries)))

    def forget(self, conversation: str) -> None:
        for key in [key for key, entry in self._entries.items() if entry.conversation == conversation]:
            self._drop(key)

    def _drop(self, key: tuple[tuple[str, str], tuple[int, ...]]) -> None:
        self._bytes -= self._entries.pop(key).context.nbytes


def _common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    size = min(len(one), len(two))
    if one[:size] == two[:size]:
        return size
    return next(at for at in range(size) if one[at] != two[at])
