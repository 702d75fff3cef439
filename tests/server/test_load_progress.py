"""Streams of a model that is loaded first: comments tell the progress, by every API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.chat.service import Service
from palaver.server import sse
from palaver.store import open_store
from tests.chat.test_model_pool import Shelf
from tests.client.live import TOKEN, served

HELLO = [{"role": "user", "content": "Wave!"}]
ASKED: dict[str, Any] = {"model": "b", "messages": HELLO, "max_tokens": 40, "stream": True}
HALF = ": loading b 50% (reading)"
REQUESTS = [
    ("/v1/chat/completions", ASKED, '"finish_reason":"stop"'),
    ("/v1/chat/completions", {**ASKED, "metadata": {"conversation": "new"}}, '"finish_reason":"stop"'),
    ("/v1/completions", {"model": "b", "prompt": "One", "max_tokens": 9, "stream": True}, '"finish_reason":'),
    ("/v1/messages", ASKED, "event: message_stop"),
    ("/v1/messages", {**ASKED, "metadata": {"conversation": "new"}}, "event: message_stop"),
    ("/v1/responses", {"model": "b", "input": "Wave!", "stream": True}, "event: response.completed"),
    ("/v1/responses", {"model": "b", "input": "Wave!", "stream": True, "store": False}, "event: response.completed"),
]


@pytest.fixture
async def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(sse, "STATUS_SECONDS", 0.05)
    return Shelf()


@pytest.fixture
async def http(shelf: Shelf, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    pool = shelf.pool()
    with open_store(tmp_path) as store:
        pool.load("a")
        async with Service(store, pool) as service, served(service) as url:
            await pool.ready()
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, headers=headers) as http:
                yield http


async def read(http: httpx.AsyncClient, shelf: Shelf, path: str, body: dict[str, Any]) -> list[str]:
    """The lines of a stream. The model is loaded once the stream says that it is being loaded."""
    shelf.gate.clear()
    lines = []
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            lines.append(line)
            if line == HALF:  # others come before it, such as while the model waits for memory
                shelf.gate.set()
    return lines


@pytest.mark.parametrize(("path", "body", "ending"), REQUESTS)
async def test_a_stream_tells_how_far_its_model_is(
    http: httpx.AsyncClient, shelf: Shelf, path: str, body: dict[str, Any], ending: str
) -> None:
    """Once while it was never loaded, and once after it was evicted."""
    for _ in range(2):
        lines = await read(http, shelf, path, body)
        comments = [line for line in lines if line.startswith(": loading")]
        assert comments[-1] == HALF
        assert any(ending in line for line in lines)
        unloaded = await http.post("/v1/model/unload", json={"model": "b"})
        assert unloaded.status_code == 200
    assert shelf.loads == ["a", "b", "b"]


@pytest.mark.parametrize(("path", "body", "ending"), REQUESTS)
async def test_a_load_that_fails_later_ends_the_stream_with_an_error(
    http: httpx.AsyncClient, shelf: Shelf, path: str, body: dict[str, Any], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.failure = "the disk is broken."
    lines = await read(http, shelf, path, body)
    assert HALF in lines
    (event,) = (line for line in lines if line.startswith("data: {"))
    assert "the disk is broken." in event
    assert "error" in event
    assert (lines[-2] == "data: [DONE]") == path.endswith("completions")


async def test_a_load_that_fails_at_once_has_a_status(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**ASKED, "model": "missing"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_found")
