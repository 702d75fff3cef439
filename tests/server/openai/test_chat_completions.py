from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import httpx
import pytest

from tests.server.chat_client import CHAT, LAMP, SUM, WEATHER, chunks, complete, delta_text, post_error, stream
from tests.server.live_server import LiveServer


def message(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][index]["message"]
    return found


def test_a_reply_has_its_thinking_apart(http: httpx.Client) -> None:
    answer = complete(http)
    assert "42" in message(answer)["content"]
    assert "12+30" in message(answer)["reasoning_content"]
    assert "think>" not in json.dumps(message(answer))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"


def test_a_stream_folds_to_the_whole_reply(http: httpx.Client) -> None:
    whole, events = complete(http), stream(http)
    assert delta_text(events, "content") == message(whole)["content"]
    assert delta_text(events, "reasoning_content") == message(whole)["reasoning_content"]
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["stop"]


@pytest.mark.parametrize("where", [{}, {"metadata": {"conversation": "new"}}])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Greet the user."}],
        [{"role": "developer", "content": "Greet the user."}],
        [{"role": "system", "content": "You are kind."}, {"role": "user", "content": ""}],
        [{"role": "user", "content": " "}],
    ],
)
def test_instructions_alone_and_an_empty_message_are_answered(
    http: httpx.Client, messages: list[Any], where: dict[str, Any]
) -> None:
    """Bots that greet first send them, and OpenAI answers."""
    answer = complete(http, messages=messages, max_tokens=8, **where)
    assert answer["usage"]["completion_tokens"] == 8


def test_no_messages_are_refused(http: httpx.Client) -> None:
    status, error = post_error(http, messages=[])
    assert (status, error["name"]) == (400, "no_messages")


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_did_not_ask_for_usage_has_it_once(http: httpx.Client, n: int) -> None:
    """In the chunk that ends the last choice: clients that add up what they get must not count it twice."""
    events = stream(http, n=n)
    usage = complete(http, n=n)["usage"]
    (counted,) = [event for event in events if "usage" in event]
    assert counted["choices"][0]["finish_reason"] == "stop"
    assert counted["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert counted is events[-1]


@pytest.mark.parametrize("stream_options", [None, {"include_usage": False}])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_usage_as_openrouter_s_clients_ask_for_it(http: httpx.Client, path: str, stream_options: Any) -> None:
    asked: dict[str, Any] = {"messages": SUM} if path == CHAT else {"prompt": "Hello"}
    asked |= {"max_tokens": 4, "usage": {"include": True}, "stream_options": stream_options}
    assert http.post(path, json=asked).json()["usage"]["completion_tokens"] == 4
    events = chunks(http.post(path, json={**asked, "stream": True}).text)
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 4)
    assert not any(event.get("usage") for event in events[:-1])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_usage_so_far_comes_with_every_chunk(http: httpx.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"messages": SUM} if path == CHAT else {"prompt": "Hello"}
    limits = {"min_tokens": 20, "max_tokens": 20}
    answer = http.post(path, json={**asked, **limits, "stream": True, "stream_options": options})
    events = chunks(answer.text)
    assert events[-1]["choices"] == []
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == counts[-2] == 20
    assert all(
        e["usage"]["total_tokens"] == e["usage"]["prompt_tokens"] + c for e, c in zip(events, counts, strict=True)
    )


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_stream_options_mean_nothing_without_a_stream(http: httpx.Client, path: str) -> None:
    asked: dict[str, Any] = {"messages": SUM} if path == CHAT else {"prompt": "Hello", "max_tokens": 5}
    options = {"include_usage": True} if path != "/v1/responses" else {"include_obfuscation": False}
    asked = {"input": "Hello"} if path == "/v1/responses" else asked
    answer = http.post(path, json={**asked, "stream_options": options})
    assert answer.status_code == 200
    assert answer.json()["usage"]


def test_usage_comes_last_when_asked_for(http: httpx.Client) -> None:
    events = stream(http, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    counted = complete(http)["usage"]
    last = events[-1]["usage"]
    assert last["completion_tokens"] == counted["completion_tokens"]
    assert last["completion_tokens_details"] == counted["completion_tokens_details"]
    assert counted["completion_tokens_details"]["reasoning_tokens"] > 20
    assert counted["total_tokens"] == counted["prompt_tokens"] + counted["completion_tokens"]
    assert complete(http)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all(event["usage"] is None for event in events[:-1])


def test_choices_differ_under_one_seed_and_come_again(http: httpx.Client) -> None:
    asked = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 60}
    first, second = complete(http, **asked), complete(http, **asked)
    texts = [(message(first, i)["content"], message(first, i).get("reasoning_content")) for i in range(3)]
    assert texts == [(message(second, i)["content"], message(second, i).get("reasoning_content")) for i in range(3)]
    assert len(set(texts)) == 3
    events = stream(http, **asked)
    assert [delta_text(events, "content", i) or None for i in range(3)] == [text for text, _ in texts]
    assert first["usage"]["completion_tokens"] > 60


def test_a_reply_without_an_answer_has_no_content(http: httpx.Client) -> None:
    answer = complete(http, max_tokens=5)
    assert message(answer)["content"] is None
    assert answer["choices"][0]["finish_reason"] == "length"


def test_unsplit_text_has_the_thought_in_it(http: httpx.Client) -> None:
    answer = complete(http, reasoning_format="none")
    assert message(answer)["content"].startswith("<think>")
    assert "reasoning_content" not in message(answer)


@pytest.mark.parametrize(
    "how",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"template_vars": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_is_switched_off(http: httpx.Client, how: dict[str, Any]) -> None:
    answer = complete(http, **how)
    assert "reasoning_content" not in message(answer)
    assert "42" in message(answer)["content"]


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_budget_tokens", "reasoning_budget"])
def test_a_thinking_budget_yields_an_answer(http: httpx.Client, name: str) -> None:
    answer = complete(http, **{name: 5})
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 12
    assert message(answer)["content"]


def test_stop_strings_and_ids_say_which_one_matched(http: httpx.Client, live: LiveServer) -> None:
    by_text = complete(http, stop=["zzz", "2"])["choices"][0]
    assert (by_text["finish_reason"], by_text["stop_reason"], by_text["message"]["content"]) == ("stop", "2", "1")
    two = live.service.models.current().format.tokenizer.encode(["2"])[0]
    by_id = complete(http, stop=[two], enable_thinking=False)["choices"][0]
    assert by_id["stop_reason"] == two


def test_logprobs_are_of_the_answer(http: httpx.Client) -> None:
    answer = complete(http, logprobs=True, top_logprobs=2)
    status, error = post_error(http, logprobs=True, top_logprobs=50)
    assert (status, error["param"]) == (400, "top_logprobs")
    assert error["message"] == "top_logprobs must be between 0 and 20 (got 50)."
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == message(answer)["content"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    events = stream(http, logprobs=True, top_logprobs=2)
    streamed = [e["choices"][0]["logprobs"] for e in events if e["choices"][0].get("logprobs")]
    tokens = [[entry["token"] for entry in piece["content"]] for piece in streamed]
    assert [token for piece in tokens for token in piece] == [entry["token"] for entry in content]


def test_sampling_has_its_say(http: httpx.Client) -> None:
    plain = message(complete(http))["content"]
    assert "42" not in (message(complete(http, banned_strings=["42"]))["content"] or "")
    assert complete(http, min_tokens=90)["usage"]["completion_tokens"] >= 90
    seeded = {"temperature": 2.0, "seed": 11, "max_tokens": 40}
    assert message(complete(http, **seeded)) == message(complete(http, **seeded))
    assert message(complete(http, temperature=2.0, top_k=1))["content"] == plain
    assert message(complete(http, temperature=2.0, min_p=1.0))["content"] == plain


class TestStructured:
    SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }

    def test_an_answer_follows_its_schema_while_the_thought_is_free(self, http: httpx.Client) -> None:
        format = {"type": "json_schema", "json_schema": {"name": "sum", "schema": self.SCHEMA}}
        answer = complete(http, response_format=format)
        assert isinstance(json.loads(message(answer)["content"])["answer"], int)
        assert "12+30" in message(answer)["reasoning_content"]

    @pytest.mark.slow
    def test_sampled_answers_are_valid(self, http: httpx.Client) -> None:
        format = {"type": "json_schema", "json_schema": {"name": "sum", "schema": self.SCHEMA}}
        good = 0
        for seed in range(8):
            asked = {"seed": seed, "n": 4, "temperature": 1.0, "max_tokens": 1500, "thinking_budget": 400}
            answer = complete(http, response_format=format, **asked)
            for choice in answer["choices"]:
                assert choice["message"]["reasoning_content"]
                good += set(json.loads(choice["message"]["content"])) == {"answer"}
        assert good == 32

    @pytest.mark.parametrize(
        ("how", "content"),
        [
            ({"response_format": {"type": "regex", "regex": "(yes|no)"}}, ("yes", "no")),
            ({"regex": "(yes|no)"}, ("yes", "no")),
            ({"grammar": 'start: "ab" | "cd"'}, ("ab", "cd")),
        ],
    )
    def test_patterns_and_grammars_hold(self, http: httpx.Client, how: dict[str, Any], content: tuple[str]) -> None:
        assert message(complete(http, **how))["content"] in content

    def test_json_objects(self, http: httpx.Client) -> None:
        """The embedded model knows no end of a text in free JSON; that it is an object is what counts."""
        asked = {"response_format": {"type": "json_object"}, "enable_thinking": False, "max_tokens": 20}
        assert message(complete(http, **asked))["content"].startswith("{")


@pytest.mark.parametrize(
    ("question", "way"),
    [
        ("How do I stop a reply?", "Stop"),
        ("How do I continue a stopped reply?", "Continue"),
        ("How do I get another reply?", "Retry"),
        ("How do I start a new conversation?", "New conversation"),
        ("How do I switch thinking off?", "Thinking switch"),
    ],
)
class TestQuestionsAboutPalaver:
    COMMAND = re.compile(r"(^|\s)/[a-z]+|Ctrl\+C")

    def test_the_page_is_told_unless_the_terminal_is_known(self, http: httpx.Client, question: str, way: str) -> None:
        content = message(complete(http, messages=[{"role": "user", "content": question}], temperature=0))["content"]
        assert way in content
        assert not self.COMMAND.search(content)

    def test_the_template_variable_asks_for_commands(self, http: httpx.Client, question: str, way: str) -> None:
        variables = {"chat_template_kwargs": {"terminal": True}}
        asked = [{"role": "user", "content": question}]
        assert self.COMMAND.search(message(complete(http, messages=asked, temperature=0, **variables))["content"])


class TestTools:
    QUESTION: ClassVar[list[dict[str, Any]]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    HELLO: ClassVar[list[dict[str, Any]]] = [{"role": "user", "content": "Hello there!"}]

    def test_a_call_and_its_result(self, http: httpx.Client) -> None:
        answer = complete(http, messages=self.QUESTION, tools=[WEATHER, LAMP])
        (call,) = message(answer)["tool_calls"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert message(answer)["content"] is None
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "get_weather",
            {"city": "Paris"},
        )
        result = {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "clear", "degrees": 21}'}
        after = complete(http, messages=[*self.QUESTION, message(answer), result], tools=[WEATHER, LAMP])
        assert "21" in message(after)["content"]

    def test_arguments_are_streamed(self, http: httpx.Client) -> None:
        events = stream(http, messages=self.QUESTION, tools=[WEATHER])
        calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
        assert calls[0]["id"]
        assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
        assert len(calls) > 3
        assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"city": "Paris"}
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"

    def test_none_is_none(self, http: httpx.Client) -> None:
        answer = complete(http, messages=self.QUESTION, tools=[WEATHER], tool_choice="none")
        assert "tool_calls" not in message(answer)

    def test_a_required_call_comes_whatever_the_question(self, http: httpx.Client) -> None:
        answer = complete(http, messages=self.HELLO, tools=[WEATHER, LAMP], tool_choice="required")
        (call, *_) = message(answer)["tool_calls"]
        assert call["function"]["name"] in ("get_weather", "set_lamp")
        assert "reasoning_content" in message(answer)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_named_call_is_that_one_and_follows_its_schema(self, http: httpx.Client, seed: int) -> None:
        choice = {"type": "function", "function": {"name": "set_lamp"}}
        asked = {"tools": [WEATHER, LAMP], "tool_choice": choice, "temperature": 1.0, "seed": seed}
        answer = complete(http, messages=self.QUESTION, **asked, max_tokens=800)
        function = message(answer)["tool_calls"][0]["function"]
        assert function["name"] == "set_lamp"
        assert isinstance(json.loads(function["arguments"])["level"], int)

    def test_only_one_call_where_they_may_not_be_parallel(self, http: httpx.Client) -> None:
        both = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
        answer = complete(http, messages=both, tools=[WEATHER], parallel_tool_calls=False)
        assert len(message(answer)["tool_calls"]) == 1
        assert answer["choices"][0]["finish_reason"] == "tool_calls"

    def test_legacy_functions(self, http: httpx.Client) -> None:
        asked: dict[str, Any] = {"messages": self.QUESTION, "functions": [WEATHER["function"]]}
        answer = complete(http, **asked)
        assert message(answer)["function_call"]["name"] == "get_weather"
        assert answer["choices"][0]["finish_reason"] == "function_call"
        events = stream(http, **asked)
        pieces = [
            e["choices"][0]["delta"]["function_call"] for e in events if "function_call" in e["choices"][0]["delta"]
        ]
        assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"city": "Paris"}

    def test_a_tool_that_is_not_there_can_not_be_named(self, http: httpx.Client) -> None:
        choice = {"type": "function", "function": {"name": "nope"}}
        status, error = post_error(http, tools=[WEATHER], tool_choice=choice)
        assert (status, error["param"]) == (400, "tool_choice")

    def test_a_required_call_needs_tools(self, http: httpx.Client) -> None:
        status, error = post_error(http, tool_choice="required")
        assert (status, error["param"]) == (400, "tool_choice")
        assert error["message"] == "tool_choice 'required': needs tools"


class TestContinuing:
    def test_every_cut_by_ids_goes_on_without_a_seam(self, http: httpx.Client) -> None:
        whole = complete(http, return_token_ids=True)
        ids, reply = whole["choices"][0]["token_ids"], message(whole)
        for cut in range(1, len(ids), 5):
            part = complete(http, return_token_ids=True, max_tokens=cut)
            assert part["choices"][0]["token_ids"] == ids[:cut]
            begun = {**message(part), "token_ids": ids[:cut]}
            rest = complete(http, messages=[*SUM, begun], return_token_ids=True)
            assert rest["choices"][0]["token_ids"] == ids[cut:]
            for name in ("reasoning_content", "content"):
                assert (message(part).get(name) or "") + (message(rest).get(name) or "") == reply[name]

    def test_a_sampled_reply_goes_on_as_it_would_have(self, http: httpx.Client) -> None:
        sampled = {"temperature": 1.2, "seed": 9, "return_token_ids": True}
        whole = complete(http, **sampled)
        ids = whole["choices"][0]["token_ids"]
        for cut in (3, len(ids) // 2, len(ids) - 2):
            rest = complete(http, messages=[*SUM, {"role": "assistant", "token_ids": ids[:cut]}], **sampled)
            assert ids[:cut] + rest["choices"][0]["token_ids"] == ids

    def test_a_streamed_cut_has_text_and_ids_that_go_on(self, http: httpx.Client) -> None:
        whole = message(complete(http))
        events = stream(http, return_token_ids=True)
        for count in range(2, len(events) - 1, 7):
            part = events[:count]
            ids = [i for event in part for i in event["choices"][0].get("token_ids", ())]
            begun = {"role": "assistant", "content": delta_text(part, "content") or None, "token_ids": ids}
            begun["reasoning_content"] = delta_text(part, "reasoning_content") or None
            rest = message(complete(http, messages=[*SUM, begun]))
            for name in ("reasoning_content", "content"):
                assert delta_text(part, name) + (rest.get(name) or "") == whole[name]

    @pytest.mark.parametrize("wanted", [True, "reasoning_content"])
    def test_an_open_thought_stays_open(self, http: httpx.Client, wanted: bool | str) -> None:
        begun = {"role": "assistant", "content": None, "reasoning_content": "12+30, from the right:"}
        rest = message(complete(http, messages=[*SUM, begun], continue_final_message=wanted))
        assert rest["reasoning_content"].startswith(" 2 1 and 0 3")
        assert "42" in rest["content"]

    def test_a_closed_thought_is_answered(self, http: httpx.Client) -> None:
        begun = {"role": "assistant", "content": "", "reasoning_content": "The answer is 42."}
        rest = message(complete(http, messages=[*SUM, begun], continue_final_message="content"))
        assert "reasoning_content" not in rest
        assert "42" in rest["content"]

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_a_limit_bounds_what_is_added(self, http: httpx.Client, name: str) -> None:
        """As in vLLM and llama.cpp: a reply cut at 20 and continued with 20 has 40."""
        whole = complete(http, return_token_ids=True)["choices"][0]["token_ids"]
        first = complete(http, max_tokens=20, return_token_ids=True)
        begun = {**message(first), "token_ids": first["choices"][0]["token_ids"]}
        asked = {"messages": [*SUM, begun], "max_tokens": None, "return_token_ids": True}
        more = complete(http, **{**asked, name: 20})
        assert more["choices"][0]["token_ids"] == whole[20:40]
        assert more["choices"][0]["finish_reason"] == "length"
        assert more["usage"]["completion_tokens"] == 20
        by_text = complete(
            http, **{**asked, "messages": [*SUM, message(first)], "continue_final_message": True, name: 20}
        )
        assert by_text["usage"]["completion_tokens"] == 20
        rest = complete(http, **{**asked, name: len(whole) - 20})
        assert rest["choices"][0]["token_ids"] == whole[20:]
        assert rest["choices"][0]["finish_reason"] == "stop"

    def test_a_sampled_reply_cut_by_limits_is_the_same(self, http: httpx.Client) -> None:
        sampled = {"temperature": 1.2, "seed": 9, "return_token_ids": True}
        whole = complete(http, **sampled)["choices"][0]["token_ids"]
        ids: list[int] = []
        while len(ids) < len(whole):
            begun = [{"role": "assistant", "token_ids": ids}] if ids else []
            ids += complete(http, messages=[*SUM, *begun], **sampled, max_tokens=13)["choices"][0]["token_ids"]
        assert ids == whole

    def test_a_least_length_is_of_what_is_added(self, http: httpx.Client) -> None:
        whole = complete(http, return_token_ids=True)["choices"][0]["token_ids"]
        begun = {"role": "assistant", "token_ids": whole[:-3]}
        rest = complete(http, messages=[*SUM, begun], min_tokens=10, max_tokens=30)
        assert 10 <= rest["usage"]["completion_tokens"] <= 30

    def test_a_limit_in_a_conversation_bounds_what_is_added(self, http: httpx.Client) -> None:
        home = {"metadata": {"conversation": "new"}}
        first = complete(http, max_tokens=20, **home)
        home = {"metadata": {"conversation": first["metadata"]["conversation"]}}
        more = complete(http, messages=[*SUM, message(first)], max_tokens=20, return_token_ids=True, **home)
        assert more["usage"]["completion_tokens"] == 20
        assert more["choices"][0]["finish_reason"] == "length"
        whole = complete(http, return_token_ids=True)["choices"][0]["token_ids"]
        assert more["choices"][0]["token_ids"] == whole[20:40]

    def test_a_trailing_assistant_message_is_continued(self, http: httpx.Client) -> None:
        """An open thought stays open; an answer goes on as an answer."""
        thought = {"role": "assistant", "content": None, "reasoning_content": "12+30, from the right:"}
        rest = message(complete(http, messages=[*SUM, thought]))
        assert rest == message(complete(http, messages=[*SUM, thought], continue_final_message=True))
        assert rest["reasoning_content"].startswith(" 2 1 and 0 3")
        begun = {"role": "assistant", "content": "12 + 30 =", "reasoning_content": "12+30 is 42."}
        asked = {"messages": [*SUM, begun]}
        assert message(complete(http, **asked)) == message(complete(http, **asked, continue_final_message=True))
        assert "reasoning_content" not in message(complete(http, **asked))

    def test_an_empty_trailing_message_is_no_beginning(self, http: httpx.Client) -> None:
        empties: list[Any] = ["", None, []]
        for empty in empties:
            assert message(complete(http, messages=[*SUM, {"role": "assistant", "content": empty}])) == message(
                complete(http)
            )

    def test_a_new_turn_behind_a_reply_is_to_be_asked_for(self, http: httpx.Client) -> None:
        begun = {"role": "assistant", "content": "12 + 30 =", "reasoning_content": "12+30 is 42."}
        fresh = complete(http, messages=[*SUM, begun], continue_final_message=False, return_token_ids=True)
        more = complete(http, messages=[*SUM, begun], return_token_ids=True)
        assert len(fresh["prompt_token_ids"]) > len(more["prompt_token_ids"])

    def test_a_call_without_its_result_is_refused(self, http: httpx.Client) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "'}}
        asked = {"messages": [*SUM, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [WEATHER]}
        status, error = post_error(http, **asked)
        assert (status, error["param"]) == (400, "messages")
        assert "result must follow" in error["message"]
        assert complete(http, **asked, continue_final_message=True)["choices"][0]["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize("wanted", [True, "content"])
    def test_a_begun_answer_without_a_thought_goes_on_as_an_answer(
        self, http: httpx.Client, wanted: bool | str
    ) -> None:
        begun = {"role": "assistant", "content": "12 + 30 is"}
        for seed in range(20):
            asked = {"continue_final_message": wanted, "temperature": 1, "seed": seed, "max_tokens": 60}
            rest = message(complete(http, messages=[*SUM, begun], **asked))
            assert "think>" not in rest["content"]
            assert "from the right" not in rest["content"]
            assert "reasoning_content" not in rest

    def test_what_can_not_go_on_is_refused(self, http: httpx.Client) -> None:
        assert post_error(http, continue_final_message=True)[0] == 400
        whole = complete(http, return_token_ids=True)["choices"][0]
        status, error = post_error(http, messages=[*SUM, {"role": "assistant", "token_ids": whole["token_ids"]}])
        assert status == 400
        assert "complete" in error["message"]

    def test_the_prompt_is_told_with_its_ids(self, http: httpx.Client) -> None:
        told = http.post("/v1/tokenize", json={"messages": SUM}).json()["tokens"]
        assert complete(http, return_token_ids=True)["prompt_token_ids"] == told
        assert stream(http, return_token_ids=True)[0]["prompt_token_ids"] == told


def test_a_response_prefix_is_the_reply_s_own_beginning(http: httpx.Client) -> None:
    answer = complete(http, response_prefix="<think>\n12+30, from the right:")
    assert message(answer)["reasoning_content"].startswith(" 2 1 and 0 3")


def test_a_request_without_a_body_is_refused(http: httpx.Client) -> None:
    refused = http.post("/v1/chat/completions")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "The request has no body."


@pytest.mark.parametrize(
    ("field", "value"),
    [("chat_template", "x"), ("verbosity", "loud"), ("store", "yes"), ("surprise", 1), ("max_token", 5)],
)
def test_a_field_that_would_change_the_reply_is_named(http: httpx.Client, field: str, value: Any) -> None:
    status, error = post_error(http, **{field: value})
    assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error")


def test_harmless_fields_are_ignored(http: httpx.Client) -> None:
    complete(http, user="me", service_tier="auto", store=False, modalities=["text"], surprise=None, metadata={"a": "b"})


def test_replies_are_taken_back_as_clients_keep_them(http: httpx.Client) -> None:
    kept = {"provider_specific_fields": {"refusal": None}}
    call = {"id": "c1", "index": 0, "type": "function", "function": {"name": "now", "arguments": "{}", **kept}, **kept}
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "annotations": [],
        "reasoning_details": [{"type": "reasoning.text", "text": "The time."}],
        "thinking_blocks": [{"type": "thinking", "thinking": "The time.", "signature": "s"}],
        **kept,
    }
    plain_call = {name: call[name] for name in ("id", "type")} | {"function": {"name": "now", "arguments": "{}"}}
    plain = {"role": "assistant", "content": None, "tool_calls": [plain_call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    used = [
        complete(http, messages=[{"role": "user", "content": "What time is it?"}, said, result], return_token_ids=True)
        for said in (reply, plain)
    ]
    assert used[0]["prompt_token_ids"] == used[1]["prompt_token_ids"]


@pytest.mark.parametrize("door", ["response_format", "tools"])
def test_formats_of_strings_that_nobody_knows_are_annotations(http: httpx.Client, door: str) -> None:
    day = {"type": "string", "format": "date"}
    secret = {"type": "string", "format": "password", "maxLength": 9}
    schema = {"type": "object", "properties": {"day": day, "secret": secret}, "required": ["day", "secret"]}
    closed = {**schema, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "keep", "parameters": closed}}
    doors: dict[str, dict[str, Any]] = {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": closed}}},
        "tools": {"tools": [tool], "tool_choice": "required"},
    }
    message = complete(http, **doors[door])["choices"][0]["message"]
    written = message["content"] if door == "response_format" else message["tool_calls"][0]["function"]["arguments"]
    value = json.loads(written)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["day"])
    assert len(value["secret"]) < 10


def test_a_refusal_is_text_of_the_assistant(http: httpx.Client) -> None:
    parts = ({"type": "refusal", "refusal": "No."}, {"type": "text", "text": "No."})
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Why?"},
    ]
    used = [complete(http, messages=[said[0], {**said[1], "content": [part]}, said[2]], max_tokens=1) for part in parts]
    assert used[0]["usage"]["prompt_tokens"] == used[1]["usage"]["prompt_tokens"]


def test_another_model_is_not_found(http: httpx.Client) -> None:
    status, error = post_error(http, model="gpt-4o")
    assert (status, error["code"]) == (404, "model_not_found")


def test_errors_in_the_midst_of_a_stream_have_the_same_shape(live: LiveServer, http: httpx.Client) -> None:
    """The model is taken away while it speaks."""
    asked = {"messages": SUM, "stream": True, "min_tokens": 4000}
    with http.stream("POST", CHAT, json=asked) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if "reasoning_content" in line:
                break
        live.run_in_loop(live.service.models.unload)
        rest = "\n".join(lines)
    live.run_in_loop(lambda: _load(live))
    error = [event for event in chunks("\n\n".join(rest.split("\n"))) if "error" in event]
    assert error[0]["error"]["type"] == "server_error"


async def _load(live: LiveServer) -> None:
    live.service.models.load("sprout")
    await live.service.models.ready()
