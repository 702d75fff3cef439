"""Failures during a reply: every request ends, and an engine failure has a status that clients retry."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from palaver.errors import EngineError
from palaver.server.errors import OVERLOADED
from tests.scripted_engine import FailScript, HoldScript, Script
from tests.server.chat_client import CHAT, SUM, chunks
from tests.server.scripted_server import END, say, scripted_client
from tests.server.socket.client import scripted_server
from tests.tiny import CHATML

BROKEN: Any = RuntimeError("a tensor has the wrong shape")
DIED = EngineError("The engine died: continue the reply later.")
FAILS: Script = [FailScript(DIED)]
FAILS_LATE: Script = [*say("One"), FailScript(DIED)]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SUM},
    "/v1/completions": {"prompt": "One"},
    RESPONSES: {"input": "What is 12 + 30?"},
    MESSAGES: {"messages": SUM, "max_tokens": 50},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_of_several_choices_fails_with_an_ordinary_error(tmp_path: Path, stream: bool) -> None:
    """The other choice is never heard of again: the request must not wait for both."""
    scripts: list[Script] = [[HoldScript(asyncio.Event())], [*say("One"), FailScript(BROKEN)]]
    async with asyncio.timeout(60), scripted_client(tmp_path, CHATML, *scripts) as http:
        answer = await http.post(CHAT, json={"messages": SUM, "n": 2, "stream": stream})
        if stream:
            assert chunks(answer.text)[-1]["error"]["type"] == "server_error"
        else:
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
        assert BROKEN.args[0] not in answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_failing_engine_is_unavailable(tmp_path: Path, path: str) -> None:
    async with scripted_client(tmp_path, CHATML, FAILS_LATE) as http:
        answer = await http.post(path, json=BODIES[path])
    assert answer.status_code == (OVERLOADED if path == MESSAGES else 503)
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["message"] == str(DIED)
    assert error["type"] == ("overloaded_error" if path == MESSAGES else "server_error")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_stored_reply_fails_the_same_way(tmp_path: Path, path: str) -> None:
    async with scripted_client(tmp_path, CHATML, FAILS) as http:
        answer = await http.post(path, json={**BODIES[path], "metadata": {"conversation": "new"}})
    assert answer.status_code == (OVERLOADED if path == MESSAGES else 503)
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_has_begun_ends_with_an_error(tmp_path: Path, path: str) -> None:
    async with scripted_client(tmp_path, CHATML, FAILS_LATE) as http:
        answer = await http.post(path, json={**BODIES[path], "stream": True})
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    assert str(DIED) in json.dumps(events[-1])


async def test_a_stored_response_that_failed_is_found_again(tmp_path: Path) -> None:
    """The request for it is a 503, which clients send again; what was said is kept."""
    async with scripted_client(tmp_path, CHATML, FAILS_LATE, [*say("Two"), END]) as http:
        assert (await http.post(RESPONSES, json=BODIES[RESPONSES])).status_code == 503
        whole = (await http.post(RESPONSES, json=BODIES[RESPONSES])).json()
        assert (whole["status"], whole["output"][-1]["content"][0]["text"]) == ("completed", "Two")
        background = (await http.post(RESPONSES, json={**BODIES[RESPONSES], "background": True})).json()
        async with http.stream("GET", f"{RESPONSES}/{background['id']}", params={"stream": True}) as events:
            await events.aread()
        failed = (await http.get(f"{RESPONSES}/{background['id']}")).json()
        assert (failed["status"], failed["error"]["message"]) == ("failed", str(DIED))


async def test_the_sdks_send_it_again(tmp_path: Path) -> None:
    """Both retry what is unavailable, by themselves."""
    async with scripted_client(tmp_path, CHATML, FAILS, [*say("Two"), END], FAILS, [*say("Two"), END]) as http:
        base = str(http.base_url).rstrip("/")
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none") as client:
            reply = await client.chat.completions.create(model="scripted", messages=SUM)  # type: ignore[arg-type]
            assert reply.choices[0].message.content == "Two"
        async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as theirs:
            message = await theirs.messages.create(model="scripted", max_tokens=50, messages=SUM)  # type: ignore[arg-type]
            assert [block.text for block in message.content if block.type == "text"] == ["Two"]


@pytest.mark.parametrize("path", [*BODIES, "/v1/tokenize", "/api/conversations"])
async def test_a_body_that_is_no_json_is_named_so(tmp_path: Path, path: str) -> None:
    headers = {"content-type": "application/json"}
    async with scripted_client(tmp_path, CHATML, FAILS) as http:
        answer = await http.post(path, content="{", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("The body is not JSON: ")


TEXT_BLOCK = {"type": "text"}
RESULT_BLOCK = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
CALL = {"id": "a", "function": {"arguments": "{}"}}


def user(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", **fields}]}


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, user(content=5), "messages[0].content"),
        (CHAT, user(tool_calls=[CALL]), "messages[0].tool_calls[0].function.name"),
        (CHAT, {"messages": SUM, "tool_choice": "banana"}, "tool_choice"),
        (CHAT, {"messages": SUM, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (CHAT, {"messages": SUM, "stop": ["a", 1.5]}, "stop[1]"),
        (CHAT, {"messages": SUM, "tools": [{"type": "function"}], "n": "x"}, "n"),
        (CHAT, {}, "messages"),
        ("/v1/responses", {"input": [{"type": "banana"}]}, "input[0].type"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ("/v1/messages", user(content=[TEXT_BLOCK]), "messages[0].content[0].text"),
        ("/v1/messages", user(content=[RESULT_BLOCK]), "messages[0].content[0].content[0].source"),
        ("/v1/messages", {"messages": SUM}, "max_tokens"),
    ],
)
async def test_a_wrong_field_is_named_as_in_the_request(
    tmp_path: Path, path: str, fields: dict[str, Any], name: str
) -> None:
    async with scripted_client(tmp_path, CHATML, FAILS) as http:
        answer = await http.post(path, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["details"]["name"]) == (400, name)
    assert error.get("param", name) == name


async def test_answers_about_tokens_are_compact_json(tmp_path: Path) -> None:
    async with scripted_client(tmp_path, CHATML, FAILS) as http:
        answer = await http.post("/v1/tokenize", json={"prompt": "One"})
        document = (await http.get("/openapi.json")).json()
    assert answer.text == json.dumps(answer.json(), separators=(",", ":"))
    for path in ("/v1/tokenize", "/v1/detokenize", "/v1/apply-template"):
        described = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert described["type"] == "object"


async def test_a_stored_reply_says_that_the_server_shuts_down(tmp_path: Path) -> None:
    body = {**BODIES[CHAT], "stream": True, "metadata": {"conversation": "new"}}
    async with (
        asyncio.timeout(60),
        scripted_server(tmp_path, held=True) as held,
        httpx.AsyncClient(base_url=held.url, timeout=60, trust_env=False) as http,
        http.stream("POST", CHAT, json=body) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        closing = asyncio.create_task(held.server.close(grace=0))
        events = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        await closing
    assert events[-1]["error"]["code"] == "shutting_down"
