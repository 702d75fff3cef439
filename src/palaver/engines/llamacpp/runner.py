"""The runner over llama.cpp: sequences in slots of a context, computed together in one pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.media import integer_keys
from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import DraftModel, PassInterrupted
from palaver.engines.core.sampler import HostLogits, Logits
from palaver.engines.llamacpp.context import Aborted, Context, EncodedPiece, Floats, NoRoom
from palaver.engines.llamacpp.media import Projector
from palaver.engines.llamacpp.passes import Chunk, Passes, run_rows
from palaver.engines.llamacpp.sequence_cache import CachedSequence, NoSlot, SequenceCache
from palaver.engines.llamacpp.state_files import StateFiles
from palaver.errors import CacheFull, EngineClosed

T = TypeVar("T")


class LlamaRunner:
    def __init__(
        self,
        context: Context,
        passes: Passes,
        limit_bytes: int,
        host_bytes: int,
        token_bytes: int,
        truncates: bool = True,
        files: StateFiles | None = None,
        projector: Projector | None = None,
        uses_device: bool = False,
    ) -> None:
        """`host_bytes`: the part of the limit for saved states. `token_bytes`: the cache of one token. `files`: where
        the states of conversations are stored; None: nowhere. `projector`: None if the model takes text only."""
        self.reuse = "to the token" if truncates else "snapshots"
        self.mixed_tokens = None
        self.run_ahead = None
        self.resume_cached = None
        self.verify_drafts = self._verify_drafts if context.settings.draft_rows and truncates else None
        self.drafts_after_prompts = False
        self.draft_model: DraftModel | None = None
        self.uses_device = uses_device
        self.supports_batching = True
        self.prefills_last_token = passes.prefills_last_token
        self.max_replayed = passes.max_replayed
        self.forward_seconds = 0.0
        self._context = context
        self._passes = passes
        self._limit_bytes = limit_bytes
        self._token_bytes = token_bytes
        self._cache = SequenceCache(context, context.settings.sequences, truncates, host_bytes, files)
        self._files = files
        self._projector = projector
        self._pieces: dict[SequenceState, dict[int, EncodedPiece]] = {}
        """The media of each sequence that are not computed yet, by their places."""
        self._slots: dict[SequenceState, CachedSequence] = {}
        self._drafted: set[SequenceState] = set()
        """Sequences whose last pass computed a draft: the context still has the tokens that were not accepted."""
        self._draft_logits: Floats | None = None
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
        return self._cache.count_cached(sequence.space, sequence.integer_keys[:-1])

    def max_chunk(self, sequence: SequenceState) -> int | None:
        return self._passes.max_chunk

    def allocate(self, sequence: SequenceState) -> None:
        self._drop_rejected()
        space, tokens = sequence.space, sequence.integer_keys
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
        if sequence.generation.prompt.media:
            self._attach_media(sequence)
        self._prompt_tokens += len(tokens)
        self._hit_tokens += cached

    def _attach_media(self, sequence: SequenceState) -> None:
        assert self._projector is not None, "media are refused by models that don't take them"
        try:
            self._pieces[sequence] = self._projector.attach(sequence)
        except BaseException:
            self.release(sequence)
            raise

    def run(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool = True) -> Logits:
        self._drop_rejected()
        for sequence in sequences:
            if sequence.computed_tokens < len((slot := self._slots[sequence]).tokens):  # of a draft model
                self._cache.cut(slot, sequence.computed_tokens)
        self._check_room(sequences, counts)
        ends = [sequence.computed_tokens + count for sequence, count in zip(sequences, counts, strict=True)]
        began = time.thread_time()
        self._start_pass([sequence.generation for sequence in sequences])
        try:
            starts = self._run_media(sequences, ends)
            chunks = [self._chunk(*place) for place in zip(sequences, starts, ends, strict=True)]
            logits = self._compute(chunks, need_logits)
        except BaseException:
            self._restore_lengths([self._chunk(sequence, sequence.computed_tokens, 0) for sequence in sequences])
            raise
        finally:
            self._start_pass([])
        self.forward_seconds += time.thread_time() - began
        for sequence, end in zip(sequences, ends, strict=True):
            self._advance(sequence, end)
        return HostLogits(logits)

    def _verify_drafts(self, sequences: Sequence[SequenceState], drafts: Sequence[Sequence[int]]) -> Logits:
        """The logits are those of single tokens up to rounding."""
        self._drop_rejected()
        self._check_room(sequences, [1 + len(draft) for draft in drafts])
        chunks = [
            Chunk(self._slots[sequence].id, sequence.computed_tokens, [sequence.token_ids[-1], *draft])
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]
        if self._draft_logits is None:
            settings = self._context.settings
            self._draft_logits = np.empty((settings.draft_rows, self._context.vocabulary_size), np.float32)
        logits = self._draft_logits[: sum(len(chunk.ids) for chunk in chunks)]
        began = time.thread_time()
        self._start_pass([sequence.generation for sequence in sequences])
        try:
            self._attempt(lambda: run_rows(self._context, chunks, logits), chunks)
        finally:
            self._start_pass([])
        self.forward_seconds += time.thread_time() - began
        for sequence in sequences:
            self._advance(sequence, sequence.computed_tokens + 1)
        self._drafted.update(sequences)
        return HostLogits(logits)

    def _drop_rejected(self) -> None:
        """Takes over the accepted tokens of drafts, and removes the others."""
        while self._drafted:
            sequence = self._drafted.pop()
            slot, end = self._slots[sequence], sequence.computed_tokens
            self._cache.advance(slot, integer_keys(sequence.prefix_keys[len(slot.tokens) : end]))
            self._cache.cut(slot, end)

    def _advance(self, sequence: SequenceState, end: int) -> None:
        """The tokens up to `end` were computed."""
        keys = integer_keys(sequence.prefix_keys[sequence.computed_tokens : end])
        self._cache.advance(self._slots[sequence], keys)
        sequence.computed_tokens = end

    def _run_media(self, sequences: Sequence[SequenceState], ends: Sequence[int]) -> list[int]:
        """Computes the media of each sequence before its end, one piece after the other, and the text before them.
        Returns where the text begins that is left."""
        starts = []
        for sequence, end in zip(sequences, ends, strict=True):
            start = sequence.computed_tokens
            for place, piece in sorted(self._pieces.get(sequence, {}).items()):
                if start <= place < end:
                    self._compute([self._chunk(sequence, start, place)], need_logits=False)
                    self._compute_piece(self._slots[sequence].id, place, piece)
                    start = place + piece.tokens
            starts.append(start)
        return starts

    def _compute_piece(self, sequence: int, start: int, piece: EncodedPiece) -> None:
        assert self._projector is not None
        projector = self._projector.pointer
        chunk = Chunk(sequence, start, range(piece.tokens))
        self._attempt(lambda: self._context.decode_media(sequence, start, projector, piece), [chunk])

    def _chunk(self, sequence: SequenceState, start: int, end: int) -> Chunk:
        prompt_end = len(sequence.generation.prompt.context_ids)
        is_last = sequence.replays or end in (prompt_end, len(sequence.token_ids))
        generated = is_last and end > prompt_end - (not self.prefills_last_token)
        return Chunk(self._slots[sequence].id, start, sequence.token_ids[start:end], generated)

    def needs_recompute(self, sequence: SequenceState) -> bool:
        return False

    def cache_prefix(self, sequence: SequenceState, tokens: int, logits: Logits) -> None:
        self._cache.save_running(self._slots[sequence], sequence.conversation)
        self._cache.insert_logits(sequence.space, sequence.integer_keys[:tokens], logits, sequence.conversation)

    def release(self, sequence: SequenceState) -> None:
        self._pieces.pop(sequence, None)
        if sequence in self._slots:
            self._drop_rejected()
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._cache.release(slot, sequence.conversation)

    def forget(self, conversation: str) -> None:
        self._cache.forget(conversation)

    def use_idle_time(self) -> bool:
        """Stores a state or opens a context while there is nothing else to do. Returns False if nothing is left."""
        return self._cache.store_idle() or self._context.open_next()

    def close(self) -> None:
        """Stores what is not stored yet. Call after the last pass, before the context is closed."""
        if self._files is not None:
            self._cache.store_all()
            self._files.close()

    def interrupt(self, generation: LocalGeneration) -> None:
        """Ends the pass that runs now if it is for this generation alone, which was cancelled. From any thread."""
        with self._lock:
            if self._in_pass == [generation]:
                self._context.interrupt()

    def _start_pass(self, generations: list[LocalGeneration]) -> None:
        """Sets the generations of the current pass, and clears an earlier interrupt."""
        with self._lock:
            self._in_pass = generations
            self._context.allow_passes()

    def _check_room(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            needed = sequence.computed_tokens + count
            if needed > self._max_tokens:
                raise CacheFull(needed, self._max_tokens)

    def _compute(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        """A row of logits for each chunk; zeros for one without tokens, whose sequence computed media only."""
        with_text = [row for row, chunk in enumerate(chunks) if chunk.ids]
        if len(with_text) == len(chunks):
            return self._attempt(lambda: self._passes.run(chunks, need_logits), chunks)
        logits = np.zeros((len(chunks), self._context.vocabulary_size), np.float32)
        if with_text:
            rows = self._compute([chunks[row] for row in with_text], need_logits)
            logits[with_text] = rows if need_logits else 0
        return logits

    def _attempt(self, decode: Callable[[], T], chunks: Sequence[Chunk]) -> T:
        """Computes the chunks. Where the cells that all sequences share are full, idle sequences are evicted."""
        while True:
            try:
                return decode()
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
