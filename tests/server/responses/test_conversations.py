"""OpenAI's Conversations API by the official SDK: the same conversations as at every other door."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.live_server import LiveServer

HELLO: Any = {"type": "message", "role": "user", "content": "Hello!"}


def test_a_conversation_is_created_read_changed_and_deleted(client: openai.OpenAI, live: LiveServer) -> None:
    system: Any = {"type": "message", "role": "system", "content": "Be kind."}
    made = client.conversations.create(items=[system, HELLO], metadata={"topic": "demo"})
    assert made.object == "conversation"
    assert made.metadata == {"topic": "demo"}
    assert client.conversations.retrieve(made.id) == made
    ours = httpx.get(f"{live.url}/api/conversations/{made.id}").json()
    assert ours["system"] == "Be kind."
    assert client.conversations.update(made.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_responses_and_items_are_of_the_same_conversation(client: openai.OpenAI, live: LiveServer) -> None:
    made = client.conversations.create()
    response = client.responses.create(model="sprout", input="What is 12 + 30?", conversation=made.id, temperature=0)
    assert "42" in response.output_text
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert [item.type for item in items] == ["message", "reasoning", "message"]
    assert [item.id for item in items[1:]] == [item.id for item in response.output]
    call: Any = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    added = client.conversations.items.create(made.id, items=[HELLO, call, result])
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    found = client.conversations.items.retrieve(added.data[1].id or "", conversation_id=made.id)
    assert found.type == "function_call"
    newest = client.conversations.items.list(made.id, limit=2)
    assert [item.type for item in newest.data] == ["function_call_output", "function_call"]
    assert newest.has_more
    assert len(list(newest)) == 6  # over all pages
    path = httpx.get(f"{live.url}/api/conversations/{made.id}/nodes").json()
    assert [node["role"] for node in path] == ["user", "assistant", "user", "assistant", "tool"]


def test_a_last_item_of_the_assistant_is_stored(client: openai.OpenAI) -> None:
    answer: Any = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi!"}]}
    thought: Any = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A greeting."}]}
    call: Any = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    made = client.conversations.create(items=[HELLO, answer])
    added = client.conversations.items.create(made.id, items=[HELLO, thought, call])
    assert [item.type for item in added.data] == ["message", "reasoning", "function_call"]
    client.conversations.items.create(made.id, items=[result])
    assert [item.type for item in client.conversations.items.create(made.id, items=[thought, answer]).data] == [
        "reasoning",
        "message",
    ]
    stored = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    exchange = ["message", "reasoning", "function_call", "function_call_output", "reasoning", "message"]
    assert stored == ["message", "message", *exchange]
    response = client.responses.create(model="sprout", input="What is 2 + 3?", conversation=made.id, temperature=0)
    assert "5" in response.output_text


def test_an_item_is_deleted(client: openai.OpenAI, live: LiveServer) -> None:
    call: Any = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    more: Any = {"type": "message", "role": "assistant", "content": "Noon."}
    made = client.conversations.create(items=[HELLO, more, call, result, HELLO])
    items = list(client.conversations.items.list(made.id, order="asc"))
    for item, left in ((items[2], ["Hello!", "Noon.", "noon", "Hello!"]), (items[0], ["Noon.", "noon", "Hello!"])):
        assert item.id
        if item is items[0]:
            item = client.conversations.items.list(made.id, order="asc").data[0]
        assert client.conversations.items.delete(item.id or "", conversation_id=made.id).id == made.id
        rest = [one.to_dict() for one in client.conversations.items.list(made.id, order="asc")]
        assert [one.get("output") or one["content"][0]["text"] for one in rest] == left  # type: ignore[index]
    last = client.conversations.items.list(made.id).data[0]
    client.conversations.items.delete(last.id or "", conversation_id=made.id)
    reply = client.responses.create(model="sprout", input="Thanks!", conversation=made.id)
    assert len(httpx.get(f"{live.url}/api/messages/{reply.id.removeprefix('resp_')}/path").json()) == 4
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete(last.id or "", conversation_id=made.id)
    alone = client.conversations.create(items=[HELLO])
    only = client.conversations.items.list(alone.id).data[0]
    with pytest.raises(openai.ConflictError):
        client.conversations.items.delete(only.id or "", conversation_id=alone.id)
    assert client.conversations.items.list(alone.id).data == [only]


def test_what_is_wrong_is_refused_by_its_name(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.conversations.create(metadata={str(number): "x" for number in range(17)})
    nothing: Any = {"type": "message", "role": "user"}
    with pytest.raises(openai.BadRequestError, match=r"items\[0\].content"):
        client.conversations.create(items=[nothing])
    made = client.conversations.create(items=[HELLO])
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve("msg_nothing_0", conversation_id=made.id)
    with pytest.raises(openai.BadRequestError, match="after"):
        client.conversations.items.list(made.id, after="msg_nothing_0")
    store = live.service.store
    key = store.keys.add(store.users.ensure("stranger").id)[1]
    stranger = openai.OpenAI(base_url=f"{live.url}/v1", api_key=key)
    with pytest.raises(openai.NotFoundError):
        stranger.conversations.items.list(made.id)
    with pytest.raises(openai.NotFoundError):
        stranger.conversations.delete(made.id)
