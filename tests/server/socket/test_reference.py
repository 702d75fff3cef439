"""The reference's clients, as they were recorded: their messages are taken unchanged, and what they read is there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live import Live
from tests.server.socket.talk import Talk, talking, texts

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
"""What the page of the demo sends for a turn without sound."""
FIELDS: dict[str, dict[str, type]] = {
    "prefill_done": {"input_tokens": int},
    "chunk": {},
    "done": {"text": str, "generated_tokens": int, "input_tokens": int},
}
OPTIONAL = {"text_delta": str, "audio_data": str, "thinking_delta": str}


def check(told: list[dict[str, Any]]) -> None:
    """The fields and types that the protocol's document names, the numbers without a gap."""
    assert [message["seq"] for message in told] == list(range(1, len(told) + 1))
    for message in told:
        for name, kind in FIELDS[message["type"]].items():
            assert type(message[name]) is kind, (name, message)
        for name, kind in OPTIONAL.items():
            assert name not in message or type(message[name]) is kind, (name, message)


async def as_the_page_does(talk: Talk, body: dict[str, Any]) -> str:
    """Reads what the demo's page reads, and nothing else: the text of the reply."""
    text = ""
    await talk.send(**body)
    while True:
        message = await talk.next()
        match message["type"]:
            case "prefill_done":
                assert message["input_tokens"] > 0
            case "chunk":
                text += message.get("text_delta") or ""
            case "done":
                assert text in ("", message["text"])
                whole: str = message["text"]
                return whole
            case other:
                pytest.fail(f"{other}: {message}")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_recorded_client_works_unchanged(live: Live, streaming: bool) -> None:
    async with talking(live.url) as talk:
        text = await as_the_page_does(talk, {**RECORDED, "streaming": streaming})
        assert "42" in text


async def test_streaming_tells_pieces_and_then_the_whole(live: Live) -> None:
    body = {**RECORDED, "generation": {"do_sample": False}}
    async with talking(live.url) as talk:
        told = await talk.ask(**body)
        check(told)
        assert [message["type"] for message in told[:2]] == ["prefill_done", "chunk"]
        done = told[-1]
        assert done["text"] == texts(told)
        assert "42" in done["text"]
        assert done["thinking"] == texts(told, "thinking_delta") == ""
        assert done["finish_reason"] == "stop"
        assert done["input_tokens"] == told[0]["input_tokens"]
        assert done["turn_id"] == told[0]["turn_id"]
        assert "audio_data" not in done


async def test_not_streaming_tells_the_whole_at_once(live: Live) -> None:
    async with talking(live.url) as talk:
        greedy = {**RECORDED, "generation": {"do_sample": False}}
        streamed = await talk.ask(**greedy)
        told = await talk.ask(**{**greedy, "streaming": False})
        check(told)
        assert [message["type"] for message in told] == ["prefill_done", "done"]
        same = ("text", "generated_tokens", "input_tokens", "finish_reason")
        assert [told[-1][name] for name in same] == [streamed[-1][name] for name in same]
        assert told[0]["cached_tokens"] > 0, "what was computed for the first is reused"


async def test_generated_tokens_are_tokens(live: Live) -> None:
    async with talking(live.url) as talk:
        (done,) = (await talk.ask(**{**RECORDED, "generation": {"max_new_tokens": 5}}))[-1:]
        assert (done["generated_tokens"], done["finish_reason"]) == (5, "length")


async def test_thinking_is_closed_unless_it_is_asked_for(live: Live) -> None:
    async with talking(live.url) as talk:
        for wish in ({}, {"enable_thinking": None}, {"enable_thinking": False}):
            told = await talk.ask(**RECORDED, **wish)
            assert told[-1]["thinking"] == ""
        told = await talk.ask(**RECORDED, enable_thinking=True)
        check(told)
        assert told[-1]["thinking"] == texts(told, "thinking_delta") != ""
        assert texts(told) == told[-1]["text"]


async def test_turns_follow_each_other_on_one_socket(live: Live) -> None:
    said: list[dict[str, Any]] = [{"role": "user", "content": "My name is Ann."}]
    async with talking(live.url) as talk:
        first = (await talk.ask(messages=said, generation={"do_sample": False}))[-1]
        said += [{"role": "assistant", "content": first["text"], "thinking": first["thinking"]}]
        said += [
            {"role": "user", "content": [{"type": "text", "text": "What is my "}, {"type": "text", "text": "name?"}]}
        ]
        told = await talk.ask(messages=said, generation={"do_sample": False})
        assert "Ann" in told[-1]["text"]
        assert told[0]["cached_tokens"] > 0, "what was computed for the first is reused"


async def test_length_penalty_holds_back_the_end(live: Live) -> None:
    async with talking(live.url) as talk:
        ends = {"do_sample": False, "max_new_tokens": 60}
        free = (await talk.ask(messages=RECORDED["messages"], generation={**ends, "length_penalty": 1}))[-1]
        held = (await talk.ask(messages=RECORDED["messages"], generation={**ends, "length_penalty": 100}))[-1]
        assert free["finish_reason"] == "stop"
        assert held["generated_tokens"] > free["generated_tokens"]
