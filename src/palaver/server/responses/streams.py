"""Responses to their clients: as a stream of events from any number on, or whole, which is the same stream folded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from palaver.errors import BadParameter, PalaverError
from palaver.server.errors import INTERNAL, ShuttingDown, note, told
from palaver.server.responses.following import PutAside, Said
from palaver.server.responses.telling import Ending, Event, Telling, encoded

_FROM_START = -1


async def pieces(telling: Telling, source: AsyncGenerator[Said], after: int = _FROM_START) -> AsyncGenerator[bytes]:
    """The events after that number."""
    events: list[Event] = []
    told_any = False
    async with aclosing(_events(telling, source)) as batches:
        async for events in batches:
            if piece := encoded(event for event in events if event["sequence_number"] > after or _is_failure(event)):
                told_any = True
                yield piece
    last = events[-1]["sequence_number"]
    if not told_any:
        if after > last:
            raise BadParameter("starting_after", after, f"the events of this response are 0 to {last}")
        yield b""


async def whole(telling: Telling, source: AsyncGenerator[Said]) -> dict[str, Any]:
    """The response when it has ended."""
    async with aclosing(source):
        async for said in source:
            telling.take(said.events, said.logprobs)
            if said.ending is not None:
                value: dict[str, Any] = telling.end(said.ending)[-1]["response"]
                return value
    raise AssertionError("a reply has an end")


async def _events(telling: Telling, source: AsyncGenerator[Said]) -> AsyncGenerator[list[Event]]:
    """BadParameter where it can't be told at all, and then before anything is."""
    opening = telling.opening()
    try:
        async with aclosing(source):
            async for said in source:
                events = [*opening, *telling.take(said.events, said.logprobs)]
                opening = []
                if said.ending is not None:
                    events += telling.end(said.ending)
                if events:
                    yield events
    except BadParameter:
        raise
    except (PutAside, ShuttingDown) as error:
        yield [*opening, telling.failure("shutting_down", str(error))]
    except PalaverError as error:
        yield [*opening, *telling.end(Ending("failed", error=str(error)))]
    except Exception as error:
        note(error)
        yield [*opening, telling.failure(told(error).code, INTERNAL)]


def _is_failure(event: Event) -> bool:
    return bool(event["type"] == "error")
