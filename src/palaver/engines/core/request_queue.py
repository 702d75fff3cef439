"""The queue of waiting requests, fair between owners: whose turn it is, and when the queue is full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from palaver.engines.core.generation import LocalGeneration
from palaver.errors import QueueFull
from palaver.generation import Queued

ESTIMATE_WINDOW = 16
"""Recent finishes from which the queue's speed is estimated."""
MAX_POSITION_UPDATES = 64
"""Queue entries that are checked for a changed position in a step."""


class QueuedSequence(Protocol):
    """What the queue needs to know about a request."""

    @property
    def generation(self) -> LocalGeneration: ...

    @property
    def owner(self) -> str: ...


S = TypeVar("S", bound=QueuedSequence)


@dataclass(slots=True)
class QueueEntry(Generic[S]):
    sequence: S
    round: int
    """In each round every owner is served once."""
    number: int
    """Arrival number: decides the order within a round."""


class RequestQueue(Generic[S]):
    """Round robin between owners, first come, first served within each owner.

    A request gets the round after its owner's last request, or after the current round. Once it waits, only owners who
    joined later with fewer requests can overtake it, each of them once a round.

    An owner may hold as many places as are left free: one alone gets half of the queue, two get a third each, and the
    last free place goes to an owner who has none.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._numbers = count()
        self._round = 0
        """The latest round from which a request was admitted."""
        self._by_owner: dict[str, dict[LocalGeneration, QueueEntry[S]]] = {}
        """Each owner's entries are in the order of their rounds."""
        self._preempted: dict[LocalGeneration, S] = {}
        """Requests that ran before: they are admitted first."""
        self._order: list[S] | None = []
        self._reported: dict[LocalGeneration, int] = {}
        """The last reported position of each request."""
        self._cursor = 0
        self._unchecked = 0
        """Entries from the cursor on whose positions have to be checked for changes."""
        self._finish_times: deque[float] = deque(maxlen=ESTIMATE_WINDOW)
        self.version = 0
        """Changes whenever an admission may succeed that failed before."""

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._by_owner.values()))

    @property
    def sequences(self) -> list[S]:
        """In the order of admission, if no other request joins."""
        if self._order is None:
            entries = [entry for line in self._by_owner.values() for entry in line.values()]
            entries.sort(key=lambda entry: (entry.round, entry.number))
            self._order = [*self._preempted.values(), *(entry.sequence for entry in entries)]
            self._unchecked = len(self._order)
        return self._order

    @property
    def generations(self) -> list[LocalGeneration]:
        return [sequence.generation for sequence in self.sequences]

    def add(self, sequence: S) -> None:
        """Raises QueueFull if the owner holds as many places as are free."""
        waiting = len(self)
        line = self._by_owner.get(sequence.owner, {})
        if len(line) >= self._limit - waiting:
            raise QueueFull(len(line) or waiting)
        if waiting == 0:
            self._finish_times.clear()  # the speed before the queue was empty predicts nothing
        last = next(reversed(line.values())).round if line else 0
        self._by_owner[sequence.owner] = line
        line[sequence.generation] = QueueEntry(sequence, max(last, self._round) + 1, next(self._numbers))
        self._invalidate()

    def requeue(self, sequence: S) -> None:
        """Puts a preempted request at the head of the queue."""
        self._preempted = {sequence.generation: sequence, **self._preempted}
        self._invalidate()

    def find(self, generation: LocalGeneration) -> S | None:
        entry = self._by_owner.get(generation.prompt.owner, {}).get(generation)
        return self._preempted.get(generation) if entry is None else entry.sequence

    def admit(self, generation: LocalGeneration) -> None:
        entry = self._pop(generation)
        if entry is not None:
            self._round = max(self._round, entry.round)

    def remove(self, generation: LocalGeneration) -> bool:
        """Removes a request without admitting it: later requests of its owner move up. Returns False if it does not
        wait."""
        if self.find(generation) is None:
            return False
        entry = self._pop(generation)
        if entry is not None:
            free = entry.round
            for later in self._by_owner.get(entry.sequence.owner, {}).values():
                if later.round > free:
                    later.round, free = free, later.round
        return True

    def clear(self) -> None:
        self._by_owner.clear()
        self._preempted.clear()
        self._reported.clear()
        self._invalidate()

    def record_finish(self) -> None:
        """Call when a running request has finished."""
        self._finish_times.append(self._clock())
        self.version += 1

    def position_updates(self) -> Iterator[tuple[LocalGeneration, Queued]]:
        """Requests whose position changed since it was last reported; a bounded number in each call."""
        order = self.sequences
        for _ in range(min(self._unchecked, MAX_POSITION_UPDATES)):
            self._cursor = self._cursor % len(order)
            generation, position = order[self._cursor].generation, self._cursor + 1
            self._cursor += 1
            self._unchecked -= 1
            if generation not in self._preempted and self._reported.get(generation) != position:
                self._reported[generation] = position
                yield generation, Queued(position, self._estimate(position))

    def _pop(self, generation: LocalGeneration) -> QueueEntry[S] | None:
        """None for a preempted request."""
        self._invalidate()
        self._reported.pop(generation, None)
        if self._preempted.pop(generation, None) is not None:
            return None
        owner = generation.prompt.owner
        entry = self._by_owner[owner].pop(generation)
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        return entry

    def _invalidate(self) -> None:
        self._order = None
        self.version += 1

    def _estimate(self, position: int) -> float | None:
        """Seconds until admission, from how often requests finished since the queue formed."""
        if len(self._finish_times) < 2:
            return None
        return position * (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)
