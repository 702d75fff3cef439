"""Whatever a reply is made of, its events are numbered without a gap, each item is whole, and all forms agree."""

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
from palaver.server.responses.encoder import Event, ResponseEncoder, ResponseEnding, ResponseOutputOptions
from palaver.server.responses.history import ResponseRecord
from palaver.server.responses.items import chat_messages, encrypt_thinking, message_items
from palaver.server.responses.schemas import InputItem
from palaver.server.responses.streaming import replay_deltas, response_header

PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=3)
BLOCKS = st.lists(st.tuples(st.sampled_from(("thinking", "answer", "call", "notice")), PIECES), max_size=6)
DELTAS = {
    "reasoning": "response.reasoning_text.delta",
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
ASKS = InputItem.model_validate({"role": "user", "content": "go on"})
ENDED = ResponseEnding("completed", Usage(3, 1, 2, 1), None, 5)


def telling(shows: ResponseOutputOptions = ResponseOutputOptions(), **kept: Any) -> ResponseEncoder:  # noqa: B008 - frozen
    return ResponseEncoder("abc", response_header("resp_abc", 1, "sprout", ResponseRecord(**kept)), shows)


def read(blocks: list[tuple[str, list[str]]]) -> list[ReadEvent]:
    """As a reader tells them."""
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


def whole(told: ResponseEncoder, events: list[ReadEvent]) -> list[Event]:
    return [*told.opening(), *told.take(events), *told.end(ENDED)]


def said(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


@given(BLOCKS)
def test_every_item_is_told_whole_and_in_order(blocks: list[tuple[str, list[str]]]) -> None:
    events = whole(telling(), read(blocks))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in output]
    for place, item in enumerate(output):
        inside = [event for event in events if event.get("output_index") == place]
        assert "".join(event["delta"] for event in inside if event["type"] == DELTAS[item["type"]]) == said(item)
        assert all(event.get("item_id", item["id"]) == item["id"] for event in inside)
        assert item["status"] == "completed"


@given(BLOCKS, st.randoms())
def test_the_numbers_do_not_depend_on_how_it_came(blocks: list[tuple[str, list[str]]], random: Any) -> None:
    events, told, pieces = read(blocks), telling(background=True), telling(background=True)
    cut = told.opening()
    while events:
        size = random.randint(1, len(events))
        cut += told.take(events[:size])
        events = events[size:]
    assert [*cut, *told.end(ENDED)] == whole(pieces, read(blocks))


@given(BLOCKS)
def test_what_is_stored_is_what_was_streamed(blocks: list[tuple[str, list[str]]]) -> None:
    streamed = whole(telling(), read(blocks))[-1]["response"]["output"]
    message = fold(read(blocks)).message
    stored = whole(telling(), replay_deltas(message.parts))[-1]["response"]["output"]
    assert stored == streamed
    items = message_items("abc", message.role, message.parts)  # type: ignore[arg-type]
    assert [item["id"] for item in items] == [item["id"] for item in streamed]


@given(BLOCKS)
def test_what_was_told_can_be_sent_back(blocks: list[tuple[str, list[str]]]) -> None:
    output = whole(telling(), read(blocks))[-1]["response"]["output"]
    items = [InputItem.model_validate(item) for item in output if said(item) or item["type"] != "message"]
    found = chat_messages([*items, ASKS])
    message = fold(read(blocks)).message
    assert (found[0].reasoning_content or "" if items else "") == message.thinking
    calls = [call.function.arguments for message in found for call in message.tool_calls or ()]
    assert calls == [call.arguments for call in message.tool_calls]


def test_a_thought_comes_back_in_any_of_its_forms() -> None:
    for form in (
        {"content": [{"type": "reasoning_text", "text": "Why é?"}]},
        {"summary": [{"type": "summary_text", "text": "Why é?"}]},
        {"summary": [], "encrypted_content": encrypt_thinking("Why é?")},
    ):
        item = InputItem.model_validate({"type": "reasoning", **form})
        assert chat_messages([item, ASKS])[0].reasoning_content == "Why é?"


def test_an_item_that_was_cut_is_incomplete() -> None:
    for status in ("cancelled", "incomplete", "failed"):
        told = telling(ResponseOutputOptions(sealed=True))
        told.take([PhaseOpened(Phase.THINKING), ThinkingDelta("hm")])
        assert told.response("in_progress")["output"][0]["status"] == "in_progress"
        last = told.end(ResponseEnding(status, error="It broke." if status == "failed" else None))[-1]
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert last["response"]["output"][0]["encrypted_content"] == encrypt_thinking("hm")
        assert last["response"]["status"] == status
        assert (last["response"]["error"] is None) == (status != "failed")
        assert last["type"] == f"response.{'failed' if status == 'failed' else 'incomplete'}"


def test_a_failure_has_the_number_of_the_event_before_it() -> None:
    told = telling()
    events = told.opening()
    failure = told.failure("shutting_down", "Later.")
    assert failure["sequence_number"] == events[-1]["sequence_number"]
    assert failure["error"]["message"] == failure["message"] == "Later."
