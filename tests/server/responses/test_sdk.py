"""The official SDK's calls of the Responses API, unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from palaver.chat.model import Model
from palaver.engines.host.supervisor import ReportProgress
from palaver.server.settings import ServerLimits, ServerSettings
from tests.chat.scripted_service import WAVE
from tests.chat.scripted_service import model as scripted_model
from tests.scripted_engine import HoldScript
from tests.server.live_server import LiveServer

SUM = "What is 12 + 30?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather at a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
REQUEST: dict[str, Any] = {"model": "sprout", "input": SUM, "temperature": 0}


async def load_held(name: str, report: ReportProgress) -> Model:
    """A model whose first reply goes on until it is stopped, however busy the machine is."""
    return scripted_model([[*WAVE[:8], HoldScript(asyncio.Event())], WAVE], name)


@pytest.fixture
def held_client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    with (
        LiveServer(tmp_path, load_model=load_held) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


class Sum(BaseModel):
    answer: int


def thought(response: Response) -> str:
    items = [item for item in response.output if item.type == "reasoning"]
    return "".join(part.text for item in items for part in item.content or ())


def numbered(events: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [event.to_dict() for event in events]
    return found


def test_create(client: openai.OpenAI) -> None:
    response = client.responses.create(**REQUEST)
    assert response.status == "completed"
    assert response.output_text.endswith(" 42.")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert "Digits" in thought(response)
    assert "Digits" not in response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id) == response


def test_stream_has_the_names_and_the_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(**REQUEST, stream=True))
    names = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    distinct = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    assert distinct == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed"
    assert text == last.response.output_text
    assert text.endswith(" 42.")
    assert client.responses.retrieve(last.response.id) == last.response


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="sprout", input=SUM, temperature=0, text_format=Sum) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Sum)


async def test_the_async_client(live: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        async with client.responses.stream(**REQUEST) as stream:
            final = await stream.get_final_response()
        assert (await client.responses.retrieve(final.id)).output_text == final.output_text
        assert final.output_text.endswith(" 42.")


def test_structured_text(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**REQUEST, text_format=Sum)
    assert isinstance(parsed.output_parsed, Sum)
    assert [item.type for item in parsed.output] == ["reasoning", "message"]
    loose = client.responses.create(**REQUEST, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(loose.output_text), dict)


def test_tools_round_trip_by_the_response_before(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="sprout", input="What is the weather in Paris?", tools=[WEATHER], temperature=0
    )
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'}
    second = client.responses.create(
        model="sprout", input=[result], previous_response_id=first.id, tools=[WEATHER], temperature=0
    )
    assert "21" in second.output_text
    assert second.previous_response_id == first.id
    assert second.tools[0].to_dict()["strict"] is True


def test_tools_round_trip_without_being_stored(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    request: dict[str, Any] = {"model": "sprout", "tools": [WEATHER], "temperature": 0, "store": False}
    first = client.responses.create(input=items, include=["reasoning.encrypted_content"], **request)
    call = next(item for item in first.output if item.type == "function_call")
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'}]
    second = client.responses.create(input=items, **request)
    assert "21" in second.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_calls_are_streamed_and_chosen(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "sprout", "input": "Hello there", "tools": [WEATHER], "temperature": 0}
    chosen: list[Any] = ["required", {"type": "function", "name": "get_weather"}]
    for choice in chosen:
        events = list(client.responses.create(**request, tool_choice=choice, stream=True))
        arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        done = next(e for e in events if e.type == "response.function_call_arguments.done")
        assert arguments == done.arguments
        assert "city" in json.loads(arguments)
    none = client.responses.create(**{**request, "input": "What is the weather in Paris?"}, tool_choice="none")
    assert all(item.type != "function_call" for item in none.output)
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    assert client.responses.create(**request, tool_choice=allowed).status == "completed"


def test_the_response_before_is_gone_on_with_twice(client: openai.OpenAI) -> None:
    first = client.responses.create(model="sprout", input="My name is Ann.", temperature=0)
    request: dict[str, Any] = {"model": "sprout", "input": "What is my name?", "temperature": 0}
    one = client.responses.create(**request, previous_response_id=first.id)
    other = client.responses.create(**request, previous_response_id=first.id)
    assert "Ann" in one.output_text
    assert one.output_text == other.output_text
    assert one.id != other.id
    assert one.conversation == other.conversation == first.conversation
    assert one.usage is not None
    assert one.usage.input_tokens_details.cached_tokens > 0


def test_background(client: openai.OpenAI) -> None:
    response = client.responses.create(**REQUEST, background=True)
    assert response.status in ("queued", "in_progress")
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    assert response.status == "completed"
    assert response.background
    assert response.output_text.endswith(" 42.")


def test_cancel(held_client: openai.OpenAI) -> None:
    response = held_client.responses.create(**REQUEST, background=True)
    cancelled = held_client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert held_client.responses.cancel(response.id) == cancelled, "it stays as it is"
    assert held_client.responses.retrieve(response.id) == cancelled


def test_a_stream_ends_when_it_is_cancelled(held_client: openai.OpenAI) -> None:
    events: list[Any] = []
    with held_client.responses.create(**REQUEST, background=True, stream=True) as stream:
        for event in stream:
            if event.type.endswith(".delta") and not any(one.type.endswith(".delta") for one in events):
                assert events[0].type == "response.created"
                held_client.responses.cancel(events[0].response.id)
            events.append(event)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    assert last.response.output[0].to_dict()["status"] == "incomplete"


def test_delete(client: openai.OpenAI) -> None:
    response = client.responses.create(**REQUEST)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(**REQUEST, previous_response_id=response.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_running_response_is_stopped_and_deleted(held_client: openai.OpenAI) -> None:
    response = held_client.responses.create(**REQUEST, background=True)
    held_client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        held_client.responses.cancel(response.id)


def test_what_was_asked_for_is_listed(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    response = client.responses.create(model="sprout", input=items, max_output_tokens=16)
    items = [item.to_dict() for item in client.responses.input_items.list(response.id, order="asc")]
    assert [item["role"] for item in items] == ["system", "user"]
    assert items[1]["content"] == [{"type": "input_text", "text": "Hello"}]
    pages = client.responses.input_items.list(response.id, limit=1)
    assert [item.to_dict() for item in pages] == items[::-1], "page by page, the newest first"


def test_cut_at_every_event_while_it_runs(client: openai.OpenAI) -> None:
    """One connection for each event: every one but the first comes back by the number of the last."""
    stream = client.responses.create(**REQUEST, background=True, stream=True)
    events = [next(stream)]
    stream.close()
    created = events[0]
    assert created.type == "response.created"
    while events[-1].type != "response.completed":
        with client.responses.retrieve(
            created.response.id, stream=True, starting_after=events[-1].sequence_number
        ) as rest:
            events.append(next(rest))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert numbered(events) == numbered(client.responses.retrieve(created.response.id, stream=True))


def test_resumed_at_every_event_when_it_is_over(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "sprout", "input": "What is the weather in Paris?", "tools": [WEATHER]}
    whole = numbered(client.responses.create(**request, stream=True, extra_body={"seed": 5}))
    id = whole[0]["response"]["id"]
    for number in range(len(whole)):
        assert numbered(client.responses.retrieve(id, stream=True, starting_after=number)) == whole[number + 1 :]
    with pytest.raises(openai.BadRequestError) as beyond:
        client.responses.retrieve(id, stream=True, starting_after=len(whole))
    assert beyond.value.param == "starting_after"


def test_resumed_by_the_streaming_helper(client: openai.OpenAI) -> None:
    response = client.responses.create(**REQUEST, background=True)
    with client.responses.stream(response_id=response.id, starting_after=10) as stream:
        events = list(stream)
    assert events[0].sequence_number == 11
    assert events[-1].type == "response.completed"


def test_log_probabilities_stored_and_not(client: openai.OpenAI) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    stored = client.responses.create(**REQUEST, **options)
    stateless = client.responses.create(**REQUEST, **options, store=False)

    def logprobs(response: Response) -> list[Any]:
        [message] = [item for item in response.output if item.type == "message"]
        [part] = [part for part in message.content if part.type == "output_text"]
        return part.logprobs or []

    assert "".join(one.token for one in logprobs(stored)) == stored.output_text
    assert [len(one.top_logprobs) for one in logprobs(stored)] == [2] * len(logprobs(stored))
    assert [one.token for one in logprobs(stored)] == [one.token for one in logprobs(stateless)]
    assert client.responses.retrieve(stored.id) == stored
    plain = client.responses.create(**REQUEST)
    assert logprobs(plain) == []
    assert logprobs(client.responses.retrieve(plain.id, include=["message.output_text.logprobs"]))
    events = numbered(client.responses.retrieve(stored.id, stream=True))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one["token"] for event in deltas for one in event["logprobs"]] == [one.token for one in logprobs(stored)]


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    first = client.responses.create(**REQUEST)
    assert first.usage is not None
    assert client.responses.input_tokens.count(model="sprout", input=SUM).input_tokens == first.usage.input_tokens
    after = client.responses.input_tokens.count(input=SUM, previous_response_id=first.id)
    assert after.input_tokens > first.usage.input_tokens


def test_cut_for_its_length(client: openai.OpenAI) -> None:
    for store in (True, False):
        response = client.responses.create(**REQUEST, max_output_tokens=16, store=store)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == ""
        assert response.usage is not None
        assert response.usage.output_tokens == 16


def test_the_assistants_last_item_is_continued(client: openai.OpenAI) -> None:
    """Where nothing is stored; the output holds what is new."""
    thought_so_far: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought_so_far["content"] = [{"type": "reasoning_text", "text": "12+30, from the right:"}]
    request: dict[str, Any] = {**REQUEST, "input": [{"role": "user", "content": SUM}, thought_so_far]}
    response = client.responses.create(**request, store=False)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert thought(response).startswith(" 2 1 and 0 3")
    part = client.responses.create(**request, store=False, max_output_tokens=5)
    assert part.status == "incomplete"
    assert part.usage is not None
    assert part.usage.output_tokens == 5
    with pytest.raises(openai.BadRequestError, match="store false"):
        client.responses.create(**request)
    call: Any = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"}
    with pytest.raises(openai.BadRequestError, match="result must follow"):
        client.responses.create(**{**request, "input": [{"role": "user", "content": SUM}, call]}, store=False)


def test_a_thought_as_the_summary(client: openai.OpenAI) -> None:
    content = client.responses.create(**REQUEST)
    response = client.responses.create(**REQUEST, reasoning={"summary": "auto"})
    [item] = [item for item in response.output if item.type == "reasoning"]
    assert item.content is None
    assert [part.text for part in item.summary] == [thought(content)]
    names = {event.type for event in client.responses.create(**REQUEST, reasoning={"summary": "auto"}, stream=True)}
    assert "response.reasoning_summary_text.delta" in names
    assert "response.reasoning_text.delta" not in names


def test_errors_are_their_typed_exceptions(client: openai.OpenAI) -> None:
    for id in ("resp_nope", "nope", "resp_" + "x" * 300):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
    with pytest.raises(openai.NotFoundError) as model:
        client.responses.create(model="gpt-4o", input=SUM)
    assert model.value.code == "model_not_found"
    refused: list[tuple[str, dict[str, Any]]] = [
        ("temperature", {"temperature": 9}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("background", {"background": True}),
        ("tool_choice", {"tool_choice": "required"}),
    ]
    for name, fields in refused:
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(**{**REQUEST, "store": False, **fields})
        assert bad.value.param == name
        assert name != "top_logprobs" or "top_logprobs must be between 0 and 20" in bad.value.message


def test_errors_of_keys_and_limits(tmp_path: Path) -> None:
    settings = ServerSettings(host="0.0.0.0", limits=ServerLimits(max_replies=1))
    with LiveServer(tmp_path, settings, load_model=load_held) as live:
        store, url = live.service.store, f"{live.url}/v1"
        keys = [store.keys.add(store.users.ensure(name).id)[1] for name in ("ann", "bob")]
        ann, bob = (openai.OpenAI(base_url=url, api_key=key, max_retries=0) for key in keys)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).responses.create(**REQUEST)
        response = ann.responses.create(**REQUEST, background=True)
        with pytest.raises(openai.RateLimitError):
            ann.responses.create(**REQUEST)
        for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(response.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.input_items.list(response.id)
        assert ann.responses.cancel(response.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(**REQUEST, previous_response_id=response.id)
        assert bob.responses.create(**REQUEST, max_output_tokens=16).status == "incomplete"
