"""Requests that name a conversation are stored in it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.server.anthropic.client import (
    GREEDY,
    MESSAGES,
    QUESTION,
    WEATHER,
    assistant,
    create,
    expect_error,
    parse_events,
    texts,
)

NAME: list[Any] = [{"role": "user", "content": "My name is Ann."}]
NAME_QUESTION: dict[str, Any] = {"role": "user", "content": "What is my name?"}


def test_a_whole_history_is_stored_once(http: httpx.Client) -> None:
    first = create(http, NAME, metadata={"conversation": "new", "user_id": "x"})
    stored = first["metadata"]
    history = [*NAME, assistant(first["content"]), NAME_QUESTION]
    second = create(http, history, metadata={"conversation": stored["conversation"]})
    assert "Ann" in texts(second["content"], "text")
    path = http.get(f"/api/messages/{second['metadata']['reply']}/path").json()
    assert [message["role"] for message in path] == ["user", "assistant", "user", "assistant"]
    again = create(http, history, metadata={"conversation": stored["conversation"]})
    assert again["metadata"]["message"] == second["metadata"]["message"], "the same question is not stored twice"


def test_one_message_is_said_where_the_conversation_was_left(http: httpx.Client) -> None:
    first = create(http, NAME, system="You are kind.", metadata={"conversation": "new"})
    conversation = first["metadata"]["conversation"]
    body = {**GREEDY, "messages": [NAME_QUESTION], "stream": True}
    answer = http.post(MESSAGES, json=body, headers={"x-conversation": conversation})
    assert answer.headers["x-conversation"] == conversation
    received = parse_events(answer.text)
    assert received[0]["message"]["metadata"]["conversation"] == conversation
    deltas = [event["delta"] for event in received if event["type"] == "content_block_delta"]
    assert "Ann" in "".join(delta.get("text", "") for delta in deltas)
    assert "".join(delta.get("thinking", "") for delta in deltas)
    assert received[-2]["usage"]["output_tokens"] > 0
    assert received[-2]["delta"]["stop_reason"] == "end_turn"


def test_tool_calls_are_stored(http: httpx.Client) -> None:
    first = create(http, QUESTION, tools=[WEATHER], metadata={"conversation": "new"})
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": '{"degrees": 21}'}
    history = [*QUESTION, assistant(first["content"]), {"role": "user", "content": [result]}]
    second = create(http, history, tools=[WEATHER], metadata={"conversation": first["metadata"]["conversation"]})
    assert "21" in texts(second["content"], "text")
    path = http.get(f"/api/messages/{second['metadata']['reply']}/path").json()
    assert [message["role"] for message in path] == ["user", "assistant", "tool", "assistant"]


def test_one_call_where_they_may_not_be_parallel(http: httpx.Client) -> None:
    both = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = create(http, both, tools=[WEATHER], tool_choice=choice, metadata={"conversation": "new"})
    assert sum(block["type"] == "tool_use" for block in answer["content"]) == 1
    assert answer["stop_reason"] == "tool_use"


def test_what_does_not_go_with_a_conversation(http: httpx.Client) -> None:
    new = {"metadata": {"conversation": "new"}}
    assert expect_error(http, [*NAME, assistant([{"type": "text", "text": "Hello"}])], **new)[0] == 400
    assert expect_error(http, NAME, metadata={"conversation": "nope"})[0] == 404
