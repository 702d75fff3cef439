from __future__ import annotations

from typing import Any

import httpx

from tests.server.asking import CHAT, SUM, chunks, refused, said

NAME = [{"role": "user", "content": "My name is Ann."}]
ASKS = {"role": "user", "content": "What is my name?"}


def land(http: httpx.Client, conversation: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "metadata": {"conversation": conversation}, **fields}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def path(http: httpx.Client, answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The branch that the answer's reply ends."""
    found = http.get(f"/api/messages/{answer['metadata']['reply']}/path").json()
    listed = found["messages"] if isinstance(found, dict) else found
    return [(m["role"], "".join(p.get("text", "") for p in m["parts"] if p.get("type") == "text")) for m in listed]


def test_a_whole_history_lands_once(http: httpx.Client) -> None:
    first = land(http, "new", NAME)
    reply = first["choices"][0]["message"]
    second = land(http, first["metadata"]["conversation"], [*NAME, reply, ASKS])
    assert "Ann" in second["choices"][0]["message"]["content"]
    assert [role for role, _ in path(http, second)] == ["user", "assistant", "user", "assistant"]
    again = land(http, first["metadata"]["conversation"], [*NAME, reply, ASKS])
    assert again["metadata"]["message"] == second["metadata"]["message"], "the same question is not put twice"
    assert again["metadata"]["reply"] != second["metadata"]["reply"], "the reply to it is another try"


def test_one_message_is_said_where_the_conversation_was_left(http: httpx.Client) -> None:
    first = land(http, "new", [{"role": "system", "content": "You are kind."}, *NAME])
    conversation = first["metadata"]["conversation"]
    asked = {"messages": [ASKS], "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(CHAT, json=asked, headers={"x-conversation": conversation})
    assert answer.headers["x-conversation"] == conversation
    events = chunks(answer.text)
    assert "Ann" in said(events, "content")
    assert said(events, "reasoning_content")
    assert events[0]["metadata"]["conversation"] == conversation
    assert events[-1]["usage"]["completion_tokens"] > 0


def test_another_wording_is_a_branch(http: httpx.Client) -> None:
    first = land(http, "new", NAME)
    reply = first["choices"][0]["message"]
    conversation = first["metadata"]["conversation"]
    one = land(http, conversation, [*NAME, reply, ASKS])
    other = land(http, conversation, [*NAME, reply, *SUM])
    assert path(http, one)[:2] == path(http, other)[:2]
    assert "42" in other["choices"][0]["message"]["content"]


def test_what_does_not_go_with_a_conversation_is_named(http: httpx.Client) -> None:
    for name, value in (("n", 2), ("logprobs", True), ("return_token_ids", True), ("response_prefix", "x")):
        status, error = refused(http, metadata={"conversation": "new"}, **{name: value})
        assert (status, error["param"]) == (400, name)
    assert refused(http, metadata={"conversation": "nope"})[0] == 404
    assert refused(http, metadata={"conversation": 5})[0] == 400
