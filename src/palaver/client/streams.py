"""Event streams that reconnect and continue after the last number."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from palaver import wire
from palaver.chat.interface import ConversationChange
from palaver.chat.turn_log import LogEntry
from palaver.client.connection import ConnectionLost, NoServer, Query, ServerConnection, ServerSentEvent, parse_event
from palaver.events import Failed, Finished, Snapshot, Started, Waiting

MISSED = ConversationChange("", "missed")
"""Sent after reconnecting: changes may have been missed."""


class Reconnected:
    """Marks a new connection in the stream, including the first."""


RECONNECTED = Reconnected()


async def resumable_stream(
    connection: ServerConnection, path: str, query: Callable[[], Query]
) -> AsyncGenerator[ServerSentEvent | Reconnected]:
    """The events of all connections. It has no end: the consumer closes it."""
    retry = connection.retry_policy()
    while True:
        reason = "it closed the stream"
        try:
            async with connection.stream(path, query()) as stream:
                yield RECONNECTED
                async for event in stream:
                    retry = connection.retry_policy()
                    if event.event == "closing":
                        break
                    yield event
        except ConnectionLost as lost:
            reason = str(lost)
        if retry.expired:
            raise NoServer(connection.url, reason)
        await retry.pause()


@dataclass
class StreamPosition:
    """The position of a subscriber in a turn's events."""

    number: int
    status: Waiting | Started | Snapshot | None = None

    def advance(self, entry: LogEntry) -> bool:
        """Moves on to the entry. Returns False if it was seen before: the status is sent again after reconnecting."""
        match entry.event:
            case Waiting() | Started() | Snapshot():
                seen = entry.event == self.status
                self.status = entry.event
                self.number = max(self.number, entry.number)
                return not seen
            case Finished() | Failed():
                return True
            case _:
                seen = entry.number <= self.number
                self.number = max(self.number, entry.number)
                return not seen


async def log_entries(
    stream: AsyncIterator[ServerSentEvent | Reconnected], position: StreamPosition
) -> AsyncGenerator[LogEntry]:
    """The turn's entries, each once, up to its end."""
    async for event in stream:
        if isinstance(event, Reconnected):
            continue
        entry: LogEntry = parse_event(event, LogEntry)
        if position.advance(entry):
            yield entry
        if isinstance(entry.event, Finished | Failed):
            return


async def conversation_changes(
    stream: AsyncIterator[ServerSentEvent | Reconnected],
) -> AsyncGenerator[ConversationChange]:
    async for event in stream:
        if isinstance(event, Reconnected):
            yield MISSED
            continue
        item = parse_event(event, wire.StreamItem)
        if isinstance(item, wire.StreamChange):
            yield item.change
