"""Limits: requests that cost more than their size suggests (numbered as in test_hostile), bodies, rates and places."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from palaver.errors import QueueFull
from palaver.server.errors import NotJson
from palaver.server.limits import ConcurrencyLimiter, RateLimiter, check_json
from palaver.server.settings import ServerLimits
from palaver.store import open_store
from tests.server.chat_client import CHAT, SUM, post
from tests.server.live_server import LiveServer


def conversation(http: httpx.Client) -> str:
    return str(http.post("/api/conversations", json={}).json()["id"])


PRIVATE_USE = "".join(map(chr, range(0xE000, 0xF900)))
ENDS_OF_PLANES = [plane << 16 | low for plane in range(17) for low in (0xFFFE, 0xFFFF)]
NON_CHARACTERS = "".join(map(chr, [*range(0xFDD0, 0xFDF0), *ENDS_OF_PLANES]))


ODD = (PRIVATE_USE, NON_CHARACTERS, f"<think>{PRIVATE_USE}</think><|im_end|>")


@pytest.mark.parametrize("text", ODD, ids=range(3))
def test_hostile_30_characters_that_mean_nothing(http: httpx.Client, text: str) -> None:
    """They are answered, or refused with both counts, and come back as they were sent."""
    answer = http.post(CHAT, json={"messages": [{"role": "user", "content": text}], "max_tokens": 1})
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded"
    talk = conversation(http)
    message = {"role": "user", "parts": [{"type": "text", "text": text}]}
    added = http.post(f"/api/conversations/{talk}/messages", json={"parent": None, "message": message})
    assert added.json()["parts"][0]["text"] == text


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize", "/v1/messages", "/v1/responses", "/api/conversations"])
def test_hostile_30_lone_surrogates_by_escapes(http: httpx.Client, path: str) -> None:
    for half in ("\\ud800", "\\udfff", "x\\udc00\\ud800"):
        body = f'{{"prompt": "{half}", "input": "{half}", "title": "{half}"}}'
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "half of a character" in answer.text


LONG = "Hello, my dear friend. " * 1_200_000
USER = [{"role": "user", "content": LONG}]
LINE = '{"messages": [{"role": "user", "content": "Hi"}]}'


def too_much(what: str) -> tuple[str, str, str]:
    """Path and body of a request, and the words that refuse it."""
    chat = f'{{"messages": {json.dumps(SUM)}'
    match what:
        case "metadata":
            return CHAT, f"{chat}, {named('metadata', 110_000)}}}", "more than 100000 names"
        case "metadata of a response":
            return "/v1/responses", f'{{"input": "Hi", {named("metadata", 110_000)}}}', "more than 100000 names"
        case "logit_bias":
            return CHAT, f"{chat}, {named('logit_bias', 110_000)}}}", "more than 100000 names"
        case "numbers":
            return CHAT, f'{chat}, "stop_token_ids": [{"1," * 9_000_000}1]}}', "more than 300000 values"
        case "messages":
            return CHAT, json.dumps({"messages": SUM * 100_001}), "more than 40000 objects"
        case "parameters":
            return "/api/conversations", f"{{{named('parameters', 900)}}}", "200"
        case "tags":
            return "/api/conversations", json.dumps({"tags": ["x"] * 1_000}), "100"
        case "text to tokenize":
            return "/v1/tokenize", json.dumps({"prompt": LONG}), "at most 1048576 characters"
        case "text of a message":
            return CHAT, json.dumps({"messages": USER}), "tokens long, but"
        case "text for a template":
            return "/v1/apply-template", json.dumps({"messages": USER}), "tokens long, but"
        case "text to complete":
            return "/v1/completions", json.dumps({"prompt": LONG}), "tokens long, but"
        case "description of a tool":
            tool = {"type": "function", "function": {"name": "f", "description": LONG}}
            return CHAT, json.dumps({"messages": SUM, "tools": [tool]}), "tokens long, but"
        case _:
            return "/api/import", "\n".join([LINE] * 300_000), "at most 10000"


def named(field: str, count: int) -> str:
    return f'"{field}": {json.dumps(dict.fromkeys(map(str, range(count)), 1))}'


WHAT = (
    "metadata",
    "metadata of a response",
    "logit_bias",
    "numbers",
    "messages",
    "parameters",
    "tags",
    "text to tokenize",
    "text of a message",
    "text for a template",
    "text to complete",
    "description of a tool",
    "lines to import",
)


@pytest.mark.parametrize("what", WHAT)
def test_hostile_31_too_much_is_refused_before_work(http: httpx.Client, what: str) -> None:
    path, body, why = too_much(what)
    kind = "text/plain" if path == "/api/import" else "application/json"
    answer = http.post(path, content=body.encode(), headers={"content-type": kind})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert len(answer.content) < 2_000, "the value is not sent back"


def test_hostile_31_a_long_message_is_not_stored(http: httpx.Client) -> None:
    talk = conversation(http)
    for path in ("say", "messages"):
        message = {"role": "user", "parts": [{"type": "text", "text": LONG}]}
        answer = http.post(f"/api/conversations/{talk}/{path}", json={"parent": None, "message": message})
        assert answer.status_code == 400
    assert http.get(f"/api/conversations/{talk}/nodes").json() == []


def lines(count: int) -> bytes:
    return b"\n".join(b'{"messages": [{"role": "user", "content": "Line %d"}]}' % i for i in range(count))


def test_hostile_31_an_import_ends_with_its_sender(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with LiveServer(tmp_path, model=None) as live:
        store, owner = live.service.store, live.service.store.users.ensure().id
        body = lines(9_000)
        head = "POST /api/import HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
        with socket.create_connection(("127.0.0.1", live.port)) as leaving:
            leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not store.conversations.list(owner, limit=1):
                time.sleep(0.002)
        while "POST /api/import 499" not in caplog.text:
            time.sleep(0.002)
        assert 0 < len(store.conversations.list(owner, limit=9_000)) < 9_000


def test_hostile_31_an_import_ends_with_the_server(tmp_path: Path) -> None:
    with LiveServer(tmp_path, model=None) as live:
        store, owner = live.service.store, live.service.store.users.ensure().id

        async def close() -> None:
            while not await asyncio.to_thread(store.conversations.list, owner, limit=1):
                await asyncio.sleep(0.002)
            await live.server.close(grace=0)

        with ThreadPoolExecutor(1) as closing:
            closed = closing.submit(live.run_in_loop, close)
            answer = post(f"{live.url}/api/import", content=lines(9_000), headers={"content-type": "text/plain"})
            closed.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


def test_depth_is_that_of_brackets_outside_of_texts() -> None:
    check_json(b'{"a": "' + b"[" * 500 + b'\\"' + b"{" * 500 + b'"}', ServerLimits(depth=10))
    with pytest.raises(NotJson):
        check_json(b"[" * 11 + b"]" * 11, ServerLimits(depth=10))
    check_json(b"[" * 10 + b"]" * 10, ServerLimits(depth=10))
    check_json(b"[" + b"[]," * 1000 + b"[]]", ServerLimits(depth=10))


async def test_places_are_given_back() -> None:
    limiter = ConcurrencyLimiter(2)
    with limiter.acquire("ann", lambda: None, 2):
        assert len(limiter) == 2
    assert len(limiter) == 0
    await limiter.close(0)


def test_one_owner_cannot_lock_out_others() -> None:
    limiter = ConcurrencyLimiter(16)
    with ExitStack() as running:
        for _ in range(14):
            running.enter_context(limiter.acquire("ann", lambda: None))
        with pytest.raises(QueueFull):
            running.enter_context(limiter.acquire("ann", lambda: None))
        running.enter_context(limiter.acquire("bob", lambda: None))
        running.enter_context(limiter.acquire("eve", lambda: None))
        with pytest.raises(QueueFull):
            running.enter_context(limiter.acquire("joe", lambda: None))
    running.enter_context(limiter.acquire("ann", lambda: None, 16))
    running.close()


async def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        limiter = RateLimiter(0, store.rate_limits)
        for _ in range(1000):
            await limiter.acquire("x")
