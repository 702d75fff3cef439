"""The part of a runner that keeps a key and a value for each token in slots: prefixes are reused to the token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Generic

from palaver.engines.core.arrays import A
from palaver.engines.core.kv_cache import KVLayout, Slot
from palaver.engines.core.logits import Logits
from palaver.engines.core.prefix_cache import PrefixCache
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import CacheStatistics

HEADROOM = 32
"""Tokens beyond the prompt that a new slot has room for."""


class SlotRunner(ABC, Generic[A]):
    """All sequences share a pass. A subclass computes it."""

    reuse = "to the token"
    supports_batching = True

    def __init__(self, layout: KVLayout[A], cache_bytes: int, context_length: int) -> None:
        self._cache = PrefixCache(layout, cache_bytes)
        self._cache.on_slots_moved = self._drop_decode_batch
        self._context_length = context_length
        self._slots: dict[SequenceState, Slot[A]] = {}
        self.forward_seconds = 0.0

    @abstractmethod
    def _compute(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> Logits:
        """The pass of `run`. The slots have room for it."""

    @abstractmethod
    def _drop_decode_batch(self) -> None:
        """Drops references to pools that are kept from one pass to the next: slots have moved."""

    @property
    def statistics(self) -> CacheStatistics:
        return self._cache.statistics

    def check_capacity(self, sequence: SequenceState) -> None:
        self._cache.check_capacity(len(sequence.token_ids))

    def count_cached(self, sequence: SequenceState) -> int:
        return self._cache.count_cached(self._new_namespace(sequence), sequence.token_ids[:-1])

    def max_chunk(self, sequence: SequenceState) -> int | None:
        return None

    def needs_recompute(self, sequence: SequenceState) -> bool:
        return False

    def allocate(self, sequence: SequenceState) -> None:
        namespace, keys = self._new_namespace(sequence), sequence.token_ids[:-1]
        slot, cached = self._cache.allocate(namespace, keys, self._initial_tokens(sequence))
        self._slots[sequence] = slot
        sequence.cached_logits = (
            self._cache.restore_logits(slot, namespace, sequence.token_ids) if cached == len(keys) else None
        )
        sequence.cached_tokens = cached if sequence.cached_logits is None else len(sequence.token_ids)
        sequence.computed_tokens = sequence.cached_tokens

    def run(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool = True) -> Logits:
        for sequence, count in zip(sequences, counts, strict=True):
            self._cache.grow(self._slots[sequence], sequence.computed_tokens + count, sequence.computed_tokens)
        logits = self._compute(sequences, counts, need_logits)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed_tokens += count
        return logits

    def cache_prefix(self, sequence: SequenceState, logits: Logits) -> None:
        keys, namespace = sequence.token_ids[: sequence.computed_tokens], self._namespace(sequence)
        self._cache.insert(self._slots[sequence], namespace, keys, sequence.conversation)
        self._cache.insert_logits(namespace, keys, logits)

    def release(self, sequence: SequenceState) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is None:
            return
        keys, namespace = sequence.token_ids[: sequence.computed_tokens], self._namespace(sequence)
        try:
            self._cache.insert(slot, namespace, keys, sequence.conversation)
        finally:
            self._cache.free(slot, namespace, keys, sequence.conversation)

    def forget(self, conversation: str) -> None:
        self._drop_decode_batch()
        self._cache.forget(conversation)

    def _namespace(self, sequence: SequenceState) -> Hashable:
        """Cached prefixes are shared within a namespace only."""
        return sequence.space

    def _new_namespace(self, sequence: SequenceState) -> Hashable:
        """The namespace of a sequence that has no slot yet."""
        return self._namespace(sequence)

    def _initial_tokens(self, sequence: SequenceState) -> int:
        """How many tokens the sequence's slot has room for at first."""
        limit = min(self._context_length, self._cache.max_tokens)
        return min(len(sequence.token_ids) + HEADROOM, max(limit, len(sequence.token_ids)))
