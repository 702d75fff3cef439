"""Stops slow tools, and measures how long it takes until each part is free.

Used by the tests and, for longer, by benchmarks/tool_kills.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palaver.chat.service import Service
from palaver.store.tool_rounds import CallState, RoundState
from palaver.tools.config import ServerConfig
from tests.chat.tool_service import approve, misbehaving, open_tools, send, wait_for_round
from tests.tools.demo_server import serve_misbehaving

LIMIT_SECONDS = 10.0
"""How long a stop may take before it counts as failed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The seconds from the request to stop."""

    answered: float
    """Until the round is stopped, which is when the request is answered."""
    free: float
    """Until the task of the call is gone."""
    cancelled: float
    """Until the tool has recorded that it is to cancel."""


async def measure_stops(folder: Path, count: int, over_http: bool) -> list[Stop]:
    if not over_http:
        async with open_tools(folder, misbehaving(folder / "record")) as service:
            return [await _measure(service, folder / "record") for _ in range(count)]
    with serve_misbehaving(folder / "record") as url:
        async with open_tools(folder, ServerConfig("bad", url=url)) as service:
            return [await _measure(service, folder / "record") for _ in range(count)]


async def _measure(service: Service, record: Path) -> Stop:
    chat = service.chat(service.store.users.ensure().id)
    begun, cancelled = _count(record, "call slow"), _count(record, "cancelled")
    reply = await send(chat, ["bad__slow"])
    await chat.decide_calls(reply.id, approve(await wait_for_round(chat, reply.id)))
    await _until(lambda: _count(record, "call slow") > begun)
    started = time.monotonic()
    free = asyncio.create_task(_until(lambda: (reply.id, 0) not in service.loop._calls))
    told = asyncio.create_task(_until(lambda: _count(record, "cancelled") > cancelled))
    await chat.stop_reply(reply.id)
    answered = time.monotonic()
    times = Stop(answered - started, await free - started, await told - started)
    round = await chat.tool_round(reply.id)
    assert round is not None
    assert round.state is RoundState.STOPPED
    assert round.calls[0].state is CallState.INTERRUPTED
    return times


async def _until(is_true: Callable[[], bool]) -> float:
    """When it is true."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not is_true():
            await asyncio.sleep(0.001)
    return time.monotonic()


def _count(record: Path, line: str) -> int:
    return record.read_text().splitlines().count(line) if record.exists() else 0
