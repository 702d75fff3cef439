from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from palaver.server.anthropic.schemas import AnthropicMessage
from palaver.server.anthropic.signatures import sign
from tests.server.anthropic.client import (
    GREEDY,
    LAMP,
    MESSAGES,
    QUESTION,
    SUM,
    WEATHER,
    assistant,
    create,
    expect_error,
    parse_events,
    stream_events,
    texts,
)
from tests.server.live_server import LiveServer


def test_the_events_come_in_their_order(http: httpx.Client) -> None:
    received = stream_events(http)
    assert [event["type"] for event in received[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in received[-2:]] == ["message_delta", "message_stop"]
    open_block, kinds = -1, []
    for event in received[2:-2]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == open_block + 1
                open_block = index
                kinds.append(block["type"])
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == open_block
                assert (
                    delta["type"]
                    in {"thinking": ("thinking_delta", "signature_delta"), "text": ("text_delta",)}[kinds[-1]]
                )
            case {"type": "content_block_stop", "index": index}:
                assert index == open_block
    assert kinds == ["thinking", "text"]
    assert received[0]["message"]["content"] == []
    assert received[0]["message"]["usage"]["output_tokens"] == 0
    assert received[-2]["usage"]["output_tokens"] > 0


def test_answers_are_as_the_document_says(http: httpx.Client) -> None:
    requests: list[dict[str, Any]] = [{}, {"messages": QUESTION, "tools": [WEATHER]}]
    for request in (*requests, {"metadata": {"conversation": "new"}}):
        answer = create(http, **request)
        assert set(AnthropicMessage.model_validate(answer).model_dump(exclude_unset=True)) == set(answer)


def test_the_signature_is_the_last_of_a_thought(http: httpx.Client) -> None:
    received = [event for event in stream_events(http) if event.get("index") == 0]
    assert received[-1]["type"] == "content_block_stop"
    assert received[-2]["delta"]["type"] == "signature_delta"
    assert sum(event.get("delta", {}).get("type") == "signature_delta" for event in received) == 1


def test_no_thought_is_in_a_text_whatever_is_drawn(http: httpx.Client) -> None:
    for seed in range(6):
        content = create(http, temperature=1.5, seed=seed)["content"]
        assert "think>" not in texts(content, "text") + texts(content, "thinking")
        assert [block["type"] for block in content] in (["thinking", "text"], ["thinking"])


def test_a_thought_that_is_not_shown_comes_back_by_its_signature(http: httpx.Client, elsewhere: LiveServer) -> None:
    shown = create(http)["content"][0]["thinking"]
    received = stream_events(http, thinking={"type": "adaptive", "display": "omitted"})
    assert not any(event.get("delta", {}).get("type") == "thinking_delta" for event in received)
    content = create(http, thinking={"type": "adaptive", "display": "omitted"}, max_tokens=40)["content"]
    assert content[0]["thinking"] == ""
    with httpx.Client(base_url=elsewhere.url, timeout=60) as other:
        rest = create(other, [*SUM, assistant(content)])["content"]
    assert shown.endswith(rest[0]["thinking"])
    assert "42" in texts(rest, "text")


def test_the_system_speaks_first(http: httpx.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "Who are you?"}]
    blocks = [{"type": "text", "text": "You are Bo."}, {"type": "text", "text": "Be kind."}]
    count = "/v1/messages/count_tokens"
    one = http.post(count, json={"messages": messages, "system": "You are Bo.\n\nBe kind."}).json()
    assert http.post(count, json={"messages": messages, "system": blocks}).json() == one


def test_turns_of_one_side_are_one(http: httpx.Client) -> None:
    count = "/v1/messages/count_tokens"
    twice = [{"role": "user", "content": "My name is Ann."}, {"role": "user", "content": "What is my name?"}]
    once = [{"role": "user", "content": "My name is Ann.\n\nWhat is my name?"}]
    assert http.post(count, json={"messages": twice}).json() == http.post(count, json={"messages": once}).json()


def test_sampling_has_its_say(http: httpx.Client) -> None:
    request: dict[str, Any] = {"temperature": 2.0, "seed": 3, "thinking": {"type": "disabled"}, "max_tokens": 30}
    assert create(http, **request)["content"] == create(http, **request)["content"]
    wild = create(http, **{**request, "seed": 4})["content"]
    assert wild != create(http, **request)["content"]
    tame = create(http, **{**request, "top_k": 1})["content"]
    assert tame == create(http, **{**request, "temperature": 0})["content"]


def test_a_budget_closes_the_thought(http: httpx.Client) -> None:
    answer = create(http, thinking={"type": "enabled", "budget_tokens": 8})
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] < 20
    assert texts(answer["content"], "text")


def test_one_call_where_they_may_not_be_parallel(http: httpx.Client) -> None:
    both = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = create(http, both, tools=[WEATHER], tool_choice=choice)
    assert sum(block["type"] == "tool_use" for block in answer["content"]) == 1
    assert answer["stop_reason"] == "tool_use"


def test_results_of_several_calls_and_a_question_with_them(http: httpx.Client) -> None:
    calls = [
        {"type": "tool_use", "id": f"c{n}", "name": "get_weather", "input": {"city": c}}
        for n, c in enumerate(("Paris", "Rome"))
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c0", "content": '{"degrees": 21}'},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "no"}], "is_error": True},
        {"type": "text", "text": "Well?"},
    ]
    messages = [*QUESTION, assistant(calls), {"role": "user", "content": results}]
    assert create(http, messages, tools=[WEATHER])["content"]


class TestContinue:
    def test_every_cut_goes_on_without_a_seam(self, http: httpx.Client) -> None:
        sampled: dict[str, Any] = {"temperature": 1.2, "seed": 9}
        whole = create(http, **sampled)
        for cut in range(1, whole["usage"]["output_tokens"], 6):
            part = create(http, **sampled, max_tokens=cut)
            rest = (
                create(http, [*SUM, assistant(part["content"])], **sampled)
                if part["content"]
                else create(http, **sampled)
            )
            for kind in ("thinking", "text"):
                joined = texts(part["content"], kind) + texts(rest["content"], kind)
                assert joined == texts(whole["content"], kind), cut
            if part["content"]:
                assert (
                    part["usage"]["output_tokens"] + rest["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
                )

    def test_by_its_signature_a_thought_goes_on_elsewhere(self, http: httpx.Client, elsewhere: LiveServer) -> None:
        """A high temperature gives tokens that the encoded text would not have."""
        sampled: dict[str, Any] = {"temperature": 2.5, "seed": 21, "max_tokens": 80}
        whole = create(http, **sampled)
        with httpx.Client(base_url=elsewhere.url, timeout=60) as other:
            for cut in range(4, 60, 8):
                part = create(http, **{**sampled, "max_tokens": cut})
                if [block["type"] for block in part["content"]] != ["thinking"]:
                    continue
                rest = create(other, [*SUM, assistant(part["content"])], **{**sampled, "max_tokens": 80 - cut})
                for kind in ("thinking", "text"):
                    assert texts(part["content"], kind) + texts(rest["content"], kind) == texts(whole["content"], kind)

    def test_by_its_words_alone_it_goes_on_too(self, http: httpx.Client, elsewhere: LiveServer) -> None:
        whole = create(http)["content"]
        thought = whole[0]["thinking"]
        with httpx.Client(base_url=elsewhere.url, timeout=60) as other:
            partial = {"type": "thinking", "thinking": "12+30, from the right:"}
            rest = create(other, [*SUM, assistant([partial])])["content"]
            assert partial["thinking"] + rest[0]["thinking"] == thought
            assert rest[1:] == whole[1:]
            answered = [whole[0], {"type": "text", "text": "12 + 30"}]
            rest = create(other, [*SUM, assistant(answered)])["content"]
            assert [block["type"] for block in rest] == ["text"]
            assert "12 + 30" + rest[0]["text"] == whole[1]["text"]

    def test_what_was_said_in_two_messages_is_one_reply(self, http: httpx.Client) -> None:
        whole, part = create(http), create(http, max_tokens=20)
        more = create(http, [*SUM, assistant(part["content"])], max_tokens=20)
        rest = create(http, [*SUM, assistant(part["content"]), assistant(more["content"])])
        joined = [*part["content"], *more["content"], *rest["content"]]
        assert texts(joined, "thinking") == texts(whole["content"], "thinking")
        assert texts(joined, "text") == texts(whole["content"], "text")

    def test_a_call_can_not_go_on(self, http: httpx.Client) -> None:
        call = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}
        assert expect_error(http, [*QUESTION, assistant([call])], tools=[WEATHER])[0] == 400


class TestSignatures:
    def test_a_changed_thought_is_refused(self, http: httpx.Client) -> None:
        thought, answer = create(http)["content"]
        changed = {**thought, "thinking": thought["thinking"] + " Or not."}
        status, error = expect_error(http, [*SUM, assistant([changed, answer]), *SUM])
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert error["details"]["name"] == "messages[1].content[0].signature"
        unsigned = {**changed, "signature": ""}
        assert create(http, [*SUM, assistant([unsigned, answer]), *SUM])["content"]

    def test_a_stranger_s_signature_counts_for_nothing(self, http: httpx.Client) -> None:
        thought = {"type": "thinking", "thinking": "It is 42.", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}
        messages = [*SUM, assistant([thought, {"type": "text", "text": "42"}]), *SUM]
        assert "42" in texts(create(http, messages)["content"], "text")
        hidden = {**thought, "thinking": ""}
        assert create(http, [*SUM, assistant([hidden, {"type": "text", "text": "42"}]), *SUM])["content"]

    def test_what_nobody_can_read_is_left_out(self, http: httpx.Client) -> None:
        redacted = {"type": "redacted_thinking", "data": "EmwKAhgB"}
        count = "/v1/messages/count_tokens"
        answer = {"type": "text", "text": "42"}
        bodies = [{"messages": [*SUM, assistant(content), *SUM]} for content in ([redacted, answer], [answer])]
        one, other = (http.post(count, json=body).json() for body in bodies)
        assert one == other

    @pytest.mark.parametrize("ids", [[10**9], [0, 1, 2], list(range(50))])
    def test_made_up_tokens_are_not_taken(self, http: httpx.Client, live: LiveServer, ids: list[int]) -> None:
        tokenizer = live.service.models.current().tokenizer
        thought = {"type": "thinking", "thinking": "12+30,", "signature": sign(tokenizer, ids, "12+30,", False)}
        by_words = create(http, [*SUM, assistant([{"type": "thinking", "thinking": "12+30,"}])])
        assert (
            create(http, [*SUM, assistant([thought])])["content"][0]["thinking"] == by_words["content"][0]["thinking"]
        )


class TestInvalidRequests:
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"surprise": 1}, "surprise"),
            ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
            ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
            ({"container": "c"}, "container"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"temperature": 9}, "temperature"),
            ({"output_config": {"effort": "banana"}}, "output_config.effort"),
            ({"thinking": {"type": "enabled", "budget_tokens": -4}}, "thinking.budget_tokens"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
            ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0].input_examples"),
            ({"tools": [WEATHER, WEATHER]}, "tools"),
            ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
            (
                {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}},
                "output_config.format",
            ),
            ({"metadata": {"conversation": 5}}, "metadata.conversation"),
        ],
    )
    def test_what_would_change_the_reply_is_named(self, http: httpx.Client, fields: dict[str, Any], name: str) -> None:
        status, error = expect_error(http, **fields)
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert error["details"]["name"] == name

    @pytest.mark.parametrize("kind", ["search_result", "server_tool_use", "container_upload"])
    def test_blocks_that_no_model_here_takes(self, http: httpx.Client, kind: str) -> None:
        block = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        status, error = expect_error(http, [{"role": "user", "content": [{"type": "text", "text": "See:"}, block]}])
        assert status == 400
        assert error["details"]["name"] == "messages[0].content[1].type"
        assert kind in error["message"]
        result = {"type": "tool_result", "tool_use_id": "x", "content": [block]}
        status, error = expect_error(http, [*QUESTION, {"role": "user", "content": [result]}])
        assert error["details"]["name"] == "messages[1].content[0].content[0].type"

    @pytest.mark.parametrize(
        "name", ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]
    )
    def test_numbers_that_are_none(self, http: httpx.Client, name: str) -> None:
        for written in ("-9", "NaN", "Infinity", "1e999", str(2**63), '"1"', "true", "[]"):
            body = f'{{"messages": {json.dumps(SUM)}, "max_tokens": 1, "{name}": {written}}}'
            answer = http.post(MESSAGES, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["type"]) == (400, "error"), (written, answer.text)

    def test_blocks_of_the_wrong_side(self, http: httpx.Client) -> None:
        call = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}
        assert expect_error(http, [{"role": "user", "content": [call]}])[0] == 400
        result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
        assert expect_error(http, [*SUM, assistant([result]), *SUM])[0] == 400

    def test_what_is_missing_or_of_another_kind(self, http: httpx.Client) -> None:
        answer = http.post(MESSAGES, json={"model": "sprout", "messages": SUM})
        assert answer.json()["error"]["details"]["name"] == "max_tokens"
        assert expect_error(http, [{"role": "user", "content": [{"type": "text"}]}])[0] == 400
        assert expect_error(http, [{"role": "nobody", "content": "x"}])[0] == 400
        for messages in ([], [{"role": "user", "content": " "}], [{"role": "system", "content": "Greet."}]):
            assert expect_error(http, messages)[0] == 400
        assert http.post(MESSAGES, content=b"{", headers={"content-type": "application/json"}).json()["type"] == "error"
        assert http.get(MESSAGES).json()["error"]["type"] == "invalid_request_error"
        assert http.get("/v1/messages/batches").json()["error"]["type"] == "not_found_error"

    def test_only_versions_that_are_spoken(self, http: httpx.Client) -> None:
        body = {**GREEDY, "messages": SUM, "max_tokens": 1}
        for version, status in (("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400), ("new", 400)):
            answer = http.post(MESSAGES, json=body, headers={"anthropic-version": version})
            assert answer.status_code == status

    def test_what_changes_nothing_is_ignored(self, http: httpx.Client) -> None:
        cached = {"cache_control": {"type": "ephemeral"}}
        plain = create(http, QUESTION, tools=[WEATHER, LAMP])
        answer = create(
            http,
            [
                {
                    "role": "user",
                    "content": [{**cached, "type": "text", "text": QUESTION[0]["content"], "citations": None}],
                }
            ],
            tools=[WEATHER, {**LAMP, **cached, "type": "custom", "strict": True}],
            metadata={"user_id": "somebody"},
            service_tier="auto",
            inference_geo="eu",
            mcp_servers=[],
            container=None,
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            **cached,
        )
        assert [block["type"] for block in answer["content"]] == [block["type"] for block in plain["content"]]


def test_an_error_in_the_midst_of_a_stream_has_their_shape(live: LiveServer, http: httpx.Client) -> None:
    """The model is unloaded during the reply."""
    request = {
        "messages": [{"role": "user", "content": "Count from 1 to 900."}],
        "stream": True,
        "max_tokens": 8000,
        "temperature": 0,
    }
    with http.stream("POST", MESSAGES, json=request) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if "content_block_delta" in line:
                break
        live.run_in_loop(live.service.models.unload)
        rest = list(lines)
    live.run_in_loop(lambda: _load(live))
    received = parse_events("\n".join([*rest[rest.index("") :]]))
    assert received[-1]["type"] == "error"
    assert received[-1]["error"]["type"] in ("overloaded_error", "api_error")
    assert received[-1]["request_id"] == answer.headers["request-id"]


async def _load(live: LiveServer) -> None:
    live.service.models.load("sprout")
    await live.service.models.ready()


def test_a_reply_ends_when_its_client_leaves(live: LiveServer, http: httpx.Client) -> None:
    for streams in (True, False):
        question = [{"role": "user", "content": "Count from 1 to 900."}]
        request = {"messages": question, "stream": streams, "max_tokens": 8000, "temperature": 0}
        try:
            with http.stream("POST", MESSAGES, json=request, timeout=0.3 if not streams else 60) as answer:
                next(answer.iter_lines())
        except httpx.ReadTimeout:
            assert not streams
        live.run_in_loop(lambda: _wait_idle(live))


async def _wait_idle(live: LiveServer) -> None:
    async with asyncio.timeout(120):
        while len(live.server.state.limiter):
            await asyncio.sleep(0.005)
