"""The border between scheduler and model: token ids in, the logits after each sequence's last token out.

`SlotRunner` is the part of a runner that keeps a key and a value for each token in slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeAlias

from palaver.engines.core.kv_cache import A, KVLayout, Slot
from palaver.engines.core.prefix_cache import CacheStatistics, PrefixCache
from palaver.engines.core.request import SequenceState
from palaver.engines.core.sampler import Logits
from palaver.engines.machine import usable_cores
from palaver.errors import EngineError, PalaverError

SMALL_MODEL = 256 << 20
"""Bytes of float32 weights up to which more threads cost more than they gain."""
LARGE_PASS_PAIRS = 40_000
"""Pairs of a query and a key from which more threads gain more than their synchronisation costs."""


FATAL_ERRORS = ("AcceleratorError",)
"""Names of errors after which the device is unusable. By name, because not every version of torch has them."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Thread counts of small and of large passes."""

    small_pass: int
    large_pass: int

    @classmethod
    def choose(cls, requested: int | None, small_model: bool) -> Self:
        """All cores for a big model; half of them for small passes of a small one, whose threads mostly wait."""
        if requested is not None:
            return cls(requested, requested)
        cores = usable_cores()
        return cls(max(1, cores // 2) if small_model else cores, cores)

    def for_pairs(self, pairs: int) -> int:
        """The count for a pass with so many pairs of a query and a key."""
        return self.small_pass if pairs < LARGE_PASS_PAIRS else self.large_pass


class UnsupportedModel(Exception):
    """A runner can't run this model."""


def as_engine_error(error: Exception) -> PalaverError:
    if isinstance(error, PalaverError):
        return error
    if type(error).__name__ in FATAL_ERRORS:
        raise error
    return EngineError(f"The engine failed on this request ({type(error).__name__}: {error}).")


class PassInterrupted(Exception):
    """A pass was ended early, because its request was cancelled meanwhile. None of its tokens count as computed."""


MixedTokens: TypeAlias = Callable[[Sequence[SequenceState], int], int]
"""How many tokens of these sequences one pass may compute beside the next token of each of so many replies; 0 where one
of the sequences needs passes of its own."""


RunAhead: TypeAlias = Callable[[Sequence[SequenceState], object, Sequence[tuple[SequenceState, int]]], Logits | None]
"""Starts the pass of one token for each sequence: the device computes while the host works on the last tokens.

The tokens are in the runner's memory. They count as computed, though the sequences don't have them yet. The pairs are
other sequences, each with a number of its next tokens, which the same pass computes (where the runner mixes them). The
logits have a row for each sequence and then for each pair, as those of `run`.

Returns None where these sequences can't share a pass. Raises CacheFull before anything is computed if there is no room.
"""


VerifyDrafts: TypeAlias = Callable[[Sequence[SequenceState], Sequence[Sequence[int]]], Logits]
"""Computes the pending tokens of each sequence and its draft behind them. Returns a row of logits after the last
pending token and after each of the draft.

Only pending tokens count as computed: the caller adds the tokens of the draft that it accepts. Each row has the
bits that it has in a pass of its own. The next call may overwrite them. Raises CacheFull before anything is computed if
there is no room.
"""


ResumeCached: TypeAlias = Callable[[Sequence[SequenceState], Sequence[Logits]], Logits]
"""The cached logits of sequences that have nothing to compute, as a pass over their last tokens would return them.

`run_ahead` then goes on from their tokens as from those of a pass. The next pass may overwrite them. Call it only while
no pass runs ahead.
"""


class AheadPass:
    """A pass that the runner starts with tokens that the host has not read yet."""

    def __init__(
        self, run_ahead: RunAhead, sequences: list[SequenceState], prompts: list[tuple[SequenceState, int]]
    ) -> None:
        """`prompts`: other sequences in the same pass, each with a number of tokens that the host knows."""
        self._run_ahead = run_ahead
        self._continued = sequences
        self.prompts = prompts
        self.sequences = [*sequences, *(sequence for sequence, _ in prompts)]
        """One for each row of the logits."""
        self.logits: Logits | None = None
        """None until the pass is started, and where it can't be."""
        self.dropped: set[int] = set()
        """Rows that were computed with another token than the sequence has."""
        self.began = 0.0
        """When the host had read the tokens of the pass before: passes take as long as from then to the next time."""

    def start(self, tokens: object) -> None:
        """Best effort: what can't run ahead is computed when its tokens are known."""
        try:
            self.logits = self._run_ahead(self._continued, tokens, self.prompts)
        except Exception as error:
            as_engine_error(error)

    def drop(self, row: int) -> None:
        if self.logits is not None and row not in self.dropped:
            self.dropped.add(row)
            self.sequences[row].computed_tokens -= 1

    def drop_all(self) -> None:
        for row in range(len(self._continued)):
            self.drop(row)


class DraftModel(Protocol):
    """A smaller model with the same vocabulary, which drafts tokens for `verify_drafts`."""

    @property
    def statistics(self) -> CacheStatistics:
        """Of its own cache."""
        ...

    def propose(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """A draft of at most so many tokens behind the last one of each sequence."""
        ...

    def release(self, sequence: SequenceState) -> None: ...

    def forget(self, conversation: str) -> None: ...


class Runner(Protocol):
    @property
    def reuse(self) -> str:
        """What the prefix cache can reuse: "to the token", "snapshots" or "none: why"."""
        ...

    @property
    def supports_batching(self) -> bool:
        """Whether several sequences are computed in one pass, which fails or succeeds for all of them."""
        ...

    @property
    def prefills_last_token(self) -> bool:
        """Whether a prefill pass may include the last prompt token, if no other sequence is decoding."""
        ...

    @property
    def max_replayed(self) -> int:
        """The most tokens of a reply that are computed one at a time, as they were generated, if they are not in the
        cache. More are computed in chunks like a prompt, and so are all where that gives the same bits (0)."""
        ...

    @property
    def forward_seconds(self) -> float:
        """The calling thread's CPU time in the model's forward passes so far."""
        ...

    @property
    def uses_device(self) -> bool:
        """Whether a device computes, while the calling thread waits for it or goes on."""
        ...

    @property
    def statistics(self) -> CacheStatistics: ...

    def check_capacity(self, sequence: SequenceState) -> None:
        """Raises CacheFull if the sequence would not fit even if it ran alone."""
        ...

    def count_cached(self, sequence: SequenceState) -> int:
        """How many of the sequence's tokens are in the prefix cache. Does not allocate anything."""
        ...

    def max_chunk(self, sequence: SequenceState) -> int | None:
        """The most tokens of the sequence that one pass may compute; None if there is no limit."""
        ...

    def allocate(self, sequence: SequenceState) -> None:
        """Allocates memory for the sequence and sets its computed tokens from the prefix cache. Raises CacheFull.

        If the logits after the last token were cached too, all tokens count as computed and `cached_logits` is set.
        """
        ...

    def run(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool = True) -> Logits:
        """Computes the next `count` tokens of each sequence. Returns a row of logits for each, after its last token.

        Without `need_logits` the runner may skip work that only the logits need, and the rows may hold anything.
        Raises CacheFull before anything is computed if there is no room.
        """
        ...

    @property
    def mixed_tokens(self) -> MixedTokens | None:
        """None where prompts have passes of their own."""
        ...

    @property
    def run_ahead(self) -> RunAhead | None:
        """None where a pass can't start before the host knows its tokens."""
        ...

    @property
    def resume_cached(self) -> ResumeCached | None:
        """None where cached logits are sampled as they are."""
        ...

    @property
    def verify_drafts(self) -> VerifyDrafts | None:
        """None where a token's bits depend on the tokens that are computed in the same pass."""
        ...

    @property
    def drafts_after_prompts(self) -> bool:
        """Whether `verify_drafts` takes sequences with more than one pending token."""
        ...

    draft_model: DraftModel | None
    """Set where there is one, and `verify_drafts`."""

    def needs_recompute(self, sequence: SequenceState) -> bool:
        """Whether the whole sequence must be computed again, because it outgrew the frequencies it started with."""
        ...

    def cache_prefix(self, sequence: SequenceState, tokens: int, logits: Logits) -> None:
        """Puts the first `tokens` of the computed ones, and the logits after them, into the prefix cache. These are all
        unless `drafts_after_prompts`. The sequence runs on. `logits` is one row, which the runner must copy.

        May raise if there is no memory for a copy: cached prefixes stay as they are.
        """
        ...

    def release(self, sequence: SequenceState) -> None:
        """Frees the sequence's memory after caching its prefix. The memory is freed even if caching raises."""
        ...

    def forget(self, conversation: str) -> None:
        """Evicts the prefixes that only this conversation uses. Running sequences are not affected."""
        ...


HEADROOM = 32
"""Tokens beyond the prompt that a new slot has room for."""


class SlotRunner(ABC, Generic[A]):
    """Prefixes are reused to the token, and all sequences share a pass. A subclass computes it."""

    reuse = "to the token"
    supports_batching = True
    uses_device = False
    max_replayed = 0
    mixed_tokens: MixedTokens | None = None
    run_ahead: RunAhead | None = None
    resume_cached: ResumeCached | None = None
    verify_drafts: VerifyDrafts | None = None
    drafts_after_prompts = False
    draft_model: DraftModel | None = None

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
        return self._cache.count_cached(self._new_namespace(sequence), sequence.prefix_keys[:-1])

    def max_chunk(self, sequence: SequenceState) -> int | None:
        return None

    def needs_recompute(self, sequence: SequenceState) -> bool:
        return False

    def allocate(self, sequence: SequenceState) -> None:
        namespace, keys = self._new_namespace(sequence), sequence.prefix_keys[:-1]
        slot, cached = self._cache.allocate(namespace, keys, self._initial_tokens(sequence))
        self._slots[sequence] = slot
        sequence.cached_logits = (
            self._cache.restore_logits(slot, namespace, sequence.prefix_keys) if cached == len(keys) else None
        )
        sequence.cached_tokens = cached if sequence.cached_logits is None else len(sequence.token_ids)
        sequence.computed_tokens = sequence.cached_tokens

    def run(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool = True) -> Logits:
        self._grow_slots(sequences, counts)
        logits = self._compute(sequences, counts, need_logits)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed_tokens += count
        return logits

    def _grow_slots(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self._cache.grow(self._slots[sequence], sequence.computed_tokens + count, sequence.computed_tokens)

    def cache_prefix(self, sequence: SequenceState, tokens: int, logits: Logits) -> None:
        keys, namespace = sequence.prefix_keys[:tokens], self._namespace(sequence)
        self._cache.insert(self._slots[sequence], namespace, keys, sequence.conversation)
        self._cache.insert_logits(namespace, keys, logits)

    def release(self, sequence: SequenceState) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is None:
            return
        keys, namespace = sequence.prefix_keys[: sequence.computed_tokens], self._namespace(sequence)
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
