"""The runner over mlx-lm and mlx-vlm: a state for each sequence, merged while the same sequences decode together. A
probe finds out by trying what a model's caches can do."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT
from palaver.engines.core.media import integer_keys
from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import DraftModel
from palaver.engines.core.sampler import HostLogits, Logits
from palaver.engines.core.speculation import MAX_ROWS
from palaver.engines.mlx.model import ALLOCATION_TOKENS, Floats, MergedStates, MLXModel, SequenceStates
from palaver.engines.mlx.prefix_cache import CacheEntry, StateCache
from palaver.errors import CacheFull, UnsupportedContent

if TYPE_CHECKING:
    from palaver.engines.mlx.media import MlxMediaEncoder, MlxSequenceMedia

EXACT_CHUNK = 128
"""Prompt tokens of a sequence that a scheduler step computes in the exact mode."""
EXACT_ROWS = {"gpu": 16, "cpu": 2}
"""Tokens of every pass in the exact mode, by device. A GPU computes 16 rows in the time of one; on the CPU each row
takes as long."""
PROBE_TOKENS = 40


class MlxExactPasses:
    """The exact mode: each sequence alone, in passes over aligned blocks of positions.

    How a matrix product or an attention kernel rounds depends on its shape. So the block of a token is computed as a
    whole: the tokens before it again, and padding after it. Then the shape of a token's pass depends only on its
    position, however the sequence was cut into prompt and reply."""

    def __init__(self, model: MLXModel, rows: int) -> None:
        self._model = model
        self._rows = rows

    def run(self, state: SequenceStates, tokens: Sequence[int], need_logits: bool) -> Floats | None:
        """Computes the tokens that the state lacks; the logits after the last. `tokens` are all of the sequence's."""
        if not self._model.always_truncates:
            return self._run_plain(state, tokens, need_logits)
        logits: Floats | None = None
        while state.length < len(tokens):
            start = state.length - state.length % self._rows
            end = min(start + self._rows, len(tokens))
            state.truncate(start)
            block = [*tokens[start:end], *[0] * (start + self._rows - end)]
            if need_logits and end == len(tokens):
                logits = self._model.logits(state, block)[end - start - 1 : end - start]
            else:
                self._model.feed(state, block)
            state.truncate(end)
        return logits

    def run_rows(self, state: SequenceStates, tokens: Sequence[int], rows: int) -> Floats:
        """Computes the tokens that the state lacks; the logits after each of the last `rows`, which it may have to
        compute again. Where a single token has padding behind it, these have each other: no token sees later ones."""
        assert self._model.always_truncates
        first, found = len(tokens) - rows, []
        while state.length < len(tokens):
            start = state.length - state.length % self._rows
            end = min(start + self._rows, len(tokens))
            state.truncate(start)
            logits = self._model.logits(state, [*tokens[start:end], *[0] * (start + self._rows - end)])
            found.append(logits[max(0, first - start) : end - start])
            state.truncate(end)
        return np.concatenate(found)

    def _run_plain(self, state: SequenceStates, tokens: Sequence[int], need_logits: bool) -> Floats | None:
        """States that can't be cut can't be padded: the same chunks of the same sequence give the same bits."""
        ids = tokens[state.length :]
        if len(ids) > need_logits:
            self._model.feed(state, ids[: len(ids) - need_logits])
        return self._model.logits(state, ids[-1:]) if need_logits else None


def probe_exactness(model: MLXModel, passes: MlxExactPasses, vocabulary_size: int) -> str:
    """What the bits of a reply depend on in the exact mode. Rows of a mixture of experts depend on each other."""
    tokens = [(7 * place + 3) % vocabulary_size for place in range(PROBE_TOKENS)]
    whole = _logits_in_chunks(model, passes, tokens, [PROBE_TOKENS])
    if not np.array_equal(whole, _logits_in_chunks(model, passes, tokens, [PROBE_TOKENS])):
        return BY_BATCH
    if model.is_mixture or not model.always_truncates:
        return BY_CACHE
    others = ([1] * PROBE_TOKENS, [7, 22, 11], [33, 1, 6])
    alike = all(np.array_equal(whole, _logits_in_chunks(model, passes, tokens, sizes)) for sizes in others)
    return BY_TEXT if alike else BY_CACHE


def probe_drafts(model: MLXModel, passes: MlxExactPasses, vocabulary_size: int) -> bool:
    """Whether tokens have the bits that they have one by one if they are verified together, right or wrong."""
    tokens = [(7 * place + 3) % vocabulary_size for place in range(PROBE_TOKENS)]
    start = PROBE_TOKENS - MAX_ROWS
    singly, together = model.new_state(), model.new_state()
    for state in (singly, together):
        passes.run(state, tokens[:start], need_logits=False)
    expected = [passes.run(singly, tokens[:end], need_logits=True) for end in range(start + 1, PROBE_TOKENS + 1)]
    wrong = [*tokens[: start + 3], *[1] * (MAX_ROWS - 3)]
    if not np.array_equal(passes.run_rows(together, wrong, MAX_ROWS)[:3], np.concatenate(expected[:3])):  # type: ignore[arg-type]
        return False
    together.truncate(start + 3)
    return np.array_equal(passes.run_rows(together, tokens, MAX_ROWS - 3), np.concatenate(expected[3:]))  # type: ignore[arg-type]


def _logits_in_chunks(model: MLXModel, passes: MlxExactPasses, tokens: Sequence[int], sizes: Sequence[int]) -> Floats:
    state, end = model.new_state(), 0
    for size in sizes:
        end += size
        logits = passes.run(state, tokens[:end], need_logits=end == len(tokens))
    assert logits is not None
    return logits


MIN_TAIL = 32
"""Tokens that another branch would lose from which on a cached state is copied, not taken."""


class MLXRunner:
    prefills_last_token = False
    max_replayed = 0
    """mlx-lm computes the logits of every token of a pass, so the last token has a pass of its own."""

    def __init__(
        self,
        model: MLXModel,
        limit_bytes: int,
        token_bytes: int,
        merges: bool = True,
        exact: MlxExactPasses | None = None,
        encoder: MlxMediaEncoder | None = None,
        drafts: bool = False,
    ) -> None:
        """`token_bytes`: the cache of one token. `merges`: whether states of this model can be merged. `encoder`: None
        if the model takes text only. `drafts`: whether they are verified."""
        self.reuse = "to the token" if model.always_truncates else "snapshots"
        self.mixed_tokens = None
        self.run_ahead = None
        self.resume_cached = None
        self.verify_drafts = self._verify_drafts if drafts and model.always_truncates else None
        self.drafts_after_prompts = False
        self.draft_model: DraftModel | None = None
        self.uses_device = True
        self.supports_batching = True
        self.forward_seconds = 0.0
        self._model = model
        self._limit_bytes = limit_bytes
        self._token_bytes = token_bytes
        self._merges = merges and exact is None
        self._exact = exact
        self._encoder = encoder
        self._media: dict[SequenceState, MlxSequenceMedia] = {}
        """The media of running sequences that have some."""
        self._cache = StateCache()
        self._running: dict[SequenceState, CacheEntry] = {}
        self._drafted: set[SequenceState] = set()
        """Sequences whose last pass computed a draft: their states still have the tokens that were not accepted."""
        self._batch: list[SequenceState] = []
        """The sequences whose states are merged, in the order of the rows."""
        self._merged: MergedStates | None = None
        self._prompt_tokens = 0
        self._hit_tokens = 0
        self._statistics = CacheStatistics(limit_bytes)

    @property
    def statistics(self) -> CacheStatistics:
        """As of the last change: other threads read it."""
        return self._statistics

    def check_capacity(self, sequence: SequenceState) -> None:
        limit = self._limit_bytes // self._token_bytes if self._token_bytes else len(sequence.token_ids)
        if len(sequence.token_ids) > limit:
            raise CacheFull(len(sequence.token_ids), limit)

    def count_cached(self, sequence: SequenceState) -> int:
        return self._cache.find(sequence.space, sequence.integer_keys[:-1], self._shareable())[1]

    def max_chunk(self, sequence: SequenceState) -> int | None:
        """In the exact mode the chunk size must not depend on other sequences."""
        return None if self._exact is None else EXACT_CHUNK

    def needs_recompute(self, sequence: SequenceState) -> bool:
        return False

    def allocate(self, sequence: SequenceState) -> None:
        self._drop_rejected()
        tokens = sequence.integer_keys
        running = sum(self._state_bytes(len(other.token_ids)) for other in (*self._running, sequence))
        if self._running and running > self._limit_bytes:
            raise CacheFull(len(tokens), 0)
        source, cached = self._cache.find(sequence.space, tokens, self._shareable())
        sequence.cached_logits = None
        if source is not None and cached == len(tokens):
            sequence.cached_logits = source.logits.get(cached)
        if cached == len(tokens) and sequence.cached_logits is None:
            source, cached = self._cache.find(sequence.space, tokens[:-1], self._shareable())
        self._running[sequence] = self._start_from(source, cached, sequence)
        self._evict_excess(running - self._running_bytes())  # only now: the source must not go first
        sequence.computed_tokens = sequence.cached_tokens = cached
        if sequence.generation.prompt.media:
            self._attach_media(sequence)
        self._prompt_tokens += len(tokens)
        self._hit_tokens += cached
        self._count()

    def _attach_media(self, sequence: SequenceState) -> None:
        assert self._encoder is not None, "media are refused by models that don't take them"
        try:
            self._media[sequence] = self._encoder.attach(sequence)
        except BaseException:
            self.release(sequence)
            raise
        self._own_state(sequence).media = self._media[sequence]

    def run(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool = True) -> Logits:
        self._drop_rejected()
        for sequence in sequences:
            if sequence.computed_tokens < len((entry := self._running[sequence]).tokens):  # of a draft model
                self._unmerge(sequence)
                entry.truncate(sequence.computed_tokens)
        self._make_room_for_pass(sequences, counts)
        began = time.thread_time()
        try:
            if need_logits and self._can_merge(sequences, counts):
                logits = self._run_merged(sequences)
            else:
                logits = self._run_alone(sequences, counts, need_logits)
        except BaseException:
            self._drop_states(sequences)
            raise
        self.forward_seconds += time.thread_time() - began
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed_tokens += count
            self._add_tokens(sequence)
        self._count()
        return HostLogits(logits)

    def _verify_drafts(self, sequences: Sequence[SequenceState], drafts: Sequence[Sequence[int]]) -> Logits:
        """In the exact mode each row has the bits that it has alone, elsewhere up to rounding. A pass for each."""
        self._drop_rejected()
        self._make_room_for_pass(sequences, [1 + len(draft) for draft in drafts])
        began, rows = time.thread_time(), []
        try:
            for sequence, draft in zip(sequences, drafts, strict=True):
                state, tokens = self._unmerge(sequence), [*sequence.token_ids, *draft]
                if self._exact is not None:
                    rows.append(self._exact.run_rows(state, tokens, 1 + len(draft)))
                else:
                    self._complete_state(sequence)
                    rows.append(self._model.logits(state, tokens[state.length :]))
        except BaseException:
            self._drop_states(sequences)
            raise
        self.forward_seconds += time.thread_time() - began
        for sequence in sequences:
            sequence.computed_tokens += 1
        self._drafted.update(sequences)
        self._count()
        return HostLogits(np.concatenate(rows))

    def _drop_rejected(self) -> None:
        """Takes over the accepted tokens of drafts, and removes the others."""
        while self._drafted:
            sequence = self._drafted.pop()
            self._add_tokens(sequence)
            state = self._own_state(sequence)
            state.truncate(min(state.length, sequence.computed_tokens))

    def _add_tokens(self, sequence: SequenceState) -> None:
        """Those that were computed since the last call."""
        tokens = self._running[sequence].tokens
        tokens.extend(integer_keys(sequence.prefix_keys[len(tokens) : sequence.computed_tokens]))

    def cache_prefix(self, sequence: SequenceState, tokens: int, logits: Logits) -> None:
        """A state that can be cut need not be copied: running sequences are found too."""
        entry = self._running[sequence]
        entry.add_logits(tokens, logits.copy())
        if not self._model.always_truncates:
            twin = entry.copy(self._state_of(entry))
            twin.add_use(sequence.conversation, len(twin.tokens))
            self._cache.insert(twin)
            self._evict_excess(0)
        self._count()

    def release(self, sequence: SequenceState) -> None:
        entry = self._running.get(sequence)
        if entry is None:
            return
        self._drop_rejected()
        self._media.pop(sequence, None)
        try:
            state = self._unmerge(sequence)
        except BaseException:
            self._drop_states([sequence])
            raise
        finally:
            del self._running[sequence]
        state.media = None
        if state.length and entry.is_complete:
            state.compact()
            entry.add_use(sequence.conversation, len(entry.tokens))
            self._cache.insert(entry)
            self._evict_excess(0)
        if not self._running:
            mx.clear_cache()
        self._count()

    def forget(self, conversation: str) -> None:
        self._cache.forget(conversation)
        self._count()

    def _shareable(self) -> list[CacheEntry]:
        """Entries of running sequences that others may start from. After a failed pass a state lacks tokens."""
        if not self._model.always_truncates:
            return []
        return [entry for entry in self._running.values() if entry.state is None or entry.is_complete]

    def _start_from(self, source: CacheEntry | None, tokens: int, sequence: SequenceState) -> CacheEntry:
        """The entry of a sequence that begins with the first tokens of another one."""
        if source is None:
            entry = CacheEntry(sequence.space, array("q"), self._model.new_state())
        elif source in self._cache and self._model.always_truncates and len(source.tokens) - tokens < MIN_TAIL:
            self._cache.remove(source)
            entry = source
            entry.truncate(tokens)
        else:
            if source in self._cache:
                self._cache.touch(source)
            entry = source.copy(self._state_of(source))
            entry.truncate(tokens)
        entry.add_use(sequence.conversation, tokens)
        return entry

    def _state_of(self, entry: CacheEntry) -> SequenceStates:
        if entry.state is not None:
            return entry.state
        assert self._merged is not None
        row = next(row for row, sequence in enumerate(self._batch) if self._running.get(sequence) is entry)
        return self._merged.extract(row)

    def _can_merge(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> bool:
        """Merged states are as long as the longest of them, which may be more than the limit."""
        single_tokens = len(sequences) > 1 and all(count == 1 for count in counts)
        longest = max(len(sequence.token_ids) for sequence in sequences)
        return self._merges and single_tokens and len(sequences) * self._state_bytes(longest) <= self._limit_bytes

    def _run_alone(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> Floats:
        rows: list[Floats] = []
        for sequence, count in zip(sequences, counts, strict=True):
            state = self._unmerge(sequence)
            tokens = sequence.token_ids[: sequence.computed_tokens + count]
            row = self._compute(state, tokens, need_logits)
            if row is not None:
                rows.append(row)
        return np.concatenate(rows) if rows else np.empty((len(sequences), 0), np.float32)

    def _compute(self, state: SequenceStates, tokens: Sequence[int], need_logits: bool) -> Floats | None:
        """Computes what the state lacks of these tokens; after a failed pass that is more than the scheduler asked."""
        if self._exact is not None:
            return self._exact.run(state, tokens, need_logits)
        ids = tokens[state.length :]
        if len(ids) > need_logits:
            self._model.feed(state, ids[: len(ids) - need_logits])
        return self._model.logits(state, ids[-1:]) if need_logits else None

    def _run_merged(self, sequences: Sequence[SequenceState]) -> Floats:
        merged = self._merge(sequences)
        ids = [sequence.token_ids[sequence.computed_tokens] for sequence in self._batch]
        logits = self._model.merged_logits(merged, ids)
        if self._batch == list(sequences):
            return logits
        rows = {sequence: row for row, sequence in enumerate(self._batch)}
        return logits[[rows[sequence] for sequence in sequences]]

    def _merge(self, sequences: Sequence[SequenceState]) -> MergedStates:
        """The merged states of exactly these sequences. Rows that are merged already stay."""
        for sequence in [sequence for sequence in self._batch if sequence not in set(sequences)]:
            self._unmerge(sequence)
        added = [sequence for sequence in sequences if self._running[sequence].state is not None]
        states = [self._complete_state(sequence) for sequence in added]
        if self._merged is None:
            self._merged = MergedStates(states)
        elif states:
            self._merged.add(states)
        self._batch += added
        for sequence in added:
            self._running[sequence].state = None
        return self._merged

    def _complete_state(self, sequence: SequenceState) -> SequenceStates:
        """The sequence's own state; after a failed pass it lacks tokens, which are computed again."""
        state = self._own_state(sequence)
        if state.length < sequence.computed_tokens:
            self._model.feed(state, sequence.token_ids[state.length : sequence.computed_tokens])
        return state

    def _own_state(self, sequence: SequenceState) -> SequenceStates:
        """The state of a sequence that is not merged."""
        state = self._running[sequence].state
        assert state is not None
        return state

    def _unmerge(self, sequence: SequenceState) -> SequenceStates:
        """The sequence's state, which is its own from now on."""
        entry = self._running[sequence]
        if entry.state is None:
            assert self._merged is not None
            entry.state = self._state_of(entry)
            kept = [row for row, other in enumerate(self._batch) if other is not sequence]
            self._batch = [self._batch[row] for row in kept]
            if kept:
                self._merged.keep(kept)
            else:
                self._merged = None
        return entry.state

    def _drop_states(self, sequences: Sequence[SequenceState]) -> None:
        """After a failed pass, whose arrays may hold anything: these sequences are computed again from the start."""
        failed = {*sequences, *self._batch}
        self._batch, self._merged = [], None
        for sequence in failed:
            self._running[sequence].state = state = self._model.new_state()
            state.media = self._media.get(sequence)
        self._count()

    def _state_bytes(self, tokens: int) -> int:
        return -(-tokens // ALLOCATION_TOKENS) * ALLOCATION_TOKENS * self._token_bytes

    def _make_room_for_pass(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        """Raises CacheFull unless the states can grow by these tokens."""
        lengths = [s.computed_tokens + count for s, count in zip(sequences, counts, strict=True)]
        others = [entry for sequence, entry in self._running.items() if sequence not in set(sequences)]
        needed = sum(map(self._state_bytes, lengths)) + sum(self._state_bytes(len(entry.tokens)) for entry in others)
        self._evict_excess(needed - self._running_bytes())
        if needed > self._limit_bytes:
            raise CacheFull(max(lengths), self._limit_bytes // max(1, self._token_bytes))

    def _evict_excess(self, growth: int) -> None:
        """Evicts cached states until those that run can grow by so many bytes."""
        while self._running_bytes() + max(0, growth) + self._cache.nbytes > self._limit_bytes and self._cache.evict():
            pass

    def _running_bytes(self) -> int:
        merged = 0 if self._merged is None else self._merged.nbytes
        return merged + sum(entry.nbytes for entry in self._running.values())

    def _count(self) -> None:
        self._statistics = CacheStatistics(
            self._limit_bytes,
            self._running_bytes() + self._cache.nbytes,
            self._cache.nbytes,
            self._prompt_tokens,
            self._hit_tokens,
            self._cache.evictions,
        )


LENGTH = 24
"""Tokens of the probe's text."""
TOLERANCE = 0.02
"""Relative to the largest logit. What differs more is not rounding."""


class MlxProbe:
    """What a model's caches can do. A trial that raises is a no."""

    def __init__(self, module: Any, encoder: MlxMediaEncoder | None = None) -> None:
        """`encoder`: of a model of mlx-vlm."""
        self._encoder = encoder
        self._model = MLXModel(module, None if encoder is None else encoder.decoder)
        state = self._model.new_state()
        self.vocabulary_size = self._model.logits(state, [0]).shape[-1]
        self.token_bytes = self._model.token_bytes(state)
        self._ids = [(7 * place + 3) % self.vocabulary_size for place in range(LENGTH + 1)]
        self._expected = self._model.logits(self._fed(LENGTH), self._ids[LENGTH:])

    def make_runner(
        self, limit_bytes: int, exact_rows: int | None = None, drafts: bool | None = None
    ) -> tuple[MLXRunner, str]:
        """The runner, and what the bits of a reply depend on. `exact_rows`: of a pass; None: not in the exact mode.
        `drafts`: as in `EngineOptions`."""
        if self._model.always_truncates:
            self._model.always_truncates = _succeeds(self._truncates)
        passes = None if exact_rows is None else MlxExactPasses(self._model, exact_rows)
        exactness = BY_BATCH if passes is None else probe_exactness(self._model, passes, self.vocabulary_size)
        merges = passes is None and _succeeds(self._merges)
        verifies = bool(drafts)
        if passes is not None:
            verifies = drafts is not False and exactness == BY_TEXT
            verifies = verifies and probe_drafts(self._model, passes, self.vocabulary_size)
        runner = MLXRunner(self._model, limit_bytes, self.token_bytes, merges, passes, self._encoder, verifies)
        return runner, exactness

    def check_media(self) -> None:
        """Raises UnsupportedContent unless an item of each kind in the middle of a prompt, computed in two passes that
        divide it, gives the logits that mlx-vlm's own pass over the whole prompt gives."""
        assert self._encoder is not None
        for kind in self._encoder.placeholders:
            self._check_media(self._encoder, kind)

    def _check_media(self, encoder: MlxMediaEncoder, kind: str) -> None:
        ids, item, media = encoder.probe_prompt(kind)
        expected = encoder.decoder.reference_logits(ids, item)
        state, middle = self._model.new_state(), len(ids) // 2
        state.media = media
        self._model.feed(state, ids[:middle])
        self._model.feed(state, ids[middle:-1])
        if not _is_close(self._model.logits(state, ids[-1:]), expected):
            raise UnsupportedContent(f"mlx-vlm computes {kind} of this model in a way that is not supported here.")

    def _fed(self, tokens: int) -> SequenceStates:
        state = self._model.new_state()
        self._model.feed(state, self._ids[:tokens])
        return state

    def _truncates(self) -> bool:
        """Whether a copy that is cut goes on as if the rest had never been, and leaves the original alone."""
        original = self._fed(LENGTH)
        copy = original.copy()
        copy.truncate(LENGTH // 2)
        self._model.feed(copy, [1, 2, 3])
        copy.truncate(LENGTH // 2)
        self._model.feed(copy, self._ids[LENGTH // 2 : LENGTH])
        return all(self._is_expected(self._model.logits(state, self._ids[LENGTH:])) for state in (copy, original))

    def _merges(self) -> bool:
        """Whether a sequence has the logits it has alone if it is merged with shorter ones, joined and left by others,
        and taken out again."""
        short, joining = self._fed(3), self._fed(LENGTH // 2)
        merged = MergedStates([self._fed(LENGTH - 2), short])
        self._model.merged_logits(merged, [self._ids[LENGTH - 2], 1])
        merged.add([joining])
        self._model.merged_logits(merged, [self._ids[LENGTH - 1], 2, 3])
        merged.keep([0, 2])
        alone = merged.extract(0)
        rows = self._model.merged_logits(merged, [self._ids[LENGTH], 4])
        return self._is_expected(rows[:1]) and self._is_expected(self._model.logits(alone, self._ids[LENGTH:]))

    def _is_expected(self, logits: Floats) -> bool:
        return _is_close(logits, self._expected)


def _is_close(logits: Floats, expected: Floats) -> bool:
    return bool(np.abs(logits - expected).max() <= TOLERANCE * max(1.0, float(np.abs(expected).max())))


def _succeeds(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except Exception:
        return False
