"""Streams: encoding and decoding, the first chunk is awaited, ready chunks are joined, and a disconnect ends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaver.client.sse import ServerSentEvent, SseDecoder
from palaver.server import sse
from palaver.server.app import Server
from palaver.server.errors import ClientDisconnected
from palaver.server.settings import ServerSettings
from palaver.server.sse import MAX_PENDING_BYTES, ChunkJoiner, EventStream, encode_sse, first_chunk, run_while_connected
from tests.chat.scripted_service import WAVE, open_stage
from tests.client.live import listening
from tests.scripted_engine import HoldScript

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Wave!"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Wave!"}], "max_tokens": 100}),
]


class Client:
    """A request whose client disconnects when the event is set."""

    def __init__(self, disconnected: asyncio.Event) -> None:
        self._disconnected = disconnected

    async def receive(self) -> dict[str, Any]:
        await self._disconnected.wait()
        return {"type": "http.disconnect"}


async def numbers(closed: list[bool]) -> AsyncGenerator[bytes]:
    try:
        for number in range(1000):
            await asyncio.sleep(0)
            yield b"%d" % number
    finally:
        closed.append(True)


@pytest.mark.parametrize("turns", range(8))
async def test_the_stream_can_be_closed_whenever_a_client_disconnects(turns: int) -> None:
    """The client disconnects while the first chunk arrives; the owner of the stream can close it at any point."""
    disconnected, closed = asyncio.Event(), list[bool]()
    request: Any = Client(disconnected)
    stream = numbers(closed)

    async def disconnect() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        disconnected.set()

    disconnecting = asyncio.create_task(disconnect())
    try:
        first = await first_chunk(request, stream)
        assert await first == b"0"
    except ClientDisconnected:
        pass
    await disconnecting
    await stream.aclose()
    assert closed in ([True], []), "closed, or never started"


async def test_work_is_cancelled_with_its_client() -> None:
    disconnected, ended = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    disconnected.set()
    with pytest.raises(ClientDisconnected):
        await run_while_connected(Client(disconnected), work())  # type: ignore[arg-type]
    assert ended in (["cancelled"], [])


async def test_a_stream_is_closed_when_its_client_disconnects() -> None:
    disconnected, closed, called = asyncio.Event(), list[bool](), list[bool]()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 5:
            disconnected.set()

    stream = EventStream(numbers(closed), on_disconnect=lambda: called.append(True))
    await stream({"type": "http"}, Client(disconnected).receive, send)
    assert closed == [True]
    assert called == [True]
    assert len(sent) < 1000


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_client_that_disconnects_before_the_first_chunk_frees_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    """The engine sends no output, so that the stream starts before its first chunk."""
    monkeypatch.setattr(sse, "FIRST_SECONDS", 0.01)
    hold = asyncio.Event()
    async with open_stage(tmp_path, [[HoldScript(hold), *WAVE]]) as stage:
        await stage.chat.wait_until_ready()
        app = Server(stage.service, ServerSettings())
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            async with http.stream("POST", path, json={**body, "stream": True}) as answer:
                await anext(answer.aiter_lines())
                assert len(app.state.limiter) == 1
            async with asyncio.timeout(120):
                while len(app.state.limiter):
                    await asyncio.sleep(0.005)
    assert "already running" not in caplog.text


async def test_what_is_ready_at_once_is_one_write() -> None:
    gate = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes]:
        yield b"a"
        yield b"b"
        await gate.wait()
        yield b"c"

    batches = ChunkJoiner(chunks())
    assert await anext(batches) == b"ab"
    gate.set()
    assert [batch async for batch in batches] == [b"c"]


async def test_an_error_comes_after_what_was_before_it() -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        yield b"a"
        raise ValueError("the source failed")

    batches = ChunkJoiner(chunks())
    assert await anext(batches) == b"a"
    with pytest.raises(ValueError, match="the source failed"):
        await anext(batches)


async def test_a_slow_reader_bounds_what_is_taken() -> None:
    made = 0

    async def chunks() -> AsyncGenerator[bytes]:
        nonlocal made
        for _ in range(100):
            made += 1
            yield bytes(MAX_PENDING_BYTES // 4)

    batches = ChunkJoiner(chunks())
    first = await anext(batches)
    for _ in range(10):
        await asyncio.sleep(0)
    assert made <= 10
    assert len(first) + sum([len(batch) async for batch in batches]) == 100 * (MAX_PENDING_BYTES // 4)


async def test_the_source_is_ended_with_its_reader() -> None:
    ended = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            ended.set()

    source = chunks()
    batches = ChunkJoiner(source)
    assert await anext(batches) == b"a"
    await batches.aclose()
    await source.aclose()
    assert ended.is_set()


async def test_a_source_that_waits_is_ended_when_its_batch_cannot_be_sent() -> None:
    ended = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise ConnectionError("the client has left")

    with pytest.raises(ConnectionError):
        await EventStream(chunks())({"type": "http"}, Client(asyncio.Event()).receive, send)
    assert ended.is_set()


async def test_chunks_bypass_the_layers_around_a_response() -> None:
    """Those handle the start and the end of a response."""
    outer: list[str] = []
    inner: list[bytes] = []

    async def chunks() -> AsyncGenerator[bytes]:
        yield b"a"

    async def send(message: Any) -> None:
        outer.append(message["type"] if message.get("more_body", True) else "end")

    async def send_chunk(message: Any) -> None:
        inner.append(message["body"])

    scope = {"type": "http", "state": {sse.SEND_CHUNK: send_chunk}}
    await EventStream(chunks())(scope, Client(asyncio.Event()).receive, send)
    assert (outer, inner) == (["http.response.start", "end"], [b"a"])


@given(texts=st.lists(st.text(), max_size=4), cut=st.integers(1, 7))
def test_events_are_decoded_however_the_bytes_are_cut(texts: list[str], cut: int) -> None:
    wanted = [
        ServerSentEvent(json.dumps(text, ensure_ascii=False), "turn", str(place)) for place, text in enumerate(texts)
    ]
    whole = b"".join(
        b": a comment\n\n" + encode_sse(sent.data.encode(), event="turn", id=place) for place, sent in enumerate(wanted)
    )
    decoder = SseDecoder()
    read = [sent for start in range(0, len(whole), cut) for sent in decoder.feed(whole[start : start + cut])]
    assert read == wanted


def test_an_incomplete_event_is_not_decoded() -> None:
    whole = encode_sse(b'"one"', id=1) + encode_sse(b'"two"', id=2)
    for end in range(len(whole)):
        decoder = SseDecoder()
        read = [sent.data for sent in decoder.feed(whole[:end])]
        assert read == ['"one"', '"two"'][: whole[:end].count(b"\n\n")]
