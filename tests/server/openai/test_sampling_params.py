"""Fields of other servers' clients: applied, or named as ignored; and parameters that operators force."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import httpx
import openai
import pytest

from palaver.commands.options import operator_settings
from palaver.errors import BadParameter
from palaver.server.openai.sampling_params import sampling_parameters
from palaver.server.openai.schemas import ChatRequest
from palaver.server.settings import ServerSettings
from tests.server.chat_client import CHAT, LAMP, SUM, WEATHER, complete, post_error, stream
from tests.server.live_server import LiveServer

IGNORED = "x-palaver-ignored"
SPROUT: dict[str, Any] = {"model": "sprout", "temperature": 0}
HINTS: dict[str, Any] = {
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "user": "u",
}
RAIN: list[Any] = [{"role": "user", "content": "What's the weather in Oslo?"}]


def message(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def named(headers: Any) -> set[str]:
    return set(filter(None, headers.get(IGNORED, "").split(", ")))


class TestHints:
    def test_of_chat_completions(self, client: openai.OpenAI) -> None:
        """All that the SDK has a name for and the model can't follow."""
        more: dict[str, Any] = {
            **HINTS,
            "store": True,
            "verbosity": "low",
            "metadata": {"a": "b"},
            "prediction": {"type": "content", "content": "42"},
            "web_search_options": {},
        }
        how: dict[str, Any] = {"parallel_tool_calls": True, "modalities": ["text"], "reasoning_effort": "high"}
        answer = client.chat.completions.with_raw_response.create(messages=SUM, **SPROUT, **more, **how)  # type: ignore[arg-type]
        plain = client.chat.completions.with_raw_response.create(messages=SUM, **SPROUT)  # type: ignore[arg-type]
        assert named(answer.headers) == set(more)
        assert answer.parse().choices[0].message.content == plain.parse().choices[0].message.content
        assert IGNORED not in plain.headers

    def test_of_streams_and_conversations(self, http: httpx.Client) -> None:
        for more in ({"stream": True}, {"metadata": {"conversation": "new"}}):
            answer = http.post(CHAT, json={"messages": SUM, "max_tokens": 5, "service_tier": "auto", **more})
            assert named(answer.headers) == {"service_tier"}

    @pytest.mark.parametrize("store", [True, False])
    def test_of_responses(self, client: openai.OpenAI, store: bool) -> None:
        answer = client.responses.with_raw_response.create(
            input="What is 12 + 30?",
            **SPROUT,
            **HINTS,
            store=store,
            text={"verbosity": "high"},
            max_tool_calls=3,
            reasoning={"effort": "minimal"},
            include=["reasoning.encrypted_content"],
            truncation="auto",
        )
        assert named(answer.headers) == {*HINTS, "max_tool_calls", "text.verbosity"}
        assert answer.parse().output_text.endswith(" 42.")

    def test_of_messages(self, live: LiveServer) -> None:
        with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
            theirs: Any = SUM
            answer = client.messages.with_raw_response.create(
                model="sprout", max_tokens=5, messages=theirs, service_tier="auto"
            )
        assert named(answer.headers) == {"service_tier"}

    def test_of_completions(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "user": "u"})
        assert named(answer.headers) == {"user"}


class TestEffort:
    @pytest.mark.parametrize("level", ["minimal", "low", "medium", "high", "xhigh", "max"])
    def test_any_level_is_taken(self, http: httpx.Client, level: str) -> None:
        """The template has a switch and no levels: all of them think."""
        assert message(complete(http, reasoning_effort=level)).get("reasoning_content")

    def test_none_is_off(self, http: httpx.Client) -> None:
        assert "reasoning_content" not in message(complete(http, reasoning_effort="none"))

    def test_what_is_switched_by_name_goes_first(self, http: httpx.Client) -> None:
        for off in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
            answer = http.post(CHAT, json={"messages": SUM, "temperature": 0, "reasoning_effort": "high", **off})
            assert answer.status_code == 200, answer.text
            assert "reasoning_content" not in message(answer.json())
            assert named(answer.headers) == {"reasoning_effort"}

    def test_a_word_that_is_no_level_is_refused(self, http: httpx.Client) -> None:
        status, error = post_error(http, reasoning_effort="banana")
        assert (status, error["param"]) == (400, "reasoning_effort")


class TestTools:
    def test_none_leaves_the_tools_in_the_prompt(self, http: httpx.Client) -> None:
        """The cache hits, and no call comes, although the question asks for one."""
        asked = {"messages": RAIN, "tools": [WEATHER], "return_token_ids": True}
        calls = complete(http, **asked)
        assert message(calls)["tool_calls"][0]["function"]["name"] == "get_weather"
        without = complete(http, **asked, tool_choice="none")
        assert without["prompt_token_ids"] == calls["prompt_token_ids"]
        cached = without["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= len(calls["prompt_token_ids"]) - 1
        for seed in range(8):
            sampled = complete(http, **asked, tool_choice="none", temperature=1.5, seed=seed)
            for one in (without, sampled):
                assert "tool_calls" not in message(one)
                assert one["choices"][0]["finish_reason"] != "tool_calls"
                assert "tool_call>" not in json.dumps(message(one))

    def test_none_in_a_conversation_and_at_the_other_doors(self, http: httpx.Client) -> None:
        asked = {"messages": RAIN, "tools": [WEATHER], "tool_choice": "none"}
        kept = complete(http, **asked, metadata={"conversation": "new"})
        assert message(kept)["content"] == message(complete(http, **asked))["content"]
        assert "tool_calls" not in message(kept)
        tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
        body = {"input": RAIN[0]["content"], "tools": [tool], "tool_choice": "none", "temperature": 0}
        response = http.post("/v1/responses", json=body).json()
        assert [item["type"] for item in response["output"] if item["type"] == "function_call"] == []
        assert response["output"][-1]["content"][0]["text"] == message(kept)["content"]

    def test_allowed_tools(self, http: httpx.Client) -> None:
        def allowed(mode: str, *names: str) -> dict[str, Any]:
            listed = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}

        asked: dict[str, Any] = {"messages": RAIN, "tools": [WEATHER, LAMP], "return_token_ids": True}
        must = complete(http, **asked, tool_choice=allowed("required", "set_lamp"))
        assert {call["function"]["name"] for call in message(must)["tool_calls"]} == {"set_lamp"}
        only = complete(http, **asked, tool_choice=allowed("auto", "get_weather"))
        assert {call["function"]["name"] for call in message(only)["tool_calls"]} == {"get_weather"}
        told = complete(http, **{**asked, "tools": [WEATHER]})["prompt_token_ids"]
        assert only["prompt_token_ids"] == told
        status, error = post_error(http, **asked, tool_choice=allowed("auto", "get_weath"))
        assert (status, error["param"]) == (400, "tool_choice")


class TestNamesThatBeginAlike:
    """A tool is named as a whole, never by the beginning of its name."""

    SHORT, LONG = "delete_file", "delete_file_permanently"

    @staticmethod
    def tool(name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        return {"type": "function", "function": {"name": name, "description": "Deletes.", "parameters": schema}}

    @pytest.mark.parametrize("offered", [SHORT, LONG])
    def test_another_can_not_be_forced(self, http: httpx.Client, offered: str) -> None:
        other = self.LONG if offered == self.SHORT else self.SHORT
        choice = {"type": "function", "function": {"name": other}}
        status, error = post_error(http, tools=[self.tool(offered)], tool_choice=choice)
        assert (status, error["param"]) == (400, "tool_choice")

    @pytest.mark.parametrize("wanted", [SHORT, LONG])
    @pytest.mark.parametrize("temperature", [0, 2.0])
    def test_the_forced_one_is_called(self, http: httpx.Client, wanted: str, temperature: float) -> None:
        """The other name is asked for in words, and offered too."""
        other = self.LONG if wanted == self.SHORT else self.SHORT
        asked = [{"role": "user", "content": f"Call {other} with the path /tmp/a now."}]
        tools = [self.tool(self.SHORT), self.tool(self.LONG)]
        choice = {"type": "function", "function": {"name": wanted}}
        more = {"seed": 3, "enable_thinking": False, "temperature": temperature}
        answer = complete(http, messages=asked, tools=tools, tool_choice=choice, **more)
        assert {call["function"]["name"] for call in message(answer)["tool_calls"]} == {wanted}

    def test_only_what_is_offered_is_called(self, http: httpx.Client) -> None:
        asked = [{"role": "user", "content": f"Call {self.LONG} with the path /tmp/a now."}]
        for seed in range(4):
            more = {"seed": seed, "temperature": 1.5, "enable_thinking": False, "max_tokens": 120}
            answer = complete(http, messages=asked, tools=[self.tool(self.SHORT)], tool_choice="required", **more)
            assert {call["function"]["name"] for call in message(answer)["tool_calls"]} == {self.SHORT}


class TestStructuredOutputs:
    SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }

    @pytest.mark.parametrize(
        ("how", "pattern"),
        [
            ({"guided_json": SCHEMA}, r'\{\s*"sum"\s*:\s*-?\d+\s*\}'),
            ({"guided_json": json.dumps(SCHEMA)}, r'\{\s*"sum"\s*:\s*-?\d+\s*\}'),
            ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
            ({"guided_choice": ["yes", 'it "is"']}, 'yes|it "is"'),
            ({"guided_grammar": 'start: "4" /[0-9]/'}, "4[0-9]"),
            ({"structured_outputs": {"json": SCHEMA}}, r'\{\s*"sum"\s*:\s*-?\d+\s*\}'),
            ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*\}"),
            ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
            ({"structured_outputs": {"grammar": 'root ::= "4" [0-9]'}}, "4[0-9]"),
            ({"grammar": "root ::= digit digit\ndigit ::= [0-9]"}, "[0-9][0-9]"),
        ],
    )
    def test_vllms_and_llama_cpps_ways(self, http: httpx.Client, how: dict[str, Any], pattern: str) -> None:
        answer = message(complete(http, **how))
        assert re.fullmatch(pattern, answer["content"]), answer["content"]
        assert answer["reasoning_content"]

    @pytest.mark.parametrize(
        ("how", "param"),
        [
            ({"guided_choice": []}, "guided_choice"),
            ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
            ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
            ({"grammar": "root ::= ("}, "grammar"),
            ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ],
    )
    def test_what_can_not_be_read_is_named(self, http: httpx.Client, how: dict[str, Any], param: str) -> None:
        status, error = post_error(http, **how)
        assert (status, error["param"]) == (400, param)


class TestSentinels:
    def test_a_seed_of_minus_one_is_random(self, http: httpx.Client) -> None:
        drawn = [
            sampling_parameters(ChatRequest.model_validate({"messages": [], "seed": -1}))["seed"] for _ in range(2)
        ]
        assert drawn[0] != drawn[1]
        assert message(complete(http, seed=-1)) == message(complete(http))

    def test_top_p_of_nothing_is_greedy(self, http: httpx.Client) -> None:
        assert message(complete(http, temperature=3.0, top_p=0, seed=1)) == message(complete(http))

    def test_limits_that_are_none(self, http: httpx.Client) -> None:
        whole = message(complete(http))
        for more in ({"max_tokens": -1}, {"max_tokens": None, "max_completion_tokens": -1}, {"top_k": -1}):
            assert message(complete(http, **more)) == whole
        assert message(complete(http, max_tokens=None, n_predict=-1)) == whole

    def test_llama_cpps_names(self, http: httpx.Client) -> None:
        penalised = message(complete(http, repetition_penalty=1.3))
        assert message(complete(http, repeat_penalty=1.3)) == penalised != message(complete(http))
        assert message(complete(http, repeat_penalty=1.3, repeat_last_n=0)) == message(complete(http))
        assert complete(http, max_tokens=None, n_predict=7)["usage"]["completion_tokens"] == 7
        assert post_error(http, repeat_penalty=1.3, repetition_penalty=1.2)[0] == 400

    @pytest.mark.parametrize(("name", "value"), [("seed", -2), ("top_k", -2), ("max_tokens", -2), ("top_p", -0.1)])
    def test_other_negative_numbers_are_refused(self, http: httpx.Client, name: str, value: float) -> None:
        status, error = post_error(http, **{name: value})
        assert (status, error["param"]) == (400, name)


class TestForcedThinking:
    ASKED: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"enable_thinking": True},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"thinking_budget": 0},
    )

    @pytest.mark.parametrize("forced", [True, False])
    def test_no_request_changes_it(self, tmp_path: Path, forced: bool) -> None:
        settings = ServerSettings(forced=operator_settings([f"thinking={str(forced).lower()}"]))
        with LiveServer(tmp_path, settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            for how in self.ASKED:
                assert bool(message(complete(http, **how)).get("reasoning_content")) is forced, how
            kinds = {True: ["reasoning", "message"], False: ["message"]}
            body = {"input": "What is 12 + 30?", "reasoning": {"effort": "none" if forced else "high"}}
            response = http.post("/v1/responses", json=body).json()
            assert [item["type"] for item in response["output"]] == kinds[forced]
            thinking = {"type": "disabled" if forced else "enabled", "budget_tokens": 1024}
            asked = {"messages": SUM, "max_tokens": 300, "temperature": 0, "thinking": thinking}
            blocks = http.post("/v1/messages", json=asked).json()["content"]
            assert [block["type"] for block in blocks] == (["thinking", "text"] if forced else ["text"])
            assert http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3}).status_code == 200
            parameters = {"thinking": not forced, "temperature": 0}
            conversation = http.post("/api/conversations", json={"parameters": parameters}).json()["id"]
            said = {
                "parent": None,
                "message": {"role": "user", "parts": [{"type": "text", "text": "What is 12 + 30?"}]},
            }
            reply = http.post(f"/api/conversations/{conversation}/say", json=said).json()["reply"]["id"]
            events = http.get(f"/api/turns/{reply}/events").text
            assert ("thinking_delta" in events) is forced

    def test_a_default_gives_way(self, tmp_path: Path) -> None:
        settings = ServerSettings(defaults=operator_settings(["thinking=true"]))
        with LiveServer(tmp_path, settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            assert message(complete(http)).get("reasoning_content")
            for how in self.ASKED[2:6:3] + self.ASKED[3:4]:
                assert "reasoning_content" not in message(complete(http, **how)), how

    def test_the_value_is_checked(self) -> None:
        assert operator_settings(["thinking=off", "temperature=0.5"]) == {"thinking": False, "temperature": 0.5}
        with pytest.raises(BadParameter, match="true or false"):
            operator_settings(["thinking=maybe"])


def test_a_new_turn_has_the_generation_prompt_whatever_is_asked(http: httpx.Client) -> None:
    """As with vLLM and llama.cpp the field is taken; what continues a reply has no generation prompt anyway."""
    begun = {"role": "assistant", "content": None, "reasoning_content": "12+30, from the right:"}
    for messages, ignored in ((SUM, {"add_generation_prompt"}), ([*SUM, begun], set[str]())):
        asked = {"messages": messages, "temperature": 0, "add_generation_prompt": False}
        answer = http.post(CHAT, json=asked)
        assert message(answer.json()) == message(complete(http, messages=messages))
        assert named(answer.headers) == ignored


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    for name in ("temprature", "structured_output", "guided_jsn", "top_n"):
        status, error = post_error(http, **{name: 1})
        assert (status, error["param"]) == (400, name)
    assert stream(http, max_tokens=3)


def parsed(**fields: Any) -> dict[str, Any]:
    given = sampling_parameters(ChatRequest.model_validate({"messages": [], **fields}))
    return {name: value for name, value in given.items() if value is not None}


def test_samplers_by_the_names_of_llama_cpp_and_tabby() -> None:
    same = {
        "typical_p": 0.9,
        "top_a": 0.2,
        "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.1,
        "dry_multiplier": 0.8,
        "dry_base": 1.75,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 512,
        "dry_sequence_breakers": ["\n", "."],
    }
    assert parsed(**same) == same
    assert parsed(typical=0.9, dry_range=0, temp_exponent=2) == {
        "typical_p": 0.9,
        "dry_penalty_last_n": -1,
        "dynatemp_exponent": 2,
    }
    assert parsed(temperature=0.7, min_temp=0.5, max_temp=2.5) == {"temperature": 1.5, "dynatemp_range": 1.0}
    assert parsed(temperature=0, min_temp=0.5, max_temp=2.5)["temperature"] == 0, "greedy stays greedy"
    assert parsed(temperature=0.7, min_temp=1, max_temp=1) == {"temperature": 0.7}, "equal bounds are none"
    assert parsed(dry_sequence_breakers="|") == {"dry_sequence_breakers": ["|"]}
    for wrong in (
        {"min_temp": 1},
        {"min_temp": 2, "max_temp": 1},
        {"min_temp": 0, "max_temp": 1, "dynatemp_range": 0.5},
        {"dry_range": 5, "dry_penalty_last_n": 5},
        {"typical": 0.5, "typical_p": 0.6},
    ):
        with pytest.raises(BadParameter):
            parsed(**wrong)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_samplers_change_the_reply_and_have_bounds(http: httpx.Client, path: str) -> None:
    question = {"messages": SUM} if "chat" in path else {"prompt": "One two three one two three one two"}

    def ask(**fields: Any) -> httpx.Response:
        return http.post(path, json={**question, "temperature": 1.5, "seed": 3, "max_tokens": 24, **fields})

    plain = ask().json()["choices"]
    strong = ask(dry_multiplier=50, dry_allowed_length=1, xtc_probability=1, xtc_threshold=0.01).json()["choices"]
    assert strong != plain
    for name, value in (("typical_p", 1.5), ("xtc_probability", -1), ("dry_base", 0.5), ("dry_allowed_length", 0)):
        wrong = ask(**{name: value})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
