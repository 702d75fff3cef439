"""A request that names a conversation is kept in it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.server.anthropic.asking import GREEDY, MESSAGES, QUESTION, WEATHER, ask, events, refused, reply, texts

NAME: list[Any] = [{"role": "user", "content": "My name is Ann."}]
ASKS: dict[str, Any] = {"role": "user", "content": "What is my name?"}


def test_a_whole_history_lands_once(http: httpx.Client) -> None:
    first = ask(http, NAME, metadata={"conversation": "new", "user_id": "x"})
    place = first["metadata"]
    said = [*NAME, reply(first["content"]), ASKS]
    second = ask(http, said, metadata={"conversation": place["conversation"]})
    assert "Ann" in texts(second["content"], "text")
    path = http.get(f"/api/messages/{second['metadata']['reply']}/path").json()
    assert [message["role"] for message in path] == ["user", "assistant", "user", "assistant"]
    again = ask(http, said, metadata={"conversation": place["conversation"]})
    assert again["metadata"]["message"] == second["metadata"]["message"], "the same question is not put twice"


def test_one_message_is_said_where_the_conversation_was_left(http: httpx.Client) -> None:
    first = ask(http, NAME, system="You are kind.", metadata={"conversation": "new"})
    conversation = first["metadata"]["conversation"]
    body = {**GREEDY, "messages": [ASKS], "stream": True}
    answer = http.post(MESSAGES, json=body, headers={"x-conversation": conversation})
    assert answer.headers["x-conversation"] == conversation
    told = events(answer.text)
    assert told[0]["message"]["metadata"]["conversation"] == conversation
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "Ann" in "".join(delta.get("text", "") for delta in deltas)
    assert "".join(delta.get("thinking", "") for delta in deltas)
    assert told[-2]["usage"]["output_tokens"] > 0
    assert told[-2]["delta"]["stop_reason"] == "end_turn"


def test_calls_land_too(http: httpx.Client) -> None:
    first = ask(http, QUESTION, tools=[WEATHER], metadata={"conversation": "new"})
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": '{"degrees": 21}'}
    said = [*QUESTION, reply(first["content"]), {"role": "user", "content": [result]}]
    second = ask(http, said, tools=[WEATHER], metadata={"conversation": first["metadata"]["conversation"]})
    assert "21" in texts(second["content"], "text")
    path = http.get(f"/api/messages/{second['metadata']['reply']}/path").json()
    assert [message["role"] for message in path] == ["user", "assistant", "tool", "assistant"]


def test_one_call_where_they_may_not_be_parallel(http: httpx.Client) -> None:
    both = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = ask(http, both, tools=[WEATHER], tool_choice=choice, metadata={"conversation": "new"})
    assert sum(block["type"] == "tool_use" for block in answer["content"]) == 1
    assert answer["stop_reason"] == "tool_use"


def test_what_does_not_go_with_a_conversation(http: httpx.Client) -> None:
    new = {"metadata": {"conversation": "new"}}
    assert refused(http, [*NAME, reply([{"type": "text", "text": "Hello"}])], **new)[0] == 400
    assert refused(http, NAME, metadata={"conversation": "nope"})[0] == 404
