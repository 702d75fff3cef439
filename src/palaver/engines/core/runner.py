"""The border between scheduler and model: token ids in, the logits after each sequence's last token out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from palaver.engines.core.logits import Logits
from palaver.engines.core.request import SequenceState


class UnsupportedModel(Exception):
    """A runner can't run this model."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The memory of a runner's cache, and its hits and evictions since the model was loaded."""

    limit_bytes: int = 0
    used_bytes: int = 0
    kept_bytes: int = 0
    """The part of the used bytes that may be evicted."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """The prompt tokens that didn't have to be computed."""
    evictions: int = 0


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
    def forward_seconds(self) -> float:
        """The calling thread's CPU time in the model's forward passes so far."""
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

    def needs_recompute(self, sequence: SequenceState) -> bool:
        """Whether the whole sequence must be computed again, because it outgrew the frequencies it started with."""
        ...

    def cache_prefix(self, sequence: SequenceState, logits: Logits) -> None:
        """Puts the tokens computed so far, and the logits after them, into the prefix cache. The sequence runs on.
        `logits` is one row, which the runner must copy.

        May raise if there is no memory for a copy: cached prefixes stay as they are.
        """
        ...

    def release(self, sequence: SequenceState) -> None:
        """Frees the sequence's memory after caching its prefix. The memory is freed even if caching raises."""
        ...

    def forget(self, conversation: str) -> None:
        """Evicts the prefixes that only this conversation uses. Running sequences are not affected."""
        ...
