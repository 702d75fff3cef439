"""Requests that many tests send, and how their streams are read."""

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


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A whole answer, greedy unless told otherwise."""
    answer = http.post(CHAT, json={"messages": SUM, "temperature": 0, "max_tokens": 300, **fields})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def refused(http: httpx.Client, path: Any = CHAT, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"messages": SUM, **fields} if path == CHAT else fields
    answer = http.post(path, json=body)
    return answer.status_code, answer.json()["error"]


def chunks(text: str) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post(CHAT, json={"messages": SUM, "temperature": 0, "max_tokens": 300, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return chunks(answer.text)


def said(events: list[dict[str, Any]], name: str, index: int = 0) -> str:
    found = (choice for event in events for choice in event["choices"] if choice["index"] == index)
    return "".join(choice["delta"].get(name) or "" for choice in found)
