"""Streams that outlive their connections: after a cut they go on from the last number."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from palaver.chat.interface import Change
from palaver.chat.log import Entry
from palaver.client.connection import Connection, Cut, Query, read_sent
from palaver.client.errors import NoServer
from palaver.events import Failed, Finished, Snapshot, Started, Waiting
from palaver.wire import events as wire
from palaver.wire.sse import Sent

MISSED = Change("", "missed")
"""Told after a cut: what changed meanwhile is not known."""


class Reopened:
    """Stands between what was sent over one connection and what over the next, and at the very beginning."""


REOPENED = Reopened()


async def lasting(connection: Connection, path: str, query: Callable[[], Query]) -> AsyncGenerator[Sent | Reopened]:
    """What is sent, over as many connections as it takes. It has no end: whoever reads knows when it is enough."""
    patience = connection.patience()
    while True:
        why = "it closed the stream"
        try:
            async with connection.stream(path, query()) as stream:
                yield REOPENED
                async for sent in stream:
                    patience = connection.patience()
                    if sent.event == "closing":
                        break
                    yield sent
        except Cut as cut:
            why = str(cut)
        if patience.over:
            raise NoServer(connection.url, why)
        await patience.pause()


@dataclass
class Place:
    """How far a turn has been read."""

    number: int
    standing: Waiting | Started | Snapshot | None = None

    def take(self, entry: Entry) -> bool:
        """Whether the entry is new: how the turn stands is told again after a cut."""
        match entry.event:
            case Waiting() | Started() | Snapshot():
                known = entry.event == self.standing
                self.standing = entry.event
                self.number = max(self.number, entry.number)
                return not known
            case Finished() | Failed():
                return True
            case _:
                known = entry.number <= self.number
                self.number = max(self.number, entry.number)
                return not known


async def entries(sent: AsyncIterator[Sent | Reopened], place: Place) -> AsyncGenerator[Entry]:
    """The turn's events, each once, to its end."""
    async for one in sent:
        if isinstance(one, Reopened):
            continue
        entry: Entry = read_sent(one, wire.Entry).value()
        if place.take(entry):
            yield entry
        if isinstance(entry.event, Finished | Failed):
            return


async def changes(sent: AsyncIterator[Sent | Reopened]) -> AsyncGenerator[Change]:
    async for one in sent:
        if isinstance(one, Reopened):
            yield MISSED
            continue
        item = read_sent(one, wire.StreamItem)
        if isinstance(item, wire.Changed):
            yield item.change.value()
