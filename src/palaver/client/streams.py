"""Streams that outlive their connections: after a cut they go on from the last number."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from palaver.chat.interface import ConversationChange
from palaver.chat.turn_log import LogEntry
from palaver.client.connection import Connection, ConnectionLost, NoServer, Query, parse_event
from palaver.events import Failed, Finished, Snapshot, Started, Waiting
from palaver.wire import events as wire
from palaver.wire.sse import Sent

MISSED = ConversationChange("", "missed")
"""Told after a cut: what changed meanwhile is not known."""


class Reconnected:
    """Stands between what was sent over one connection and what over the next, and at the very beginning."""


REOPENED = Reconnected()


async def resumable_stream(
    connection: Connection, path: str, query: Callable[[], Query]
) -> AsyncGenerator[Sent | Reconnected]:
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
        except ConnectionLost as cut:
            why = str(cut)
        if patience.over:
            raise NoServer(connection.url, why)
        await patience.pause()


@dataclass
class StreamPosition:
    """How far a turn has been read."""

    number: int
    standing: Waiting | Started | Snapshot | None = None

    def take(self, entry: LogEntry) -> bool:
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


async def log_entries(sent: AsyncIterator[Sent | Reconnected], place: StreamPosition) -> AsyncGenerator[LogEntry]:
    """The turn's events, each once, to its end."""
    async for one in sent:
        if isinstance(one, Reconnected):
            continue
        entry: LogEntry = parse_event(one, wire.Entry).value()
        if place.take(entry):
            yield entry
        if isinstance(entry.event, Finished | Failed):
            return


async def conversation_changes(sent: AsyncIterator[Sent | Reconnected]) -> AsyncGenerator[ConversationChange]:
    async for one in sent:
        if isinstance(one, Reconnected):
            yield MISSED
            continue
        item = parse_event(one, wire.StreamItem)
        if isinstance(item, wire.Changed):
            yield item.change.value()
