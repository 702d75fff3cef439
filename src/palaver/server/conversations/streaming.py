"""The pieces of a stream: events of turns and changes as they come, from many sources in one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query

from palaver.chat import interface
from palaver.chat.interface import Chat
from palaver.chat.turn_log import LogEntry
from palaver.errors import BadParameter, PalaverError
from palaver.server.conversations.dependencies import Mine
from palaver.server.errors import error_value, log_unexpected
from palaver.server.sse import EventStream
from palaver.server.state import ClosingOf
from palaver.wire.errors import Error
from palaver.wire.events import Changed, Closing, Entry, Opened, Refused, StreamItem, TurnEvent
from palaver.wire.requests import MAX_TURNS, Follow, Followed
from palaver.wire.sse import encoded
from palaver.wire.turns import Change

KNOWN_SECONDS = 2.0
"""For so long a stream is not begun, so that a refusal has a status of its own."""
BEHIND = 256
"""Pieces that wait for a slow client; then its sources wait, too."""

Pieces = AsyncGenerator[bytes]
_OPENED = encoded(Opened(type="opened").model_dump_json())
_CLOSING = encoded(Closing(type="closing").model_dump_json(), event="closing")


async def turn_stream(chat: Chat, turn: str, after: int) -> Pieces:
    """The turn's events to its end, each with its number as the id. Raises what it is refused with, unless that takes
    long to be known, because a model is being loaded: then the stream tells."""
    held = AsyncExitStack()
    entering = asyncio.ensure_future(held.enter_async_context(chat.events(turn, after)))
    await asyncio.wait({entering}, timeout=KNOWN_SECONDS)
    if entering.done():
        entering.result()
    return _one_turn(entering, held)


async def _one_turn(entering: asyncio.Future[AsyncIterator[LogEntry]], held: AsyncExitStack) -> Pieces:
    try:
        async with aclosing(merge_sources([_turn(entering)])) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        await held.aclose()


async def merged_stream(chat: Chat, asked: Follow, closing: asyncio.Event) -> Pieces:
    """Ends when all the turns have; with changes, when the server closes."""
    async with AsyncExitStack() as stack:
        sources = [_turn_among(chat, followed) for followed in asked.turns]
        if asked.changes:
            changes = await stack.enter_async_context(chat.changes())
            sources.append(_changes(changes, closing))
        yield _OPENED
        pieces = await stack.enter_async_context(aclosing(merge_sources(sources)))
        async for piece in pieces:
            yield piece


async def merge_sources(sources: Sequence[Pieces]) -> Pieces:
    """The pieces of all sources as they come, until each has ended."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND)
    tasks = [asyncio.create_task(_pour(source, queue)) for source in sources]
    left = len(tasks)
    try:
        while left:
            taken = [await queue.get()]
            while not queue.empty():
                taken.append(queue.get_nowait())
            left -= taken.count(None)
            if pieces := b"".join(piece for piece in taken if piece is not None):
                yield pieces
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pour(source: Pieces, queue: asyncio.Queue[bytes | None]) -> None:
    """A failure ends the source with an error for the client to read."""
    try:
        async with aclosing(source):
            async for piece in source:
                await queue.put(piece)
    except Exception as error:
        log_unexpected(error)
        await queue.put(encoded(json.dumps(error_value(error)), event="error"))
    await queue.put(None)


async def _turn(entering: asyncio.Future[AsyncIterator[LogEntry]]) -> Pieces:
    async for entry in await entering:
        yield encoded(Entry.of(entry).model_dump_json(), id=entry.number)


async def _turn_among(chat: Chat, followed: Followed) -> Pieces:
    """One that can't be read says so and leaves the others alone."""
    try:
        async with chat.events(followed.turn, followed.after) as entries:
            async for entry in entries:
                yield encoded(TurnEvent.of(followed.turn, entry).model_dump_json())
    except PalaverError as error:
        told = Error.model_validate(error_value(error)["error"])
        yield encoded(Refused(type="refused", turn=followed.turn, error=told).model_dump_json())


async def _changes(changes: AsyncIterator[interface.ConversationChange], closing: asyncio.Event) -> Pieces:
    """What changes; nothing else would end it when the server closes, unlike a turn, which is put aside then."""
    closed = asyncio.ensure_future(closing.wait())
    coming: asyncio.Future[interface.ConversationChange] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(changes))
            await asyncio.wait((coming, closed), return_when=asyncio.FIRST_COMPLETED)
            if closed.done():
                yield _CLOSING
                return
            yield encoded(Changed(type="change", change=Change.of(coming.result())).model_dump_json())
    finally:
        waiting = [future for future in (coming, closed) if future is not None]
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


routes = APIRouter(tags=["events"])
MAX_NUMBER = 2**31
Number = Annotated[int, Query(ge=0, le=MAX_NUMBER)]


def _carries(item: Any, meaning: str) -> dict[int | str, dict[str, Any]]:
    """What the API's document says of a stream: the data of each of its events."""
    content = {EventStream.media_type: {"schema": {"type": "object"}}}
    return {200: {"model": item, "description": meaning, "content": content}}


_ONE = _carries(Entry, "Events whose `data` is an entry and whose `id` is its number.")
_MANY = _carries(StreamItem, "Events whose `data` is an item of the stream.")


@routes.get("/turns/{id}/events", status_code=200, response_class=EventStream, responses=_ONE)
async def events(
    id: str, chat: Mine, after: Number = 0, last_event_id: Annotated[str | None, Header()] = None
) -> EventStream:
    """The turn's events after that number, as they come, to its end. `Last-Event-ID` goes before `after`. A number
    that the turn never had is refused."""
    number = after if last_event_id is None else _number("Last-Event-ID", last_event_id)
    return EventStream(await turn_stream(chat, id, number))


@routes.get("/events", status_code=200, response_class=EventStream, responses=_MANY)
async def follow(chat: Mine, closing: ClosingOf, turns: str = "", changes: bool = False) -> EventStream:
    """Many turns in one stream, as in `turns=ID:after,ID:after`, and what changes in the caller's conversations."""
    asked = Follow(turns=[_followed(one) for one in _listed(turns)], changes=changes)
    return EventStream(merged_stream(chat, asked, closing))


@routes.post("/events", status_code=200, response_class=EventStream, responses=_MANY)
async def follow_all(asked: Follow, chat: Mine, closing: ClosingOf) -> EventStream:
    """The same for lists that are too long for an address."""
    return EventStream(merged_stream(chat, asked, closing))


def _listed(turns: str) -> list[str]:
    listed = [one for one in turns.split(",") if one]
    if len(listed) > MAX_TURNS:
        raise BadParameter("turns", f"{len(listed)} turns", f"at most {MAX_TURNS} are followed in one stream")
    return listed


def _followed(text: str) -> Followed:
    turn, _, after = text.partition(":")
    return Followed(turn=turn, after=_number("turns", after or "0"))


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > MAX_NUMBER:
        raise BadParameter(name, text[:40], "must be the number of an event")
    return int(text)
