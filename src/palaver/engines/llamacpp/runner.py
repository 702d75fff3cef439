"""The runner over llama.cpp: sequences in slots of a context, computed together in one pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import PassInterrupted
from palaver.engines.core.sampler import HostLogits, Logits
from palaver.engines.llamacpp.context import Aborted, Context, Floats, NoRoom
from palaver.engines.llamacpp.passes import Chunk, Passes
from palaver.engines.llamacpp.sequence_cache import CachedSequence, NoSlot, SequenceCache
from palaver.errors import CacheFull, EngineClosed


class LlamaRunner:
    def __init__(
        self,
        context: Context,
        passes: Passes,
        limit_bytes: int,
        host_bytes: int,
        token_bytes: int,
        truncates: bool = True,
    ) -> None:
        """`host_bytes`: the part of the limit for saved states. `token_bytes`: the cache of one token."""
        self.reuse = "to the token" if truncates else "snapshots"
        self.run_ahead = None
        self.supports_batching = True
        self.prefills_last_token = passes.prefills_last_token
        self.forward_seconds = 0.0
        self._context = context
        self._passes = passes
        self._limit_bytes = limit_bytes
        self._token_bytes = token_bytes
        self._cache = SequenceCache(context, context.settings.sequences, truncates, host_bytes)
        self._slots: dict[SequenceState, CachedSequence] = {}
        self._in_pass: list[LocalGeneration] = []
        """The generations whose tokens are being computed."""
        self._lock = threading.Lock()
        self._prompt_tokens = 0
        self._hit_tokens = 0

    @property
    def statistics(self) -> CacheStatistics:
        memory = self._cache.statistics(self._limit_bytes, self._token_bytes)
        return replace(memory, prompt_tokens=self._prompt_tokens, hit_tokens=self._hit_tokens)

    def check_capacity(self, sequence: SequenceState) -> None:
        if len(sequence.token_ids) > self._max_tokens:
            raise CacheFull(len(sequence.token_ids), self._max_tokens)

    @property
    def _max_tokens(self) -> int:
        return self._context.max_tokens - self._passes.padding

    def count_cached(self, sequence: SequenceState) -> int:
        return self._cache.count_cached(sequence.space, sequence.token_ids[:-1])

    def max_chunk(self, sequence: SequenceState) -> int | None:
        return self._passes.max_chunk

    def allocate(self, sequence: SequenceState) -> None:
        space, tokens = sequence.space, sequence.token_ids
        sequence.cached_logits = self._cache.find_logits(space, tokens)
        keys = tokens if sequence.cached_logits is not None else tokens[:-1]
        try:
            slot, cached = self._cache.allocate(space, keys, sequence.conversation)
        except NoSlot:
            raise CacheFull(len(tokens), 0) from None
        if cached < len(tokens):
            sequence.cached_logits = None
        self._slots[sequence] = slot
        sequence.computed_tokens = sequence.cached_tokens = cached
        self._prompt_tokens += len(tokens)
        self._hit_tokens += cached

    def run(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool = True) -> Logits:
        self._check_room(sequences, counts)
        chunks = [self._chunk(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        began = time.thread_time()
        self._start_pass([sequence.generation for sequence in sequences])
        try:
            logits = self._compute(chunks, need_logits)
        finally:
            self._start_pass([])
        self.forward_seconds += time.thread_time() - began
        for sequence, chunk in zip(sequences, chunks, strict=True):
            self._cache.advance(self._slots[sequence], chunk.ids)
            sequence.computed_tokens += len(chunk.ids)
        return HostLogits(logits)

    def _chunk(self, sequence: SequenceState, count: int) -> Chunk:
        start, end = sequence.computed_tokens, sequence.computed_tokens + count
        generated = end == len(sequence.token_ids) > len(sequence.generation.prompt.context_ids)
        return Chunk(self._slots[sequence].id, start, sequence.token_ids[start:end], generated)

    def needs_recompute(self, sequence: SequenceState) -> bool:
        return False

    def cache_prefix(self, sequence: SequenceState, logits: Logits) -> None:
        tokens = sequence.token_ids[: sequence.computed_tokens]
        self._cache.save_running(self._slots[sequence], sequence.conversation)
        self._cache.insert_logits(sequence.space, tokens, logits, sequence.conversation)

    def release(self, sequence: SequenceState) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._cache.release(slot, sequence.conversation)

    def forget(self, conversation: str) -> None:
        self._cache.forget(conversation)

    def interrupt(self, generation: LocalGeneration) -> None:
        """Ends the pass that runs now if it is for this generation alone, which was cancelled. From any thread."""
        with self._lock:
            if self._in_pass == [generation]:
                self._context.interrupt()

    def _start_pass(self, generations: list[LocalGeneration]) -> None:
        """Says for which generations passes are computed from now on."""
        with self._lock:
            self._in_pass = generations
            self._context.allow_passes()

    def _check_room(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            needed = sequence.computed_tokens + count
            if needed > self._max_tokens:
                raise CacheFull(needed, self._max_tokens)

    def _compute(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        """Computes the chunks. Where the cells that all sequences share are full, idle sequences are evicted."""
        while True:
            try:
                return self._passes.run(chunks, need_logits)
            except Aborted:
                if self._context.closing:
                    raise EngineClosed from None
                self._restore_lengths(chunks)
                raise PassInterrupted from None
            except NoRoom:
                self._restore_lengths(chunks)
                if not self._cache.evict_idle():
                    raise CacheFull(sum(start + len(ids) for _, start, ids, _ in chunks), self._max_tokens) from None
            except Exception:
                self._restore_lengths(chunks)
                raise

    def _restore_lengths(self, chunks: Sequence[Chunk]) -> None:
        """After a pass that failed: removes what it computed. A state that can't be cut is dropped."""
        for number, start, _, _ in chunks:
            if self._context.length(number) > start and not self._context.truncate(number, start):
                slot = next(slot for slot in self._slots.values() if slot.id == number)
                self._cache.drop(slot)
