"""The runner for hybrid models, with recurrent or convolutional layers: all replies share a decode pass, prompts are
computed one at a time, and prefixes are reused where a snapshot of the recurrent states was made: at the end of prompts
and replies."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from palaver.engines.base import BY_BATCH
from palaver.engines.core.kv_cache import MIN_CAPACITY, Slot
from palaver.engines.core.prefix_cache import CacheStatistics, PrefixCache
from palaver.engines.core.request import SequenceState
from palaver.engines.core.sampler import Logits
from palaver.engines.torch.batch import SequenceChunk
from palaver.engines.torch.devices import TorchThreads
from palaver.engines.torch.hybrid_decoder import HybridDecoder, RecurrentSnapshot, StateRows, candidate_rows
from palaver.engines.torch.media import MediaEncoder
from palaver.engines.torch.model_runner import TorchRunner
from palaver.engines.torch.snapshot_runner import SnapshotCache, max_cache_chunk
from palaver.errors import CacheFull


class HybridPrefixCache(PrefixCache[torch.Tensor]):
    """Pages of keys and values, snapshots of recurrent states, and both of running sequences, in one memory bound."""

    def __init__(self, decoder: HybridDecoder, limit_bytes: int) -> None:
        self.states: StateRows = decoder.states
        self.snapshots: SnapshotCache[RecurrentSnapshot] = SnapshotCache()
        super().__init__(decoder.layout.kv, limit_bytes)

    @property
    def statistics(self) -> CacheStatistics:
        known = super().statistics
        return replace(
            known,
            used_bytes=known.used_bytes + self.snapshots.nbytes + self.states.nbytes,
            kept_bytes=known.kept_bytes + self.snapshots.nbytes,
            evictions=known.evictions + self.snapshots.evictions,
        )

    @property
    def max_tokens(self) -> int:
        free = self._limit_bytes - self.states.row_bytes
        return max(0, free // self._layout.bytes_per_token // MIN_CAPACITY * MIN_CAPACITY)

    def match(
        self, namespace: Hashable, keys: Sequence[Hashable], conversation: str | None = None
    ) -> tuple[RecurrentSnapshot | None, int]:
        """The longest prefix of these keys whose states and whose keys and values are cached: the states, and its
        length."""
        length = self.count_cached(namespace, keys)
        return self.snapshots.match(namespace, keys[:length], conversation)

    def reserve_row(self, tokens: int) -> None:
        """Makes sure that a row is free, for a sequence of so many tokens. Raises CacheFull."""
        if not self.states.full:
            return
        for capacity in candidate_rows(self.states.capacity):
            if self._make_room((capacity - self.states.capacity) * self.states.row_bytes):
                with self._out_of_memory_is_full(tokens):
                    self.states.resize(capacity)
                return
        raise CacheFull(tokens, self.max_tokens)

    def insert_snapshot(
        self,
        slot: Slot[torch.Tensor],
        namespace: Hashable,
        keys: Sequence[Hashable],
        conversation: str,
        logits: Logits | None = None,
    ) -> None:
        """Caches what the slot and its row hold after these keys, as far as running sequences leave memory."""
        self.insert(slot, namespace, keys, conversation)
        size = self.states.row_bytes + (0 if logits is None else logits.nbytes)
        if self._make_room(size) and self.count_cached(namespace, keys) == len(keys):
            self.snapshots.insert(namespace, keys, self.states.snapshot(slot), conversation, logits)

    def forget(self, conversation: str) -> None:
        super().forget(conversation)
        self.snapshots.forget(conversation)
        self.states.erase_unused()

    def _make_room(self, needed: int) -> bool:
        if self._excess(needed) > 0:
            self._compact_slots()
        if self._excess(needed) > self._pages.nbytes + self.snapshots.nbytes:
            self.states.trim()
        if self._excess(needed) > self._pages.nbytes + self.snapshots.nbytes:
            return False
        while self._excess(needed) > 0:
            self._evict()
        self._reserve_memory(self._limit_bytes + self._excess(needed))
        return True

    def _evict(self) -> None:
        """What takes more memory gives: neither pages nor snapshots are of use without the others."""
        if self.snapshots.nbytes < self._pages.nbytes or not self.snapshots.evict():
            self._pages.evict()

    def _excess(self, needed: int) -> int:
        return super()._excess(needed) + self.snapshots.nbytes + self.states.nbytes


class HybridRunner(TorchRunner):
    """Sequences have a slot for keys and values, and a row of recurrent states."""

    reuse = "snapshots"
    exactness = BY_BATCH

    def __init__(
        self,
        decoder: HybridDecoder,
        cache_bytes: int,
        context_length: int,
        threads: TorchThreads,
        chunks: bool,
        media: MediaEncoder | None = None,
    ) -> None:
        """`chunks`: whether the model can compute several tokens at once after its first pass."""
        super().__init__(decoder, decoder.layout.kv, cache_bytes, context_length, threads, run_ahead=False, media=media)
        self._states = decoder.states
        self._cache: HybridPrefixCache = HybridPrefixCache(decoder, cache_bytes)
        self._cache.on_slots_moved = self._drop_decode_batch
        if decoder.uses_graphs:
            self._cache.widens_pools = False  # graphs attend for slots wherever they are
        self._chunks = chunks
        self.prefills_last_token = self.prefills_last_token and chunks
        self._lost: set[SequenceState] = set()
        """The sequences whose states are not those after their computed tokens: a pass failed."""
        self._prompt_tokens = 0
        self._hit_tokens = 0

    @property
    def statistics(self) -> CacheStatistics:
        return replace(self._cache.statistics, prompt_tokens=self._prompt_tokens, hit_tokens=self._hit_tokens)

    def count_cached(self, sequence: SequenceState) -> int:
        return self._cache.match(sequence.space, sequence.prefix_keys[:-1])[1]

    def max_chunk(self, sequence: SequenceState) -> int | None:
        return None if self._chunks else max_cache_chunk(sequence)

    def allocate(self, sequence: SequenceState) -> None:
        space, keys = sequence.space, sequence.prefix_keys
        logits = self._cache.snapshots.logits(space, keys)
        snapshot, tokens = self._cache.match(space, keys if logits is not None else keys[:-1], sequence.conversation)
        if logits is not None and tokens < len(keys):
            logits = None  # the keys and values were evicted
        self._cache.reserve_row(len(keys))  # first: a slot takes as much memory as there is
        slot, held = self._cache.allocate(space, keys[:tokens], self._initial_tokens(sequence))
        if held < tokens:  # they were evicted for this slot
            snapshot, tokens, logits = None, 0, None
        self._states.add(slot, snapshot)
        self._slots[sequence] = slot
        sequence.computed_tokens = sequence.cached_tokens = tokens
        sequence.cached_logits = logits
        if sequence.generation.prompt.media:
            try:
                self._attach_media(sequence)
            except BaseException:
                self.release(sequence)
                raise
            if sequence.computed_tokens != tokens:  # the snapshot is inside of tokens that see each other
                self._lost.add(sequence)
        self._prompt_tokens += len(keys)
        self._hit_tokens += tokens

    def cache_prefix(self, sequence: SequenceState, tokens: int, logits: Logits) -> None:
        keys, space = sequence.prefix_keys[:tokens], sequence.space
        if self._cache.snapshots.logits(space, keys) is None:
            self._cache.insert_snapshot(self._slots[sequence], space, keys, sequence.conversation, logits.copy())

    def release(self, sequence: SequenceState) -> None:
        slot = self._slots.pop(sequence, None)
        self._media.pop(sequence, None)
        if slot is None:
            return
        keys = sequence.prefix_keys[: sequence.computed_tokens]
        try:
            if sequence in self._lost:
                self._lost.discard(sequence)
                keys = []
            elif keys:
                self._cache.insert_snapshot(slot, sequence.space, keys, sequence.conversation)
        finally:
            self._states.remove(slot)
            self._cache.free(slot, sequence.space, keys, sequence.conversation)

    def _compute(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> Logits:
        """Replies share a pass; prompts, first tokens and media have passes of their own."""
        chunks = [self._next_chunk(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        shared = [i for i, chunk in enumerate(chunks) if len(chunk.ids) == 1 and chunk.start and chunk.media is None]
        alone = [[i] for i in range(len(chunks)) if i not in set(shared)]
        groups = [*alone, shared] if shared else alone
        with self._loses_states(sequences):
            for sequence in self._lost.intersection(sequences):
                self._recompute(sequence)
            rows = [self._run_chunks([chunks[i] for i in one], need_logits or one is shared) for one in groups]
        if len(rows) == 1:
            return self._sampler.logits(rows[0])
        order = torch.tensor([i for group in groups for i in group], device=self._device).argsort()
        return self._sampler.logits(torch.cat(rows)[order])

    def _run_chunks(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> torch.Tensor:
        """One pass. That of a prompt is divided where its attention scores take too much memory, if the model's states
        can be continued by several tokens; it isn't tried again after an error, which leaves the states undefined."""
        pairs = sum(len(chunk.ids) * (chunk.start + len(chunk.ids)) for chunk in chunks)
        if len(chunks[0].ids) > 1 and chunks[0].media is None and self._chunks and pairs > self._max_pairs:
            return self._run_halves(chunks, need_logits)
        with self._threads.scaled_for(pairs):
            return self._run_batch(self._next_batch(chunks, need_logits))

    @contextmanager
    def _loses_states(self, sequences: Sequence[SequenceState]) -> Iterator[None]:
        """Within it, an error leaves the states of these sequences undefined."""
        try:
            yield
        except BaseException:
            self._lost.update(sequences)
            raise

    def _recompute(self, sequence: SequenceState) -> None:
        """Computes the computed tokens of a sequence again, because its states are lost."""
        computed, sequence.computed_tokens = sequence.computed_tokens, 0
        try:
            if computed:
                self._run_chunks([self._next_chunk(sequence, computed)], need_logits=False)
        finally:
            sequence.computed_tokens = computed
        self._lost.discard(sequence)
