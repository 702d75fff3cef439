"""Comparisons in both databases, and preferences in trl's format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import pytest
from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from palaver.messages import Image, Part, Text, Thinking, Tool, ToolCall, ToolResult
from palaver.messages import Message as StoreMessage
from palaver.messages import Role as StoreRole
from palaver.store import Conflict, Lease, NotFound, ReplyEnding, ReplyStatus, Store, StoredMessage
from palaver.store.comparisons import ComparedReply, Comparison, TallyRow
from palaver.transcripts.preferences import write_preferences
from tests import media_files
from tests.store.conftest import StoreLocation
from tests.store.factories import SETTINGS, add_message, add_reply, new_conversation
from tests.store.test_commands import run


@with_config(ConfigDict(extra="forbid"))
class Function(TypedDict):
    name: str
    arguments: dict[str, Any]


@with_config(ConfigDict(extra="forbid"))
class Call(TypedDict):
    type: Literal["function"]
    function: Function


@with_config(ConfigDict(extra="forbid"))
class Message(TypedDict):
    """A message of trl's conversational format: `role` and `content`, and keys that chat templates read."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]
    name: NotRequired[str]


Messages = Annotated[list[Message], Field(min_length=1)]


@with_config(ConfigDict(extra="forbid"))
class Preference(TypedDict):
    """trl's "preference" type with an explicit prompt (docs: dataset formats)."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: NotRequired[list[dict[str, Any]]]


PREFERENCE = TypeAdapter(Preference)


def check_preferences(text: str) -> list[Preference]:
    """The lines of a file, each checked by trl's documented schema."""
    found = [PREFERENCE.validate_python(json.loads(line), strict=True) for line in text.splitlines()]
    for one in found:
        assert one["prompt"][-1]["role"] in ("user", "tool")  # the completion follows the user
        assert one["chosen"][0]["role"] == one["rejected"][0]["role"] == "assistant"
        assert one["chosen"] != one["rejected"]
    return found


def compare(store: Store, conversation: str, parent: str, *replies: StoredMessage, blind: bool = False) -> Comparison:
    columns = [ComparedReply(one.id, f"column {number}", "sprout", {}) for number, one in enumerate(replies)]
    return store.comparisons.create(conversation, parent, columns, blind)


def end_reply(
    store: Store,
    lease: Lease,
    parent: StoredMessage,
    *parts: Part,
    status: ReplyStatus = ReplyStatus.DONE,
    **fields: Any,
) -> StoredMessage:
    reply = store.replies.start(lease, parent.conversation_id, parent.id, replace(SETTINGS, **fields))
    return store.replies.finish(lease, reply.id, ReplyEnding(status, parts))


@pytest.fixture
def lease(store: Store) -> Lease:
    return store.leases.open()


def test_a_comparison_is_recorded_once_and_decided(store: Store, lease: Lease) -> None:
    made = new_conversation(store)
    question = add_message(store, made.id, None, "Which river?")
    replies = [add_reply(store, lease, made.id, question.id, text) for text in ("Rhine", "Po", "Elbe")]
    parameters = {"temperature": 0.5, "system": "Lone \ud800 and \0."}
    columns = [ComparedReply(one.id, "ähnlich · 東京", "sprout", parameters) for one in replies]
    comparison = store.comparisons.create(made.id, question.id, columns, True, "key")
    assert store.comparisons.create(made.id, question.id, columns[:2], False, "key") == comparison
    assert store.comparisons.find(made.id, "key") == comparison
    assert store.comparisons.find(made.id, "other") is None
    assert comparison.replies == tuple(columns)
    assert store.comparisons.list(made.id) == (comparison,)
    assert store.comparisons.tally(made.owner_id) == ()
    with pytest.raises(Conflict):
        store.comparisons.decide(comparison.id, question.id)
    decided = store.comparisons.decide(comparison.id, replies[1].id)
    assert decided == replace(comparison, chosen_id=replies[1].id, decided_at=decided.decided_at)
    assert store.comparisons.tally(made.owner_id) == (TallyRow("ähnlich · 東京", 3, 1, 3, 1),)
    store.conversations.delete(made.id)
    assert store.comparisons.tally(made.owner_id) == ()
    with pytest.raises(NotFound):
        store.comparisons.get(comparison.id)
    store.conversations.undelete(made.id)
    assert store.comparisons.get(comparison.id) == decided


def test_preferences_are_in_trls_format(store: Store, place: StoreLocation, lease: Lease, tmp_path: Path) -> None:
    made = new_conversation(store)
    question = add_message(store, made.id, None, "Which river?\u2028\ud800")
    system = {"system": "Be brief."}
    best = end_reply(store, lease, question, Thinking("A long one."), Text("The Rhine."), options=system)
    worse = [end_reply(store, lease, question, Text(text)) for text in ("The Po.", "The Elbe.")]
    comparison = compare(store, made.id, question.id, worse[0], best, worse[1])
    assert write_preferences(store, [made.id]).text == ""
    store.comparisons.decide(comparison.id, None)  # no reply is better
    assert write_preferences(store, [made.id]).text == ""
    store.comparisons.decide(comparison.id, best.id)
    first, second = check_preferences(write_preferences(store, [made.id]).text)
    assert first["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which river?\u2028\ud800"},
    ]
    assert first["chosen"] == [
        {"role": "assistant", "content": "The Rhine.", "reasoning_content": "A long one."},
    ]
    assert [one["rejected"][0]["content"] for one in (first, second)] == ["The Po.", "The Elbe."]
    assert run(place, "export", "--preferences") == write_preferences(store, [made.id]).text
    run(place, "export", "--preferences", made.id[:8], "-o", tmp_path / "pairs.jsonl")
    assert check_preferences((tmp_path / "pairs.jsonl").read_text()) == [first, second]


def test_a_reply_with_tool_calls_is_exported_up_to_its_answer(store: Store, lease: Lease) -> None:
    made = new_conversation(store)
    question = add_message(store, made.id, None, "How warm is it?")
    tools = (Tool("weather", "The weather.", {"type": "object"}),)
    call = ToolCall("1", "weather", '{"city": "Oslo"}')
    reply = store.replies.start(lease, made.id, question.id, replace(SETTINGS, tools=tools))
    calling = store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (call,), tool_calls=(call,)))
    plain = end_reply(store, lease, question, Text("I don't know."), tools=tools)
    comparison = compare(store, made.id, question.id, calling, plain)
    store.comparisons.decide(comparison.id, calling.id)
    assert write_preferences(store, [made.id]).skipped == 1  # its call has no result yet
    result = StoreMessage(StoreRole.TOOL, (ToolResult("1", "4 °C", "weather"),))
    stored = store.messages.append(made.id, calling.id, result)
    answer = end_reply(store, lease, stored, Text("4 °C."))
    store.tool_rounds.close(calling.id, answer.id)
    (pair,) = check_preferences(write_preferences(store, [made.id]).text)
    assert pair["chosen"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "name": "weather", "content": "4 °C"},
        {"role": "assistant", "content": "4 °C."},
    ]
    assert pair["tools"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("text", "status"),
    [("", ReplyStatus.DONE), ("The Rhine", ReplyStatus.STOPPED), ("The R", ReplyStatus.LENGTH)],
)
def test_incomplete_and_equal_replies_make_no_pair(store: Store, lease: Lease, text: str, status: ReplyStatus) -> None:
    made = new_conversation(store)
    question = add_message(store, made.id, None, "Which river?")
    one = end_reply(store, lease, question, Text("The Rhine."))
    other = end_reply(store, lease, question, *([Text(text)] if text else []), status=status)
    same = end_reply(store, lease, question, Text("The Rhine."))
    comparison = compare(store, made.id, question.id, one, other, same)
    store.comparisons.decide(comparison.id, one.id)
    file = write_preferences(store, [made.id])
    assert (file.text, file.pairs, file.skipped) == ("", 0, 2)


def test_media_make_no_pair(store: Store, lease: Lease) -> None:
    made = new_conversation(store)
    picture = StoreMessage(StoreRole.USER, (Text("What is this?"), Image("image/png", media_files.picture())))
    question = store.messages.append(made.id, None, picture)
    replies = [end_reply(store, lease, question, Text(text)) for text in ("Red.", "Blue.")]
    comparison = compare(store, made.id, question.id, *replies)
    store.comparisons.decide(comparison.id, replies[0].id)
    assert write_preferences(store, [made.id]).skipped == 1
