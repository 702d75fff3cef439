"""Who waits, in which order and about how long; and who of those let in gets how much of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

from palaver.engines.torch.generation import Generation
from palaver.engines.torch.sequence import Sequence
from palaver.errors import QueueFull
from palaver.generation import Queued

REMEMBERED = 16
"""So many recent ends tell how fast the queue moves."""


class Waiting:
    """First come, first served, and no more than may wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._line: dict[Generation, Sequence] = {}
        self._told: dict[Generation, int] = {}
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._line)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._line.values())

    @property
    def generations(self) -> list[Generation]:
        return list(self._line)

    def add(self, sequence: Sequence) -> None:
        if len(self._line) >= self._most:
            raise QueueFull(len(self._line))
        self._line[sequence.generation] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """It was let in already, so it is the first to be let in again."""
        self._line = {sequence.generation: sequence, **self._line}
        self._told[sequence.generation] = 1

    def find(self, generation: Generation) -> Sequence | None:
        return self._line.get(generation)

    def remove(self, generation: Generation) -> bool:
        self._told.pop(generation, None)
        return self._line.pop(generation, None) is not None

    admit = remove

    def clear(self) -> None:
        self._line.clear()
        self._told.clear()

    def note_end(self) -> None:
        self._ends.append(time.monotonic())

    def news(self) -> Iterator[tuple[Generation, Queued]]:
        """Whose place changed since it was last told."""
        for position, generation in enumerate(self._line, 1):
            if self._told.get(generation) != position:
                self._told[generation] = position
                yield generation, Queued(position, self._estimate(position))

    def _estimate(self, position: int) -> float | None:
        """Seconds, by how often a place became free lately."""
        if len(self._ends) < 2:
            return None
        return position * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)


def shares(filling: Many[Sequence], budget: int, most: Callable[[Sequence], int | None]) -> list[tuple[Sequence, int]]:
    """How many prompt tokens of each sequence a step computes; all but the last token of each is prompt.

    The oldest gets at least half, so that it gets done; then the shortest, so that it needn't wait for long ones.
    """
    if not filling:
        return []
    oldest = filling[0]
    given = {oldest: min(oldest.pending - 1, max(1, budget // 2))}
    left = budget - given[oldest]
    for sequence in [*sorted(filling[1:], key=lambda s: s.pending), oldest]:
        if left > 0:
            more = min(sequence.pending - 1 - given.get(sequence, 0), left)
            given[sequence] = given.get(sequence, 0) + more
            left -= more
    return [(sequence, _bounded(count, sequence, most)) for sequence, count in given.items() if count > 0]


def _bounded(count: int, sequence: Sequence, most: Callable[[Sequence], int | None]) -> int:
    """A model that must have its prompt whole gets all of it; one that takes tokens singly, one."""
    bound = most(sequence)
    return count if bound is None else min(bound, sequence.pending - 1)
