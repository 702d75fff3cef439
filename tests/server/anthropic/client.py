"""Requests that many tests send, and a parser for their streams."""

from __future__ import annotations

import json
from typing import Any

import httpx

MESSAGES = "/v1/messages"
SUM: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather at a place.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
LAMP: dict[str, Any] = {
    "name": "set_lamp",
    "description": "Sets the lamp.",
    "input_schema": {"type": "object", "properties": {"level": {"type": "integer"}}, "required": ["level"]},
}
GREEDY: dict[str, Any] = {"model": "sprout", "max_tokens": 300, "temperature": 0}


def create(http: httpx.Client, messages: list[Any] = SUM, **fields: Any) -> dict[str, Any]:
    """A complete message, greedy by default."""
    answer = http.post(MESSAGES, json={**GREEDY, "messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def stream_events(http: httpx.Client, messages: list[Any] = SUM, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post(MESSAGES, json={**GREEDY, "messages": messages, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream. Checks that the SSE event name is the event's type."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def expect_error(http: httpx.Client, messages: list[Any] = SUM, **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = http.post(MESSAGES, json={**GREEDY, "messages": messages, **fields})
    assert answer.json()["type"] == "error", answer.text
    assert answer.json()["request_id"] == answer.headers["request-id"]
    return answer.status_code, answer.json()["error"]


def texts(content: list[dict[str, Any]], kind: str) -> str:
    """The text of all blocks of a type."""
    return "".join(block[kind] for block in content if block["type"] == kind)


def assistant(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
