"""The official SDK, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from palaver.server.settings import ServerLimits, ServerSettings
from tests.server.anthropic.client import LAMP, QUESTION, SUM, WEATHER
from tests.server.live_server import LiveServer

SPROUT: dict[str, Any] = {"model": "sprout", "max_tokens": 300, "extra_body": {"temperature": 0}}


def test_messages(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=SUM, **SPROUT)
    thought, answer = message.content
    assert thought.type == "thinking"
    assert thought.thinking
    assert thought.signature
    assert answer.type == "text"
    assert "42" in answer.text
    assert (message.role, message.model, message.stop_reason) == ("assistant", "sprout", "end_turn")
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    assert message._request_id


def test_a_stream_folds_to_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=SUM, **SPROUT)
    with client.messages.stream(messages=SUM, **SPROUT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[-1].text  # type: ignore[union-attr]
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    prompts = {
        use.input_tokens + (use.cache_read_input_tokens or 0) for use in (final.usage, whole.usage)
    }  # what is cached differs, the sum does not
    assert len(prompts) == 1
    kinds = {event.type for event in client.messages.create(messages=SUM, stream=True, **SPROUT)}
    opened = {"message_start", "content_block_start", "content_block_delta", "content_block_stop"}
    assert kinds == {*opened, "message_delta", "message_stop"}


async def test_the_asynchronous_client(live: LiveServer) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=live.url, api_key="none", max_retries=0) as client,
        client.messages.stream(messages=SUM, **SPROUT) as stream,
    ):
        final = await stream.get_final_message()
    assert "42" in final.content[-1].text  # type: ignore[union-attr]


def test_thinking_goes_on_and_off(client: anthropic.Anthropic) -> None:
    on = client.messages.create(messages=SUM, thinking={"type": "enabled", "budget_tokens": 100}, **SPROUT)
    assert [block.type for block in on.content] == ["thinking", "text"]
    adaptive = client.messages.create(messages=SUM, thinking={"type": "adaptive"}, **SPROUT)
    assert [block.type for block in adaptive.content] == ["thinking", "text"]
    off = client.messages.create(messages=SUM, thinking={"type": "disabled"}, **SPROUT)
    assert [block.type for block in off.content] == ["text"]
    assert off.usage.output_tokens_details is not None
    assert off.usage.output_tokens_details.thinking_tokens == 0


def test_a_thought_comes_back_and_the_conversation_goes_on(client: anthropic.Anthropic) -> None:
    first = client.messages.create(messages=SUM, **SPROUT)
    after: list[Any] = [*SUM, first.to_param(), {"role": "user", "content": "What is 5 + 6?"}]
    second = client.messages.create(messages=after, **SPROUT)
    assert "11" in second.content[-1].text


def test_tools_round_trip(client: anthropic.Anthropic) -> None:
    first = client.messages.create(messages=QUESTION, tools=[WEATHER], **SPROUT)  # type: ignore[list-item]
    call = first.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input, first.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"degrees": 21}'}
    after: list[Any] = [*QUESTION, first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(messages=after, tools=[WEATHER], **SPROUT)  # type: ignore[list-item]
    assert "21" in second.content[-1].text  # type: ignore[union-attr]
    read = second.usage.cache_read_input_tokens or 0
    assert read > second.usage.input_tokens, "the first turn's tokens are found again"


def test_a_streamed_call_has_its_input_in_pieces(client: anthropic.Anthropic) -> None:
    pieces = []
    with client.messages.stream(messages=QUESTION, tools=[WEATHER], **SPROUT) as stream:  # type: ignore[list-item]
        for event in stream:
            if event.type == "input_json":
                pieces.append(event.partial_json)
        call = stream.get_final_message().content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Paris"}
    assert len(pieces) > 1


def test_the_sdk_s_own_tool_runner(client: anthropic.Anthropic) -> None:
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather at a place.

        Args:
            city: Where.
        """
        cities.append(city)
        return '{"degrees": 21}'

    runner = client.beta.messages.tool_runner(messages=QUESTION, tools=[get_weather], **SPROUT)
    final = runner.until_done()
    assert cities == ["Paris"]
    assert "21" in final.content[-1].text


def test_a_call_that_must_come(client: anthropic.Anthropic) -> None:
    tools: list[Any] = [WEATHER, LAMP]
    named: Any = {"type": "tool", "name": "set_lamp", "disable_parallel_tool_use": True}
    forced = client.messages.create(messages=QUESTION, tools=tools, tool_choice=named, **SPROUT)
    assert [block.name for block in forced.content if block.type == "tool_use"] == ["set_lamp"]
    some = client.messages.create(messages=SUM, tools=tools, tool_choice={"type": "any"}, **SPROUT)
    assert some.stop_reason == "tool_use"
    none = client.messages.create(messages=QUESTION, tools=tools, tool_choice={"type": "none"}, **SPROUT)
    assert not any(block.type == "tool_use" for block in none.content)


def test_structured_output(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(messages=SUM, output_config=config, **SPROUT)
    assert message.content[-1].text.startswith("{")


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic) -> None:
    tools: list[Any] = [WEATHER]
    counted = client.messages.count_tokens(model="sprout", messages=QUESTION, tools=tools, system="Be kind.")
    message = client.messages.create(messages=QUESTION, tools=tools, system="Be kind.", **SPROUT)
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == read
    shorter = client.messages.count_tokens(model="sprout", messages=QUESTION)
    assert shorter.input_tokens < counted.input_tokens


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=SUM, **SPROUT).content[-1].text
    stop = " " + whole.split()[-1]
    message = client.messages.create(messages=SUM, stop_sequences=["zzz", stop], **SPROUT)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[-1].text == whole.removesuffix(stop)


def test_a_reply_that_is_begun(client: anthropic.Anthropic) -> None:
    partial: list[Any] = [*SUM, {"role": "assistant", "content": "The answer is"}]
    message = client.messages.create(messages=partial, **SPROUT)
    (text,) = message.content
    assert text.type == "text"
    assert "42" in text.text
    assert "The answer is" not in text.text


def test_a_reply_that_was_too_long_goes_on(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=SUM, **SPROUT)
    cut = client.messages.create(messages=SUM, **{**SPROUT, "max_tokens": 60})
    assert cut.stop_reason == "max_tokens"
    rest = client.messages.create(messages=[*SUM, cut.to_param()], **SPROUT)
    assert cut.content[-1].text + rest.content[-1].text == whole.content[-1].text
    assert cut.usage.output_tokens + rest.usage.output_tokens == whole.usage.output_tokens


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["sprout"]
    model = client.models.retrieve("sprout")
    assert (model.display_name, model.lifecycle) == ("sprout", "active")
    assert model.max_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nothing")


def test_errors_are_their_typed_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(messages=SUM, **{**SPROUT, "max_tokens": -1})
    assert (bad.value.type, bad.value.error_code) == ("invalid_request_error", "bad_parameter")
    assert "max_tokens" in str(bad.value.api_message)
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(messages=SUM, **{**SPROUT, "model": "another"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(messages=[{"role": "user", "content": "word " * 9000}], **SPROUT)
    assert "too long" in str(long.value.api_message)


def test_errors_of_keys_and_limits(tmp_path: Path) -> None:
    settings = ServerSettings(host="0.0.0.0", limits=ServerLimits(requests_per_minute=2, body_bytes=5000))
    with LiveServer(tmp_path, settings, None) as live:
        store = live.service.store
        with calling(live, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as unknown:
            client.models.list()
        assert unknown.value.type == "authentication_error"
        with calling(live, store.keys.add(store.users.ensure("ann").id)[1]) as client:
            with pytest.raises(anthropic.NotFoundError) as none:
                client.messages.create(messages=SUM, **{**SPROUT, "model": "nothing"})
            assert none.value.type == "not_found_error"
            with pytest.raises(anthropic.ContentTooLargeError):
                client.messages.create(messages=[{"role": "user", "content": "x" * 6000}], **SPROUT)
            with pytest.raises(anthropic.RateLimitError) as often:
                client.messages.create(messages=SUM, **SPROUT)
            assert often.value.type == "rate_limit_error"
            assert often.value.response.headers["retry-after"]


def test_either_header_may_hold_the_key(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ServerSettings(host="0.0.0.0"), None) as live:
        store = live.service.store
        key = store.keys.add(store.users.ensure("ann").id)[1]
        with calling(live, key) as client:
            client.models.list()
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
            assert httpx.get(f"{live.url}/v1/models", headers=headers, timeout=60).status_code == 200


def calling(live: LiveServer, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0)
