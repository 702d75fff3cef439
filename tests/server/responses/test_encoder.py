"""Events are numbered without a gap, every item is complete, and the streamed and stored forms agree."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from palaver.events import (
    AnswerDelta,
    Notice,
    PhaseOpened,
    ReadEvent,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Usage,
    fold,
)
from palaver.phases import Phase
from palaver.server.responses.encoder import (
    Event,
    ResponseEncoder,
    ResponseEnding,
    ResponseOutputOptions,
    encrypt_thinking,
    message_items,
)
from palaver.server.responses.history import ResponseRecord
from palaver.server.responses.request import convert_input
from palaver.server.responses.schemas import InputItem
from palaver.server.responses.streaming import replay_deltas, response_header

PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=3)
BLOCKS = st.lists(st.tuples(st.sampled_from(("thinking", "answer", "call", "notice")), PIECES), max_size=6)
DELTAS = {
    "reasoning": "response.reasoning_text.delta",
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
NEXT_INPUT = InputItem.model_validate({"role": "user", "content": "go on"})
COMPLETED = ResponseEnding("completed", Usage(3, 1, 2, 1), None, 5)


def make_encoder(options: ResponseOutputOptions = ResponseOutputOptions(), **record: Any) -> ResponseEncoder:  # noqa: B008 - frozen
    return ResponseEncoder("abc", response_header("abc", 1, "sprout", ResponseRecord(**record)), options)


def read_events(blocks: list[tuple[str, list[str]]]) -> list[ReadEvent]:
    """The events that a reader emits for these blocks."""
    events: list[ReadEvent] = []
    calls = 0
    for kind, pieces in blocks:
        if kind == "thinking":
            events += [PhaseOpened(Phase.THINKING), *map(ThinkingDelta, pieces)]
        elif kind == "answer" and pieces:
            events += [PhaseOpened(Phase.ANSWER), *map(AnswerDelta, pieces)]
        elif kind == "call":
            deltas = [ToolCallDelta(calls, piece) for piece in pieces]
            events += [PhaseOpened(Phase.TOOL_CALL), ToolCallOpened(calls, f"id{calls}", "f"), *deltas]
            calls += 1
        elif kind == "notice":
            events += map(Notice, pieces)
    return events


def encode(encoder: ResponseEncoder, events: list[ReadEvent]) -> list[Event]:
    return [*encoder.start(), *encoder.feed(events), *encoder.finish(COMPLETED)]


def item_text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


@given(BLOCKS)
def test_every_item_is_complete_and_in_order(blocks: list[tuple[str, list[str]]]) -> None:
    events = encode(make_encoder(), read_events(blocks))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in output]
    for index, item in enumerate(output):
        inside = [event for event in events if event.get("output_index") == index]
        assert "".join(event["delta"] for event in inside if event["type"] == DELTAS[item["type"]]) == item_text(item)
        assert all(event.get("item_id", item["id"]) == item["id"] for event in inside)
        assert item["status"] == "completed"


@given(BLOCKS, st.randoms())
def test_sequence_numbers_do_not_depend_on_batching(blocks: list[tuple[str, list[str]]], random: Any) -> None:
    events, encoder, other = read_events(blocks), make_encoder(background=True), make_encoder(background=True)
    cut = encoder.start()
    while events:
        size = random.randint(1, len(events))
        cut += encoder.feed(events[:size])
        events = events[size:]
    assert [*cut, *encoder.finish(COMPLETED)] == encode(other, read_events(blocks))


@given(BLOCKS)
def test_stored_and_streamed_output_are_equal(blocks: list[tuple[str, list[str]]]) -> None:
    streamed = encode(make_encoder(), read_events(blocks))[-1]["response"]["output"]
    message = fold(read_events(blocks)).message
    stored = encode(make_encoder(), replay_deltas(message.parts))[-1]["response"]["output"]
    assert stored == streamed
    items = message_items("abc", message.role, message.parts)
    assert [item["id"] for item in items] == [item["id"] for item in streamed]


@given(BLOCKS)
def test_output_can_be_sent_back_as_input(blocks: list[tuple[str, list[str]]]) -> None:
    output = encode(make_encoder(), read_events(blocks))[-1]["response"]["output"]
    items = [InputItem.model_validate(item) for item in output if item_text(item) or item["type"] != "message"]
    found = convert_input([*items, NEXT_INPUT]).messages
    message = fold(read_events(blocks)).message
    assert (found[0].reasoning_content or "" if items else "") == message.thinking
    calls = [call.function.arguments for message in found for call in message.tool_calls or ()]
    assert calls == [call.arguments for call in message.tool_calls]


def test_reasoning_is_accepted_in_every_form() -> None:
    for form in (
        {"content": [{"type": "reasoning_text", "text": "Why é?"}]},
        {"summary": [{"type": "summary_text", "text": "Why é?"}]},
        {"summary": [], "encrypted_content": encrypt_thinking("Why é?")},
    ):
        item = InputItem.model_validate({"type": "reasoning", **form})
        assert convert_input([item, NEXT_INPUT]).messages[0].reasoning_content == "Why é?"


def test_pictures_of_results_come_before_calls_of_servers_that_follow() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": [picture]}
    server_call = {"type": "mcp_call", "id": "mcp_x_0", "server_label": "s", "name": "add", "output": "2"}
    found = convert_input([InputItem.model_validate(item) for item in (call, result, server_call)])
    assert [message.role for message in found.messages] == ["assistant", "tool", "user", "assistant", "tool"]
    assert found.places == ["input[0]", "input[1]", "input[1]", "input[2]", "input[2]"]


def test_an_unfinished_item_is_incomplete() -> None:
    for status in ("cancelled", "incomplete", "failed"):
        encoder = make_encoder(ResponseOutputOptions(encrypted=True))
        encoder.feed([PhaseOpened(Phase.THINKING), ThinkingDelta("hm")])
        assert encoder.response("in_progress")["output"][0]["status"] == "in_progress"
        last = encoder.finish(ResponseEnding(status, error="It broke." if status == "failed" else None))[-1]
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert last["response"]["output"][0]["encrypted_content"] == encrypt_thinking("hm")
        assert last["response"]["status"] == status
        assert (last["response"]["error"] is None) == (status != "failed")
        assert last["type"] == f"response.{'failed' if status == 'failed' else 'incomplete'}"


def test_an_error_event_repeats_the_last_sequence_number() -> None:
    encoder = make_encoder()
    events = encoder.start()
    failure = encoder.error_event("shutting_down", "Later.")
    assert failure["sequence_number"] == events[-1]["sequence_number"]
    assert failure["error"]["message"] == failure["message"] == "Later."
