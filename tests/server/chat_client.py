"""Helpers that send chat completion requests and read their streams."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
get = partial(httpx.get, timeout=60)
post = partial(httpx.post, timeout=60)
options = partial(httpx.options, timeout=60)
SUM = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
LAMP = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "Sets the lamp.",
        "parameters": {
            "type": "object",
            "properties": {"level": {"type": "integer"}, "warm": {"type": "boolean"}},
            "required": ["level"],
        },
    },
}


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A completion, greedy by default."""
    response = http.post(CHAT, json={"messages": SUM, "temperature": 0, "max_tokens": 300, **fields})
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


def post_error(http: httpx.Client, path: Any = CHAT, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"messages": SUM, **fields} if path == CHAT else fields
    response = http.post(path, json=body)
    return response.status_code, response.json()["error"]


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a complete stream."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(CHAT, json={"messages": SUM, "temperature": 0, "max_tokens": 300, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return chunks(response.text)


def delta_text(events: list[dict[str, Any]], name: str, index: int = 0) -> str:
    """The joined values of one delta field of a choice."""
    choices = (choice for event in events for choice in event["choices"] if choice["index"] == index)
    return "".join(choice["delta"].get(name) or "" for choice in choices)
