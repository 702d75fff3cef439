"""The events of a reply on their way: as server-sent events, or folded into one message."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi import Request

from palaver.server.anthropic.refusals import refusal
from palaver.server.anthropic.telling import PING, Event, Whole
from palaver.server.errors import note
from palaver.server.streaming import EventStream


def streamed(events: AsyncGenerator[Event], request: Request, headers: Mapping[str, str] | None = None) -> EventStream:
    return EventStream(_sent(events, request.state.request_id), headers, quiet=_event(PING))


async def folded(events: AsyncGenerator[Event]) -> Event:
    whole = Whole()
    async with aclosing(events):
        async for event in events:
            whole.take(event)
    return whole.value()


async def _sent(events: AsyncGenerator[Event], request_id: str) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        try:
            async for event in events:
                yield _event(event)
        except Exception as error:
            note(error)
            yield _event(refusal(error, request_id))


def _event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
