"""How the model is run: tokens of sequences in, logits after the last of each out."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from torch import Tensor

from palaver.engines.core.request import SequenceState
from palaver.engines.torch.prefix_cache import CacheStatistics


class Runner(Protocol):
    @property
    def reuse(self) -> str:
        """What is reused of what was computed before: "to the token", "snapshots" or "none: why"."""
        ...

    @property
    def batches(self) -> bool:
        """Whether sequences are computed in one pass, which fails or succeeds for all of them."""
        ...

    @property
    def closes(self) -> bool:
        """Whether the last token of a prompt may be computed with those before it, where nobody else waits for one."""
        ...

    @property
    def forward_seconds(self) -> float:
        """The CPU time of this thread that the model itself took, so far."""
        ...

    @property
    def statistics(self) -> CacheStatistics: ...

    def check(self, sequence: SequenceState) -> None:
        """Raises CacheFull where the sequence could not run even alone."""
        ...

    def known(self, sequence: SequenceState) -> int:
        """How many of its tokens are kept from others."""
        ...

    def most(self, sequence: SequenceState) -> int | None:
        """How many of its tokens may be computed at once; None: any number."""
        ...

    def begin(self, sequence: SequenceState) -> None:
        """Makes room and sets how many tokens are computed already. Raises CacheFull.

        Those are all of them only where the logits after the last were kept too: then they are the sequence's logits.
        """
        ...

    def run(self, sequences: Many[SequenceState], counts: Many[int], asked: bool = True) -> Tensor:
        """Computes the next `count` tokens of each; a row of logits for each, after the last of them.

        Where nobody asks for logits, what leads to nothing else may be left out, and any may come back. Raises
        CacheFull before anything is computed where there is no room.
        """
        ...

    def outgrown(self, sequence: SequenceState) -> bool:
        """Whether all of the sequence must be computed anew, because it has become too long for how it was begun."""
        ...

    def keep(self, sequence: SequenceState, logits: Tensor) -> None:
        """Keeps for others what is computed so far, and the logits after it; the sequence goes on.

        May raise where there is no memory for a copy: what was kept before stays as it is.
        """
        ...

    def end(self, sequence: SequenceState) -> None:
        """The sequence leaves; what was computed is kept. What it held is free even where keeping raises."""
        ...

    def forget(self, conversation: str) -> None:
        """Frees what is kept of the conversation's sequences and used by no other; those that run stay."""
        ...
