"""The official SDK, unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from palaver.server.settings import ServerLimits, ServerSettings
from tests.server.chat_client import WEATHER
from tests.server.live_server import LiveServer

SUM: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Sum(BaseModel):
    answer: int


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="sprout", messages=SUM, temperature=0)
    assert "42" in (reply.choices[0].message.content or "")
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens
    assert next(model.id for model in client.models.list()) == "sprout"


def test_streaming(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sprout", "messages": SUM, "temperature": 0}
    pieces = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for piece in pieces:
        text += "".join(choice.delta.content or "" for choice in piece.choices)
        usage = piece.usage or usage
    assert "42" in text
    assert usage is not None
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text


def test_tools_round_trip(client: openai.OpenAI) -> None:
    tools: list[Any] = [WEATHER]
    first = client.chat.completions.create(model="sprout", messages=QUESTION, tools=tools, temperature=0)
    call = (first.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    told = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
    after: list[Any] = [*QUESTION, first.choices[0].message, told]
    second = client.chat.completions.create(model="sprout", messages=after, tools=tools, temperature=0)
    assert "21" in (second.choices[0].message.content or "")


class GetWeather(BaseModel):
    city: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the SDK's own
def test_parsed_messages_are_sent_back_as_they_are(client: openai.OpenAI) -> None:
    """OpenAI's helpers add what they parsed to the message, and send it."""
    tools: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    asked: dict[str, Any] = {"model": "sprout", "tools": tools, "temperature": 0}
    called = client.chat.completions.parse(messages=QUESTION, tool_choice="required", **asked).choices[0].message
    call = (called.tool_calls or [])[0]
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    messages = [*QUESTION, called, {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}]
    assert "21" in (client.chat.completions.parse(messages=messages, **asked).choices[0].message.content or "")
    told = client.chat.completions.parse(model="sprout", messages=SUM, response_format=Sum).choices[0].message
    after: list[Any] = [*SUM, told, *QUESTION]
    assert client.chat.completions.create(model="sprout", messages=after, max_tokens=1)


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="sprout", messages=SUM, response_format=Sum, temperature=0)
    assert isinstance(parsed.choices[0].message.parsed, Sum)


def test_completions(client: openai.OpenAI) -> None:
    made = client.completions.create(model="sprout", prompt="Hello", max_tokens=5)
    assert made.choices[0].finish_reason == "length"


def test_offsets_of_a_streamed_completion_are_those_of_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": "sprout", "prompt": ["Hello", "One"], "max_tokens": 5, "logprobs": 1, "temperature": 0}
    whole = [choice.logprobs and choice.logprobs.text_offset for choice in client.completions.create(**asked).choices]
    streamed: list[list[int]] = [[], []]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
    assert streamed == whole


def test_errors_are_their_typed_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="sprout", messages=SUM, n=10**6)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=SUM)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="sprout", input="x")


def test_errors_of_keys_and_limits(tmp_path: Path) -> None:
    settings = ServerSettings(host="0.0.0.0", limits=ServerLimits(requests_per_minute=2))
    with LiveServer(tmp_path, settings, None) as live:
        store = live.service.store
        url = f"{live.url}/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        key = store.keys.add(store.users.ensure("ann").id)[1]
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        with pytest.raises(openai.PermissionDeniedError):
            client.post("/model/unload", cast_to=object)
        client.models.list()
        with pytest.raises(openai.RateLimitError):
            client.models.list()
