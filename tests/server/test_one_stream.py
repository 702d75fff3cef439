"""A stored reply is sent as a stateless one: every API encodes the same batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.generation import Alternative, Step
from tests.scripted_engine import Script
from tests.server.scripted_server import ANSWER, END, THINK, say, scripted_client
from tests.server.socket.client import connect_client
from tests.tiny import CHATML, PREOPENED

TOOLS = CHATML.replace(
    "{{- message.content + '<|im_end|>\\n' }}",
    """{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- set value = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '\\n<tool_call>\\n' + value | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}""",
).replace(
    "{%- for message in messages %}",
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}",
    1,
)
CALL = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]}
QUESTION = [{"role": "user", "content": "What is it?"}]
OWN_FIELDS = {"id", "created", "created_at", "completed_at", "item_id", "turn_id"}
STORE_FIELDS = {"metadata", "conversation", "store", "reply"}


def steps(*parts: str | int) -> Script:
    """Tokens with log-probabilities, which the store keeps exactly."""
    return [
        Step(id, -0.125 * (at % 5), (Alternative(id, -0.5), Alternative(65, -1.5 - at)))
        for at, id in enumerate(say(*parts))
    ]


THOUGHT = steps(THINK, "\nthink 👋 a\n\n", ANSWER, "\n\nWave: 👋🏽 <think in there.\n", END)
OPENED = steps("so it thinks\n", ANSWER, "\n\nThe answer. STOP </think", END)
CALLING = steps(THINK, "\nlook\n", ANSWER, "\n\nI look." + CALL, END)
MODELS = {"thought": (CHATML, THOUGHT), "opened": (PREOPENED, OPENED), "calling": (TOOLS, CALLING)}


def shared(value: Any) -> Any:
    """Without the fields that no two replies share."""
    if isinstance(value, dict):
        return {name: shared(one) for name, one in value.items() if name not in OWN_FIELDS | STORE_FIELDS}
    return [shared(one) for one in value] if isinstance(value, list) else value


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await http.post(path, json={**body, "seed": 1, "stream": True})
    assert answer.status_code == 200, answer.text
    return [shared(json.loads(line[6:])) for line in answer.text.splitlines() if line.startswith("data: {")]


def chat_bodies(model: str) -> list[dict[str, Any]]:
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    details = {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, **usage}
    bodies: list[dict[str, Any]] = [details, {**details, "max_tokens": 14}, {**details, "stop": ["in ", "STOP"]}]
    if model == "calling":
        bodies.append({**details, **FUNCTION})
    if model == "thought":
        ids = [step.token_id for step in THOUGHT if isinstance(step, Step)]
        for count in (3, 9, 14, 15, 24, 30):
            partial = {"role": "assistant", "content": "", "token_ids": ids[:count]}
            bodies.append({**details, "messages": [*QUESTION, partial]})
    return [{**body, **raw} for body in bodies for raw in ({}, {"reasoning_format": "none"})]


@pytest.mark.parametrize("model", MODELS)
async def test_chat_completions(tmp_path: Path, model: str) -> None:
    template, script = MODELS[model]
    async with scripted_client(tmp_path, template, script) as http:
        for body in chat_bodies(model):
            stateless = await events(http, "/v1/chat/completions", body)
            stored = await events(http, "/v1/chat/completions", {**body, "metadata": {"conversation": "new"}})
            assert stateless == stored, body
            assert stateless[-2]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("where", [{}, {"metadata": {"conversation": "new"}}], ids=["stateless", "stored"])
async def test_a_raw_reply_has_the_marker_that_the_prompt_wrote(tmp_path: Path, where: dict[str, Any]) -> None:
    raw = "<think>\nso it thinks\n</think>\n\nThe answer."
    script = steps("so it thinks\n", ANSWER, "\n\nThe answer.", END)
    async with scripted_client(tmp_path, PREOPENED, script) as http:
        for body, text, thinking in (
            ({"reasoning_format": "none"}, raw, None),
            ({"reasoning_format": "none", "max_tokens": 2}, "<think>\nso", None),
            ({}, "The answer.", "so it thinks"),
        ):
            given = {"messages": QUESTION, **body, **where}
            whole = await http.post("/v1/chat/completions", json=given)
            message = whole.json()["choices"][0]["message"]
            streamed = await events(http, "/v1/chat/completions", given)
            deltas = [choice["delta"] for event in streamed for choice in event["choices"]]
            assert (message["content"], message.get("reasoning_content")) == (text, thinking)
            assert "".join(delta.get("content") or "" for delta in deltas) == text
            assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (thinking or "")


@pytest.mark.parametrize("model", MODELS)
async def test_responses(tmp_path: Path, model: str) -> None:
    template, script = MODELS[model]
    body = {"input": "What?", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with scripted_client(tmp_path, template, script) as http:
        stateless = await events(http, "/v1/responses", {**body, "store": False})
        stored = await events(http, "/v1/responses", body)
    assert stateless == stored
    assert stateless[-1]["type"] == "response.completed"


@pytest.mark.parametrize("model", MODELS)
async def test_socket(tmp_path: Path, model: str) -> None:
    template, script = MODELS[model]
    async with (
        scripted_client(tmp_path, template, script) as http,
        connect_client(str(http.base_url).rstrip("/")) as client,
    ):
        stateless = await client.request(messages=QUESTION)
        stored = await client.request(messages=QUESTION, conversation="new")
    assert shared(stateless) == shared(stored)
    assert stateless[-1]["type"] == "done"
