from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.chat_client import CHAT, SUM, chunks, delta_text, post_error

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


def test_a_refused_request_leaves_no_conversation(http: httpx.Client) -> None:
    def count() -> int:
        return len(http.get("/api/conversations").json())

    before = count()
    overflow = {"messages": [{"role": "user", "content": "word " * 9000}], "metadata": {"conversation": "new"}}
    assert http.post(CHAT, json=overflow).status_code == 400
    assert http.post("/v1/messages", json={**overflow, "max_tokens": 1}).status_code == 400
    assert count() == before


def test_a_new_conversation_is_created_once_for_a_key(http: httpx.Client) -> None:
    body = {"messages": NAME, "temperature": 0, "metadata": {"conversation": "new"}}
    sent = [http.post(CHAT, json=body, headers={"idempotency-key": "once"}).json() for _ in range(2)]
    assert sent[0]["metadata"] == sent[1]["metadata"]


def test_one_message_is_said_where_the_conversation_was_left(http: httpx.Client) -> None:
    first = land(http, "new", [{"role": "system", "content": "You are kind."}, *NAME])
    conversation = first["metadata"]["conversation"]
    asked = {"messages": [ASKS], "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(CHAT, json=asked, headers={"x-conversation": conversation})
    assert answer.headers["x-conversation"] == conversation
    events = chunks(answer.text)
    assert "Ann" in delta_text(events, "content")
    assert delta_text(events, "reasoning_content")
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


def whole(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """All that must be the same with and without a conversation; log-probabilities up to rounding."""
    return [{**choice, "logprobs": rounded(choice["logprobs"])} for choice in answer["choices"]]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 2) if isinstance(value, float) else value


SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 60}


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"reasoning_format": "none"},
        {"response_prefix": "<think>\nOne moment", "return_token_ids": True, "max_tokens": 90},
        {"response_prefix": "<think>\nOne moment", "return_token_ids": True, "max_tokens": 20},
        {"n": 3, "logprobs": True, "return_token_ids": True},
        {"include_reasoning": False, "stop": ["4"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_reply_in_a_conversation_is_told_as_one_without(http: httpx.Client, fields: dict[str, Any]) -> None:
    fields = {**SAMPLED, **fields}
    plain = http.post(CHAT, json={"messages": SUM, **fields}).json()
    landed = land(http, "new", SUM, **fields)
    assert whole(landed) == whole(plain)
    assert landed.get("prompt_token_ids") == plain.get("prompt_token_ids")
    assert landed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    body = {"messages": SUM, **fields, "metadata": {"conversation": "new"}, "stream": True}
    events = chunks(http.post(CHAT, json=body).text)
    for choice in plain["choices"]:
        own = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content") or "" for c in own) == (choice["message"]["content"] or "")
        assert [i for c in own for i in c.get("token_ids", ())] == choice.get("token_ids", [])
        assert own[-1]["finish_reason"] == choice["finish_reason"]


def test_choices_are_siblings_and_the_first_is_where_the_conversation_is_left(http: httpx.Client) -> None:
    answer = land(http, "new", NAME, n=3, **SAMPLED)
    about = answer["metadata"]
    assert len(set(about["replies"])) == 3
    assert about["reply"] == about["replies"][0]
    siblings = http.get(f"/api/messages/{about['reply']}/siblings").json()
    assert {one["id"] for one in siblings} == set(about["replies"])
    assert http.get(f"/api/conversations/{about['conversation']}").json()["head_id"] == about["reply"]


@pytest.mark.parametrize("by", ["ids", "words", "the conversation's own tokens"])
@pytest.mark.parametrize("kept", [8, 25, 40])
def test_a_begun_reply_goes_on_beside_what_was_there(http: httpx.Client, by: str, kept: int) -> None:
    uncut = http.post(CHAT, json={"messages": SUM, **SAMPLED, "return_token_ids": True}).json()["choices"][0]
    first = land(http, "new", SUM, **{**SAMPLED, "max_tokens": kept}, return_token_ids=True)
    cut = first["choices"][0]
    begun = {**cut["message"], "role": "assistant"}
    if by == "ids":
        begun["token_ids"] = cut["token_ids"]
    home = "new" if by == "words" else first["metadata"]["conversation"]
    asked = {**SAMPLED, "max_tokens": SAMPLED["max_tokens"] - kept}
    if by == "the conversation's own tokens":
        asked["seed"] = None
    rest = land(http, home, [*SUM, begun], **asked, continue_final_message=True, return_token_ids=True)
    if by != "words":
        assert cut["token_ids"] + rest["choices"][0]["token_ids"] == uncut["token_ids"]
    stored = http.get(f"/api/messages/{rest['metadata']['reply']}").json()
    text = "".join(part["text"] for part in stored["parts"] if part["type"] == "text")
    assert text.startswith(cut["message"]["content"] or "")
    assert text.endswith(rest["choices"][0]["message"]["content"] or "")
    siblings = http.get(f"/api/messages/{rest['metadata']['reply']}/siblings").json()
    assert len(siblings) == (1 if by == "words" else 2)


def test_a_key_makes_a_begun_reply_go_on_once(http: httpx.Client) -> None:
    first = land(http, "new", SUM, max_tokens=10)
    begun = {**first["choices"][0]["message"], "role": "assistant"}
    body = {
        "messages": [*SUM, begun],
        "continue_final_message": True,
        "metadata": {"conversation": first["metadata"]["conversation"]},
    }
    answers = [http.post(CHAT, json=body, headers={"idempotency-key": "again"}).json() for _ in range(2)]
    assert answers[0]["metadata"] == answers[1]["metadata"]
    assert whole(answers[0]) == whole(answers[1])


def test_what_makes_no_sense_is_named(http: httpx.Client) -> None:
    assert post_error(http, metadata={"conversation": "new"}, n=1000)[1]["param"] == "n"
    assert post_error(http, metadata={"conversation": "new"}, regex="(")[1]["param"] == "response_format.regex"
    assert post_error(http, metadata={"conversation": "nope"})[0] == 404
    assert post_error(http, metadata={"conversation": 5})[0] == 400
