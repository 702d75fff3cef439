"""Streams of a scripted engine: thinking opened by the prompt, several thinking blocks, a full context and queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.client.sse import SseDecoder
from palaver.server.anthropic.signatures import parse_signature
from palaver.server.settings import ServerLimits, ServerSettings
from tests.scripted_engine import HoldScript, Script
from tests.server.anthropic.client import MESSAGES, SUM
from tests.server.scripted_server import ANSWER, END, THINK, say, scripted_client
from tests.tiny import CHATML, PREOPENED


async def stream_events(http: httpx.AsyncClient, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    decoder, body = SseDecoder(), {"messages": SUM, "max_tokens": 500, "stream": True, **fields}
    async with http.stream("POST", MESSAGES, json=body) as answer:
        async for chunk in answer.aiter_bytes():
            for sent in decoder.feed(chunk):
                yield json.loads(sent.data)


async def test_the_thought_is_open_before_the_first_token(tmp_path: Path) -> None:
    hold = asyncio.Event()
    script: Script = [HoldScript(hold), *say("so\n", ANSWER, "\n\nyes", END)]
    async with scripted_client(tmp_path, PREOPENED, script) as http:
        events = []
        async for event in stream_events(http):
            events.append(event)
            if event["type"] == "content_block_start" and not hold.is_set():
                assert event["content_block"]["type"] == "thinking"
                hold.set()
        assert [event["content_block"]["type"] for event in events if "content_block" in event] == ["thinking", "text"]


async def test_a_thought_of_nothing_is_a_block(tmp_path: Path) -> None:
    async with scripted_client(tmp_path, PREOPENED, say("\n", ANSWER, "\n\nyes", END)) as http:
        whole = (await http.post(MESSAGES, json={"messages": SUM, "max_tokens": 500})).json()
    thought, answer = whole["content"]
    assert (thought["type"], thought["thinking"], answer["text"]) == ("thinking", "", "yes")
    assert thought["signature"]


async def test_a_reply_may_think_again(tmp_path: Path) -> None:
    """Each thought is a block of its own, and the signatures together hold the reply up to the last thought."""
    script = say(THINK, "\none\n", ANSWER, "\n\nfirst ", THINK, "\ntwo\n", ANSWER, "\n\nsecond", END)
    async with scripted_client(tmp_path, CHATML, script) as http:
        whole = (await http.post(MESSAGES, json={"messages": SUM, "max_tokens": 500})).json()
        kinds = [(block["type"], block[block["type"]].strip()) for block in whole["content"]]
        assert kinds == [("thinking", "one"), ("text", "first"), ("thinking", "two"), ("text", "second")]
        parts = [parse_signature(block["signature"], block["thinking"]) for block in whole["content"][::2]]
        ids = [id for part in parts if part is not None for id in part.ids]
        assert ids == script[: len(ids)]
        assert ids[-1] == ANSWER


@pytest.mark.parametrize("template", [PREOPENED, CHATML])
async def test_every_cut_of_a_scripted_reply_goes_on(tmp_path: Path, template: str) -> None:
    opened = [] if template == PREOPENED else [THINK, *say("\n")]
    script = [*opened, *say("think of it\n", ANSWER, "\n\nWave: 👋🏽!", END)]
    async with scripted_client(tmp_path, template, script) as http:

        async def create(messages: list[Any], max_tokens: int) -> dict[str, Any]:
            answer = await http.post(MESSAGES, json={"messages": messages, "max_tokens": max_tokens})
            assert answer.status_code == 200, answer.text
            value: dict[str, Any] = answer.json()
            return value

        whole = await create(SUM, 500)
        for cut in range(len(opened) + 1, len(script) - 1):
            part = await create(SUM, cut)
            rest = await create([*SUM, {"role": "assistant", "content": part["content"]}], 500)
            for kind in ("thinking", "text"):
                joined = "".join(block.get(kind, "") for block in [*part["content"], *rest["content"]])
                assert joined == "".join(block.get(kind, "") for block in whole["content"]), cut


async def test_the_context_can_be_full(tmp_path: Path) -> None:
    script = say("A long answer that does not end soon.", END)
    async with scripted_client(tmp_path, CHATML, script, context=60) as http:
        prompt = (await http.post(f"{MESSAGES}/count_tokens", json={"messages": SUM})).json()["input_tokens"]
        answer = (await http.post(MESSAGES, json={"messages": SUM, "max_tokens": 500})).json()
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["output_tokens"] == 60 - prompt
        answer = (await http.post(MESSAGES, json={"messages": SUM, "max_tokens": 2})).json()
        assert answer["stop_reason"] == "max_tokens"
        long = [{"role": "user", "content": "word " * 60}]
        refused = await http.post(MESSAGES, json={"messages": long, "max_tokens": 2})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("prompt is too long")
        counted = await http.post(f"{MESSAGES}/count_tokens", json={"messages": long})
        assert counted.json()["input_tokens"] > 60


async def test_a_full_queue_is_an_overload(tmp_path: Path) -> None:
    settings = ServerSettings(limits=ServerLimits(max_replies=0))
    async with scripted_client(tmp_path, CHATML, say("yes", END), settings=settings) as http:
        refused = await http.post(MESSAGES, json={"messages": SUM, "max_tokens": 5})
    assert (refused.status_code, refused.json()["error"]["type"]) == (529, "overloaded_error")
    assert refused.headers["retry-after"] == "1"
