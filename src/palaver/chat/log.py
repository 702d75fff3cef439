"""The events of one turn, numbered, and its readers, who come and go.

Only what is read from tokens has a number, so that a number means the same after any crash: event n is always made
of the same tokens. How the turn stands just now (waiting, started, ended) is told to every reader beside that, and
told again to whoever comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from palaver.errors import BadParameter
from palaver.events import Event, Failed, Finished, Folded, ReadEvent, Snapshot, Started, Waiting, fold


@dataclass(frozen=True, slots=True)
class Entry:
    """`number` counts the numbered events up to here: whoever comes back asks for what is after it."""

    number: int
    event: Event


class Log:
    """Append-only. Readers never slow the writer: each has its own place in the list."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events: list[ReadEvent] = []
        self._snapshot: Snapshot | None = None
        self._standing: Waiting | Started | None = None
        self._ending: Finished | Failed | None = None
        self._changed = asyncio.Event()
        for event in events:
            self.tell(event)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def ended(self) -> bool:
        return self._ending is not None

    @property
    def started(self) -> bool:
        """Whether the turn has left the queue."""
        return isinstance(self._standing, Started)

    def tell(self, event: Event) -> None:
        match event:
            case Waiting() | Started():
                self._standing = event
            case Finished() | Failed():
                self._ending = event
            case Snapshot():
                self._snapshot = event
            case _:
                self._events.append(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def folded(self, ending: Finished | Failed | None = None) -> Folded:
        """What was said so far, ended as told."""
        return fold([*self._events, *((ending,) if ending else ())])

    def so_far(self, after: int = 0) -> list[Entry]:
        """What there is after that number, without waiting."""
        return [Entry(place + 1, self._events[place]) for place in range(after, len(self))]

    async def reaches(self, after: int) -> None:
        """Waits until all is known that was ever told of the turn. BadParameter for a number beyond that."""
        while after > len(self) and not (self.ended or self.started):  # taken up again: what it said is being read
            await self._changed.wait()
        self.check(after)

    def check(self, after: int) -> None:
        """BadParameter for a number that was not told yet; who gets a snapshot may have had any."""
        if self._snapshot is None and not 0 <= after <= len(self):
            raise BadParameter("after", after, f"the turn has {len(self)} events")

    async def read(self, after: int = 0) -> AsyncGenerator[Entry]:
        """Everything after that number, as it comes, to the end of the turn."""
        await self.reaches(after)
        at, told = after, None
        if self._snapshot is not None:
            yield Entry(at, self._snapshot)
        while True:
            changed = self._changed
            if self._standing is not told:
                told = self._standing
                assert told is not None
                yield Entry(at, told)
            while at < len(self):
                at += 1
                yield Entry(at, self._events[at - 1])
            if self._ending is not None:
                yield Entry(at, self._ending)
                return
            await changed.wait()
