"""The parts of an answer that no whole server shows at every run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

import pytest

from palaver.errors import QueueFull
from palaver.events import AnswerDelta, ReadEvent, ThinkingDelta, ToolCallDelta
from palaver.server.errors import NotJson
from palaver.server.limits import ConcurrencyLimiter, RateLimiter
from palaver.server.openai.choices import SeamTrimmer
from palaver.server.openai.disconnect import first_chunk, run_while_connected
from palaver.server.request_body import ClientDisconnected, check_json
from palaver.server.settings import ServerLimits
from palaver.server.sse import EventStream


class Client:
    """Stands for a request whose client leaves when told."""

    def __init__(self, leaves: asyncio.Event) -> None:
        self._leaves = leaves

    async def receive(self) -> dict[str, Any]:
        await self._leaves.wait()
        return {"type": "http.disconnect"}


async def words(closed: list[bool]) -> AsyncGenerator[bytes]:
    try:
        for number in range(1000):
            await asyncio.sleep(0)
            yield b"%d" % number
    finally:
        closed.append(True)


@pytest.mark.parametrize("turns", range(8))
async def test_whenever_a_client_leaves_the_stream_can_be_closed(turns: int) -> None:
    """The client leaves while the first word arrives; wherever that is, the stream's owner can end it."""
    leaves, closed = asyncio.Event(), list[bool]()
    request: Any = Client(leaves)
    stream = words(closed)

    async def leave() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        leaves.set()

    leaving = asyncio.create_task(leave())
    try:
        first = await first_chunk(request, stream)
        assert await first == b"0"
    except ClientDisconnected:
        pass
    await leaving
    await stream.aclose()
    assert closed in ([True], []), "ended, or never begun"


async def test_work_is_cancelled_with_its_client() -> None:
    leaves, ended = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    leaves.set()
    with pytest.raises(ClientDisconnected):
        await run_while_connected(Client(leaves), work())  # type: ignore[arg-type]
    assert ended in (["cancelled"], [])


async def test_a_stream_lets_go_when_its_client_leaves() -> None:
    leaves, closed, left = asyncio.Event(), list[bool](), list[bool]()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 5:
            leaves.set()

    stream = EventStream(words(closed), on_leave=lambda: left.append(True))
    await stream({"type": "http"}, Client(leaves).receive, send)
    assert closed == [True]
    assert left == [True]
    assert len(sent) < 1000


@pytest.mark.parametrize(
    ("held", "events", "new"),
    [
        ({}, [AnswerDelta(" a")], [AnswerDelta(" a")]),
        ({AnswerDelta: " "}, [AnswerDelta(" a")], [AnswerDelta("a")]),
        ({AnswerDelta: " a"}, [AnswerDelta(" "), AnswerDelta("a b")], [AnswerDelta(" b")]),
        ({ThinkingDelta: "\n"}, [AnswerDelta("x")], [AnswerDelta("x")]),
        ({ThinkingDelta: "\n"}, [ThinkingDelta("\nmore")], [ThinkingDelta("more")]),
        ({ToolCallDelta: '{"a'}, [ToolCallDelta(0, '{"ab"')], [ToolCallDelta(0, 'b"')]),
        ({AnswerDelta: "zzz"}, [AnswerDelta("other")], [AnswerDelta("other")]),
    ],
)
def test_what_a_client_holds_is_told_once(held: Any, events: list[ReadEvent], new: list[ReadEvent]) -> None:
    joined = SeamTrimmer(held)
    assert [told for event in events if (told := joined.take(event)) is not None] == new


def test_depth_is_that_of_brackets_outside_of_texts() -> None:
    check_json(b'{"a": "' + b"[" * 500 + b'\\"' + b"{" * 500 + b'"}', ServerLimits(depth=10))
    with pytest.raises(NotJson):
        check_json(b"[" * 11 + b"]" * 11, ServerLimits(depth=10))
    check_json(b"[" * 10 + b"]" * 10, ServerLimits(depth=10))
    check_json(b"[" + b"[]," * 1000 + b"[]]", ServerLimits(depth=10))


async def test_the_floor_is_given_back() -> None:
    floor = ConcurrencyLimiter(2)
    with floor.taken("ann", lambda: None, 2):
        assert len(floor) == 2
    assert len(floor) == 0
    await floor.close(0)


def test_one_owner_cannot_lock_out_others() -> None:
    floor = ConcurrencyLimiter(16)
    with ExitStack() as running:
        for _ in range(14):
            running.enter_context(floor.taken("ann", lambda: None))
        with pytest.raises(QueueFull):
            running.enter_context(floor.taken("ann", lambda: None))
        running.enter_context(floor.taken("bob", lambda: None))
        running.enter_context(floor.taken("eve", lambda: None))
        with pytest.raises(QueueFull):
            running.enter_context(floor.taken("joe", lambda: None))
    running.enter_context(floor.taken("ann", lambda: None, 16))
    running.close()


def test_no_limit_is_no_limit() -> None:
    rates = RateLimiter(0)
    for _ in range(1000):
        rates.take("x")
