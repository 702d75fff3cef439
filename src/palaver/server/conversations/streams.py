"""The events of turns as streams (server-sent events, to be read with fetch)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query

from palaver.errors import BadParameter
from palaver.server.conversations.following import many, one_turn
from palaver.server.conversations.owned import Mine
from palaver.server.state import ClosingOf
from palaver.server.streaming import EventStream
from palaver.wire.events import Entry, StreamItem
from palaver.wire.requests import MAX_TURNS, Follow, Followed

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
    return EventStream(await one_turn(chat, id, number))


@routes.get("/events", status_code=200, response_class=EventStream, responses=_MANY)
async def follow(chat: Mine, closing: ClosingOf, turns: str = "", changes: bool = False) -> EventStream:
    """Many turns in one stream, as in `turns=ID:after,ID:after`, and what changes in the caller's conversations."""
    asked = Follow(turns=[_followed(one) for one in _listed(turns)], changes=changes)
    return EventStream(many(chat, asked, closing))


@routes.post("/events", status_code=200, response_class=EventStream, responses=_MANY)
async def follow_all(asked: Follow, chat: Mine, closing: ClosingOf) -> EventStream:
    """The same for lists that are too long for an address."""
    return EventStream(many(chat, asked, closing))


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
