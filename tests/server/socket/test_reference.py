"""Recorded clients of the reference implementation work unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live_server import LiveServer
from tests.server.socket.client import SocketClient, connect_client, texts

RECORDED: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant."}]},
        {"role": "user", "content": "What is 12 + 30?"},
    ],
    "streaming": True,
    "generation": {"max_new_tokens": 256, "do_sample": True, "length_penalty": 1.1},
    "image": {"max_slice_nums": 1},
    "omni_mode": False,
}
"""The request of the demo's page for a turn without audio."""
FIELDS: dict[str, dict[str, type]] = {
    "prefill_done": {"input_tokens": int},
    "chunk": {"text_delta": str},
    "done": {"text": str, "generated_tokens": int, "input_tokens": int},
}
OPTIONAL = {"audio_data": str, "thinking_delta": str}


def check(received: list[dict[str, Any]]) -> None:
    """Checks the documented fields and types, and that sequence numbers have no gap."""
    assert [message["seq"] for message in received] == list(range(1, len(received) + 1))
    for message in received:
        for name, kind in FIELDS[message["type"]].items():
            assert type(message[name]) is kind, (name, message)
        for name, kind in OPTIONAL.items():
            assert name not in message or type(message[name]) is kind, (name, message)


async def read_like_the_demo(client: SocketClient, body: dict[str, Any]) -> str:
    """The text of the reply, read as the demo's page reads it."""
    text = ""
    await client.send(**body)
    while True:
        message = await client.receive()
        match message["type"]:
            case "prefill_done":
                assert message["input_tokens"] > 0
            case "chunk":
                text += message["text_delta"]
            case "done":
                assert text in ("", message["text"])
                reply: str = message["text"]
                return reply
            case other:
                pytest.fail(f"{other}: {message}")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_recorded_client_works_unchanged(live: LiveServer, streaming: bool) -> None:
    async with connect_client(live.url) as client:
        text = await read_like_the_demo(client, {**RECORDED, "streaming": streaming})
        assert "42" in text


async def test_streaming_tells_pieces_and_then_the_whole(live: LiveServer) -> None:
    body = {**RECORDED, "generation": {"do_sample": False}}
    async with connect_client(live.url) as client:
        received = await client.request(**body)
        check(received)
        assert [message["type"] for message in received[:2]] == ["prefill_done", "chunk"]
        done = received[-1]
        assert done["text"] == texts(received)
        assert "42" in done["text"]
        assert done["thinking"] == texts(received, "thinking_delta") == ""
        assert done["finish_reason"] == "stop"
        assert done["input_tokens"] == received[0]["input_tokens"]
        assert done["turn_id"] == received[0]["turn_id"]
        assert "audio_data" not in done


async def test_not_streaming_tells_the_whole_at_once(live: LiveServer) -> None:
    async with connect_client(live.url) as client:
        greedy = {**RECORDED, "generation": {"do_sample": False}}
        streamed = await client.request(**greedy)
        received = await client.request(**{**greedy, "streaming": False})
        check(received)
        assert [message["type"] for message in received] == ["prefill_done", "done"]
        same = ("text", "generated_tokens", "input_tokens", "finish_reason")
        assert [received[-1][name] for name in same] == [streamed[-1][name] for name in same]
        assert received[0]["cached_tokens"] > 0, "what was computed for the first is reused"


async def test_generated_tokens_are_tokens(live: LiveServer) -> None:
    async with connect_client(live.url) as client:
        (done,) = (await client.request(**{**RECORDED, "generation": {"max_new_tokens": 5}}))[-1:]
        assert (done["generated_tokens"], done["finish_reason"]) == (5, "length")


@pytest.mark.parametrize("stored", [{}, {"conversation": "new"}])
async def test_a_prompt_longer_than_asked_for_is_refused(live: LiveServer, stored: dict[str, str]) -> None:
    async with connect_client(live.url) as client:
        for limit in (8192, 16):
            received = await client.request(**{**RECORDED, "generation": {"max_inp_length": limit}}, **stored)
            assert received[-1]["type"] == ("done" if limit == 8192 else "error")
        assert received[-1]["error"].startswith("generation.max_inp_length 16: the prompt is longer: ")


async def test_thinking_is_closed_unless_it_is_asked_for(live: LiveServer) -> None:
    async with connect_client(live.url) as client:
        for fields in ({}, {"enable_thinking": None}, {"enable_thinking": False}):
            received = await client.request(**RECORDED, **fields)
            assert received[-1]["thinking"] == ""
        received = await client.request(**RECORDED, enable_thinking=True)
        check(received)
        assert received[-1]["thinking"] == texts(received, "thinking_delta") != ""
        assert texts(received) == received[-1]["text"]


async def test_turns_follow_each_other_on_one_socket(live: LiveServer) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "My name is Ann."}]
    async with connect_client(live.url) as client:
        first = (await client.request(messages=history, generation={"do_sample": False}))[-1]
        history += [{"role": "assistant", "content": first["text"], "thinking": first["thinking"]}]
        history += [
            {"role": "user", "content": [{"type": "text", "text": "What is my "}, {"type": "text", "text": "name?"}]}
        ]
        received = await client.request(messages=history, generation={"do_sample": False})
        assert "Ann" in received[-1]["text"]
        assert received[0]["cached_tokens"] > 0, "what was computed for the first is reused"


async def test_length_penalty_holds_back_the_end(live: LiveServer) -> None:
    async with connect_client(live.url) as client:
        ends = {"do_sample": False, "max_new_tokens": 60}
        free = (await client.request(messages=RECORDED["messages"], generation={**ends, "length_penalty": 1}))[-1]
        long = (await client.request(messages=RECORDED["messages"], generation={**ends, "length_penalty": 100}))[-1]
        assert free["finish_reason"] == "stop"
        assert long["generated_tokens"] > free["generated_tokens"]
