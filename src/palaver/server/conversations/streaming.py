"""Server-sent events: the events of turns and the changes of conversations, merged from many sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

from fastapi import Header, Query

from palaver.chat import interface
from palaver.chat.interface import Chat
from palaver.chat.turn_log import LogEntry
from palaver.chat.turns import LEFT
from palaver.encoding import adapter
from palaver.errors import BadParameter, PalaverError
from palaver.events import Failed
from palaver.server.errors import api_router, error_body, error_value, log_unexpected
from palaver.server.sse import EventStream, encode_sse
from palaver.server.state import ChatDep, ClosingDep
from palaver.wire import (
    MAX_TURNS,
    ErrorSchema,
    FollowRequest,
    StreamChange,
    StreamClosing,
    StreamItem,
    StreamOpened,
    TurnEvent,
    TurnPosition,
    TurnRefused,
)

REFUSAL_SECONDS = 2.0
"""How long the response is held back, so that a refusal gets its own HTTP status."""
QUEUE_SIZE = 256
"""How many chunks wait for a slow client before its sources wait, too."""

Chunks = AsyncGenerator[bytes]


def _encode_item(item: StreamItem, event: str = "") -> bytes:
    return encode_sse(adapter(StreamItem).dump_json(item), event=event)


async def turn_stream(chat: Chat, turn: str, after: int) -> Chunks:
    """The turn's events to its end, each with its number as the id. Raises the error if the turn is refused within
    `REFUSAL_SECONDS`. A later error, after a model was loaded, ends the stream."""
    stack = AsyncExitStack()
    entering = asyncio.ensure_future(stack.enter_async_context(chat.events(turn, after)))
    await asyncio.wait({entering}, timeout=REFUSAL_SECONDS)
    if entering.done():
        entering.result()
    return _single_turn(entering, stack)


async def _single_turn(entering: asyncio.Future[AsyncIterator[LogEntry]], stack: AsyncExitStack) -> Chunks:
    try:
        async with aclosing(merge_sources([_turn_events(entering)])) as chunks:
            async for chunk in chunks:
                yield chunk
    finally:
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        await stack.aclose()


async def merged_stream(chat: Chat, request: FollowRequest, closing: asyncio.Event) -> Chunks:
    """Ends when all turns have ended; with changes, when the server shuts down."""
    async with AsyncExitStack() as stack:
        sources = [_turn_in_stream(chat, position) for position in request.turns]
        if request.changes:
            changes = await stack.enter_async_context(chat.changes())
            sources.append(_changes(changes, closing))
        yield _encode_item(StreamOpened())
        chunks = await stack.enter_async_context(aclosing(merge_sources(sources)))
        async for chunk in chunks:
            yield chunk


async def merge_sources(sources: Sequence[Chunks]) -> Chunks:
    """Merges the chunks of all sources as they arrive, until all have ended."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_SIZE)
    tasks = [asyncio.create_task(_forward(source, queue)) for source in sources]
    running = len(tasks)
    try:
        while running:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            running -= batch.count(None)
            if data := b"".join(chunk for chunk in batch if chunk is not None):
                yield data
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(source: Chunks, queue: asyncio.Queue[bytes | None]) -> None:
    """Forwards a source into the queue. An exception becomes an error event at its end."""
    try:
        async with aclosing(source):
            async for chunk in source:
                await queue.put(chunk)
    except Exception as error:
        log_unexpected(error)
        await queue.put(encode_sse(error_body(error), event="error"))
    await queue.put(None)


def _goes_on_elsewhere(entry: LogEntry) -> bool:
    """Whether the turn was left for another server: it has not ended, and its readers must come back."""
    return isinstance(entry.event, Failed) and entry.event.error == LEFT


async def _turn_events(entering: asyncio.Future[AsyncIterator[LogEntry]]) -> Chunks:
    async for entry in await entering:
        if _goes_on_elsewhere(entry):
            yield _encode_item(StreamClosing(), "closing")
            return
        yield encode_sse(adapter(LogEntry).dump_json(entry), id=entry.number)


async def _turn_in_stream(chat: Chat, position: TurnPosition) -> Chunks:
    """A turn that can't be read emits `refused`; the other turns continue."""
    try:
        async with chat.events(position.turn, position.after) as entries:
            async for entry in entries:
                if _goes_on_elsewhere(entry):
                    yield _encode_item(StreamClosing(), "closing")
                    return
                yield _encode_item(TurnEvent(position.turn, entry.number, entry.event))
    except PalaverError as error:
        refusal = ErrorSchema.model_validate(error_value(error)["error"])
        yield _encode_item(TurnRefused(position.turn, refusal))


async def _changes(changes: AsyncIterator[interface.ConversationChange], closing: asyncio.Event) -> Chunks:
    """The changes, until the server shuts down. Turns end by themselves then, but changes would not."""
    closed = asyncio.ensure_future(closing.wait())
    next_change: asyncio.Future[interface.ConversationChange] | None = None
    try:
        while True:
            next_change = asyncio.ensure_future(anext(changes))
            await asyncio.wait((next_change, closed), return_when=asyncio.FIRST_COMPLETED)
            if closed.done():
                yield _encode_item(StreamClosing(), "closing")
                return
            yield _encode_item(StreamChange(next_change.result()))
    finally:
        waiting = [future for future in (next_change, closed) if future is not None]
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


routes = api_router("events")
MAX_NUMBER = 2**31
EventNumber = Annotated[int, Query(ge=0, le=MAX_NUMBER)]


def _event_stream(item: Any, meaning: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI response of a stream whose events have this data."""
    content = {EventStream.media_type: {"schema": {"type": "object"}}}
    return {200: {"model": item, "description": meaning, "content": content}}


_TURN_STREAM = _event_stream(LogEntry, "Events whose `data` is an entry and whose `id` is its number.")
_MERGED_STREAM = _event_stream(StreamItem, "Events whose `data` is an item of the stream.")


@routes.get("/turns/{id}/events", status_code=200, response_class=EventStream, responses=_TURN_STREAM)
async def events(
    id: str, chat: ChatDep, after: EventNumber = 0, last_event_id: Annotated[str | None, Header()] = None
) -> EventStream:
    """The turn's events after that number, to its end. `Last-Event-ID` takes precedence over `after`. A number that
    the turn never had is refused."""
    number = after if last_event_id is None else _parse_number("Last-Event-ID", last_event_id)
    return EventStream(await turn_stream(chat, id, number))


@routes.get("/events", status_code=200, response_class=EventStream, responses=_MERGED_STREAM)
async def follow(chat: ChatDep, closing: ClosingDep, turns: str = "", changes: bool = False) -> EventStream:
    """Many turns in one stream, as in `turns=ID:after,ID:after`, and the changes of the user's conversations."""
    request = FollowRequest(turns=[_parse_position(text) for text in _split_turns(turns)], changes=changes)
    return EventStream(merged_stream(chat, request, closing))


@routes.post("/events", status_code=200, response_class=EventStream, responses=_MERGED_STREAM)
async def follow_all(body: FollowRequest, chat: ChatDep, closing: ClosingDep) -> EventStream:
    """The same for lists that are too long for an address."""
    return EventStream(merged_stream(chat, body, closing))


def _split_turns(turns: str) -> list[str]:
    parts = [part for part in turns.split(",") if part]
    if len(parts) > MAX_TURNS:
        raise BadParameter("turns", f"{len(parts)} turns", f"at most {MAX_TURNS} are followed in one stream")
    return parts


def _parse_position(text: str) -> TurnPosition:
    turn, _, after = text.partition(":")
    return TurnPosition(turn=turn, after=_parse_number("turns", after or "0"))


def _parse_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > MAX_NUMBER:
        raise BadParameter(name, text[:40], "must be the number of an event")
    return int(text)
