"""Who waits, in which order and about how long; and who of those let in gets how much of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import count

from palaver.engines.core.generation import TorchGeneration
from palaver.engines.core.request import SequenceState
from palaver.errors import QueueFull
from palaver.generation import Queued

REMEMBERED = 16
"""So many recent ends tell how fast the queue moves."""
TOLD_AT_ONCE = 64
"""How many places are looked at in a step for those whose position changed."""


@dataclass(slots=True)
class Place:
    sequence: SequenceState
    round: int
    """In each round every owner is served once."""
    number: int
    """Of its arrival: decides within a round."""


class RequestQueue:
    """The queue: in turn between owners, first come, first served within each of them.

    A request gets the round after the last one of its owner, or after the current round. Once it waits, it can only be
    overtaken by owners who joined later with fewer requests, and by each of them once a round.

    An owner may hold as many places as are left free: one alone gets half of the queue, two get a third each, and the
    last free place goes to an owner who has none.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._numbers = count()
        self._round = 0
        """The latest that somebody was let in from."""
        self._lines: dict[str, dict[TorchGeneration, Place]] = {}
        """By owner, in the order of their rounds."""
        self._preempted: dict[TorchGeneration, SequenceState] = {}
        """Were let in already, so they are the first to be let in again."""
        self._order: list[SequenceState] | None = []
        self._told: dict[TorchGeneration, int] = {}
        self._cursor = 0
        self._untold = 0
        """How many places have to be looked at, from the cursor on, until everybody knows theirs."""
        self._ends: deque[float] = deque(maxlen=REMEMBERED)
        self.version = 0
        """Changes with everything that may let somebody in."""

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._lines.values()))

    @property
    def sequences(self) -> list[SequenceState]:
        """In the order in which they will be let in, if nobody else joins."""
        if self._order is None:
            places = [place for line in self._lines.values() for place in line.values()]
            places.sort(key=lambda place: (place.round, place.number))
            self._order = [*self._preempted.values(), *(place.sequence for place in places)]
            self._untold = len(self._order)
        return self._order

    @property
    def generations(self) -> list[TorchGeneration]:
        return [sequence.generation for sequence in self.sequences]

    def add(self, sequence: SequenceState) -> None:
        """Raises QueueFull where its owner holds as many places as are free."""
        waiting = len(self)
        line = self._lines.get(sequence.owner, {})
        if len(line) >= self._limit - waiting:
            raise QueueFull(len(line) or waiting)
        if waiting == 0:
            self._ends.clear()  # how fast it moved before it was empty says nothing
        last = next(reversed(line.values())).round if line else 0
        self._lines[sequence.owner] = line
        line[sequence.generation] = Place(sequence, max(last, self._round) + 1, next(self._numbers))
        self._change()

    def put_back(self, sequence: SequenceState) -> None:
        """A running request makes way for others; it is the first to be let in again."""
        self._preempted = {sequence.generation: sequence, **self._preempted}
        self._change()

    def find(self, generation: TorchGeneration) -> SequenceState | None:
        place = self._lines.get(generation.prompt.owner, {}).get(generation)
        return self._preempted.get(generation) if place is None else place.sequence

    def admit(self, generation: TorchGeneration) -> None:
        place = self._pop(generation)
        if place is not None:
            self._round = max(self._round, place.round)

    def remove(self, generation: TorchGeneration) -> bool:
        """It leaves without being let in: those of the same owner behind it move up. False where it does not wait."""
        if self.find(generation) is None:
            return False
        place = self._pop(generation)
        if place is not None:
            free = place.round
            for behind in self._lines.get(place.sequence.owner, {}).values():
                if behind.round > free:
                    behind.round, free = free, behind.round
        return True

    def clear(self) -> None:
        self._lines.clear()
        self._preempted.clear()
        self._told.clear()
        self._change()

    def note_end(self) -> None:
        """A running request has left."""
        self._ends.append(self._clock())
        self.version += 1

    def news(self) -> Iterator[tuple[TorchGeneration, Queued]]:
        """Whose position changed since it was last told; a bounded number of them at a time."""
        order = self.sequences
        for _ in range(min(self._untold, TOLD_AT_ONCE)):
            self._cursor = self._cursor % len(order)
            generation, position = order[self._cursor].generation, self._cursor + 1
            self._cursor += 1
            self._untold -= 1
            if generation not in self._preempted and self._told.get(generation) != position:
                self._told[generation] = position
                yield generation, Queued(position, self._estimate(position))

    def _pop(self, generation: TorchGeneration) -> Place | None:
        """None where it was let in before."""
        self._change()
        self._told.pop(generation, None)
        if self._preempted.pop(generation, None) is not None:
            return None
        owner = generation.prompt.owner
        place = self._lines[owner].pop(generation)
        if not self._lines[owner]:
            del self._lines[owner]
        return place

    def _change(self) -> None:
        self._order = None
        self.version += 1

    def _estimate(self, position: int) -> float | None:
        """Seconds, by how often a place became free since there is a queue."""
        if len(self._ends) < 2:
            return None
        return position * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)


def prefill_shares(
    filling: Many[SequenceState], budget: int, most: Callable[[SequenceState], int | None]
) -> list[tuple[SequenceState, int]]:
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


def _bounded(count: int, sequence: SequenceState, most: Callable[[SequenceState], int | None]) -> int:
    """A model that must have its prompt whole gets all of it; one that takes tokens singly, one."""
    bound = most(sequence)
    return count if bound is None else min(bound, sequence.pending - 1)
