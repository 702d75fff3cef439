from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.messages import Image, Message, Role, Text, Thinking, ToolCall, ToolResult, assistant, user
from palaver.store import ReplyEnding, ReplyStatus, Store
from palaver.transcripts import (
    Transcript,
    TranscriptEntry,
    TranscriptFormat,
    read_conversation,
    read_file,
    store_transcript,
    write_transcript,
)
from palaver.transcripts.import_export import UnknownFormat
from palaver.transcripts.openai import from_openai
from palaver.transcripts.transcript import linear_transcript
from tests.store.factories import SETTINGS, add_message, add_reply, new_conversation
from tests.store.test_messages import EVERY_PART

CALL = ToolCall("c1", "look", '{"at": "東京"}')
TALK = (
    user("Hello"),
    assistant("Hi", thinking="greet"),
    Message(Role.USER, (Text("see"), Image("image/png", b"\x89PNG"))),
    assistant("", calls=(CALL, ToolCall("c2", "look", "{}"))),
    Message(Role.TOOL, (ToolResult("c1", "tower", "look"), ToolResult("c2", "", "look"))),
    assistant("A tower\n\n## User\n\\## User\n<details>"),
)


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def messages(text: str) -> list[Message]:
    (found,) = read_file(text).transcripts
    return [entry.message for entry in found.main_branch()]


def test_training_lines_contain_every_part() -> None:
    transcript = linear_transcript([Message(Role.SYSTEM, (Text("be kind"),)), *TALK])
    (line,) = lines(write_transcript(transcript, TranscriptFormat.JSONL))
    first, _, reply, picture, calls, result, *_ = line["messages"]
    assert first == {"role": "system", "content": [{"type": "text", "text": "be kind"}]}
    assert reply == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Hi"}],
        "reasoning_content": "greet",
    }
    assert [part["type"] for part in picture["content"]] == ["text", "image_url"]
    assert calls["tool_calls"][0]["function"] == {"name": "look", "arguments": CALL.arguments}
    tower = [{"type": "text", "text": "tower"}]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": tower, "name": "look"}
    assert tuple(messages(write_transcript(transcript, TranscriptFormat.JSONL))) == TALK


def spoken(line: Any) -> list[tuple[str, str, int]]:
    """Each message's role, text and weight."""
    return [
        (one["role"], "".join(part["text"] for part in one["content"]), one.get("weight", 1))
        for one in line["messages"]
    ]


def test_training_lines_leave_no_turn_out_and_join_the_users_messages() -> None:
    entries = (
        TranscriptEntry("1", None, user("a")),
        TranscriptEntry("2", "1", user("b")),
        TranscriptEntry("3", "2", assistant("whole")),
        TranscriptEntry("4", "2", assistant("cut"), complete=False),
        TranscriptEntry("5", "3", user("unanswered")),
        TranscriptEntry("6", "2", assistant("other")),
    )
    transcript = Transcript(entries, head="3")
    (line,) = lines(write_transcript(transcript, TranscriptFormat.JSONL))
    asked = ("user", "a\n\nb", 1)
    assert spoken(line) == [asked, ("assistant", "whole", 1), ("user", "unanswered", 1)]
    every = lines(write_transcript(transcript, TranscriptFormat.BRANCHES))
    assert [spoken(line) for line in every] == [
        [asked, ("assistant", "cut", 0)],
        [asked, ("assistant", "whole", 1), ("user", "unanswered", 1)],
        [asked, ("assistant", "other", 1)],
    ]


def test_training_lines_continue_after_a_stopped_reply() -> None:
    entries = (
        TranscriptEntry("1", None, user("a")),
        TranscriptEntry("2", "1", assistant("cut"), complete=False),
        TranscriptEntry("3", "2", user("b")),
        TranscriptEntry("4", "3", Message(Role.ASSISTANT, ()), complete=False),
        TranscriptEntry("5", "4", user("c")),
        TranscriptEntry("6", "5", assistant("whole")),
    )
    (line,) = lines(write_transcript(Transcript(entries, head="6"), TranscriptFormat.JSONL))
    assert spoken(line) == [("user", "a", 1), ("assistant", "cut", 0), ("user", "b\n\nc", 1), ("assistant", "whole", 1)]


def test_sharegpt_describes_media() -> None:
    picture = Message(Role.USER, (Text("What is this?"), Image("image/png", b"12345")))
    (line,) = lines(write_transcript(linear_transcript([picture, assistant("A dot.")]), TranscriptFormat.SHAREGPT))
    assert line["conversations"][0]["value"] == "What is this?(image/png, 5 bytes)\n"


def test_a_whole_tree_round_trips(store: Store) -> None:
    made = new_conversation(store, title="T", system="S", tags=["x"], parameters={"seed": 1})
    root = store.messages.append(made.id, None, EVERY_PART)
    add_message(store, made.id, root.id, "one")
    lease = store.leases.open()
    add_reply(store, lease, made.id, root.id, "two")
    cut = store.replies.start(lease, made.id, root.id, SETTINGS)
    store.replies.finish(lease, cut.id, ReplyEnding(ReplyStatus.STOPPED, (Thinking("hm"),)))
    taken = read_conversation(store, made.id)
    (found,) = read_file(write_transcript(taken, TranscriptFormat.TREE)).transcripts
    assert found == taken
    other = store.users.ensure("other").id
    kept = store_transcript(store, other, found)
    assert kept.new
    assert not store_transcript(store, other, found).new, "the same file twice is one conversation"
    assert _shape(read_conversation(store, kept.conversation.id)) == _shape(taken)


def _shape(transcript: Transcript) -> list[Any]:
    places = {entry.id: place for place, entry in enumerate(transcript.entries)} | {None: None}
    tree = [(places[entry.parent], entry.message, entry.created_at) for entry in transcript.entries]
    return [tree, places[transcript.head], transcript.title, transcript.system, transcript.tags, transcript.parameters]


WORDS = st.text(st.sampled_from("ab \n\\#<>`*é東") | st.characters(codec="utf-8", exclude_characters="\r"), min_size=1)
PIECES = st.lists(st.sampled_from(["## User", "\\## User", "</details>", "x", "", "# T"]) | WORDS, min_size=1)


@settings(deadline=None)
@given(st.lists(st.tuples(PIECES.map("\n".join), PIECES.map("\n".join)), min_size=1, max_size=4))
def test_markdown_and_jsonl_keep_texts_unchanged(pairs: list[tuple[str, str]]) -> None:
    row = [message for text, thought in pairs for message in (user(text or "?"), assistant("ok", thinking=thought))]
    transcript = linear_transcript(row)
    assert messages(write_transcript(transcript, TranscriptFormat.MARKDOWN)) == row
    assert messages(write_transcript(transcript, TranscriptFormat.JSONL)) == row


PDF = base64.b64encode(b"%PDF-1.7").decode()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": [{"type": "image_url"}]}, "a part of the type 'image_url' has no URL"),
        ({"content": [{"type": "audio_url", "audio_url": {"url": None}}]}, "a part of the type 'audio_url' has no URL"),
        (
            {"content": [{"type": "image_url", "image_url": {"url": f"data:application/pdf;base64,{PDF}"}}]},
            "a file of the type 'application/pdf' is neither a picture nor sound nor a video",
        ),
        (
            {"content": [{"type": "file", "file": {"file_data": PDF}}]},
            "a file without a media type: a data URL that names it is needed",
        ),
        ({"content": [{"type": "image_url", "image_url": "data:image/svg+xml,<svg/>"}]}, "not in base64"),
        ({"content": [{"type": "image_url", "image_url": "https://a.b/c.png"}]}, "other addresses are not downloaded"),
        ({"content": "", "tool_calls": [{"id": "c1", "function": {}}]}, "a tool call has no name"),
        ({"content": "", "tool_calls": ["look"]}, "a tool call has no name"),
    ],
)
def test_a_message_that_is_not_read_is_skipped_with_its_reason(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_openai({"role": "user", **message})
    value = {"messages": [{"role": "user", **message}, {"role": "user", "content": "Hello"}]}
    report = read_file(json.dumps(value))
    assert [entry.message for entry in report.transcripts[0].main_branch()] == [user("Hello")]
    (skipped,) = report.skipped
    assert reason in skipped.reason


def test_a_data_url_may_have_parameters() -> None:
    url = f"data:image/png;name=a.png;base64,{base64.b64encode(b'PNG').decode()}"
    assert from_openai({"role": "user", "content": [{"type": "image_url", "image_url": url}]}).parts == (
        Image("image/png", b"PNG"),
    )


def test_markdown_reads_well() -> None:
    text = write_transcript(
        linear_transcript([user("Hello"), assistant("Hi", thinking="greet")], title="Greeting"),
        TranscriptFormat.MARKDOWN,
    )
    assert text == (
        "# Greeting\n\n## User\n\nHello\n\n## Assistant\n\n"
        "<details><summary>Thinking</summary>\n\ngreet\n\n</details>\n\nHi\n"
    )
    everything = write_transcript(linear_transcript([user("x"), EVERY_PART, *TALK]), TranscriptFormat.MARKDOWN)
    assert "Calls `look`:" in everything
    assert "*(image/png, 4 bytes)*" in everything


def test_sharegpt_round_trips() -> None:
    row = [user("Hello"), assistant("Hi", thinking="greet"), assistant("", calls=(CALL,)), user("x")]
    (line,) = lines(write_transcript(linear_transcript(row), TranscriptFormat.SHAREGPT))
    assert [turn["from"] for turn in line["conversations"]] == ["human", "gpt", "function_call", "human"]
    found = messages(json.dumps([line]))
    assert found[:2] == row[:2]
    assert found[2].tool_calls[0].name == "look"
    foreign = {"system": "S", "conversations": [{"from": "user", "value": "a"}, {"from": "alien", "value": "b"}, {}]}
    report = read_file(json.dumps(foreign))
    assert report.transcripts[0].system == "S"
    assert len(report.skipped) == 2


OPEN_WEBUI = [
    {
        "id": "chat",
        "title": "Trip",
        "meta": {"tags": ["travel"]},
        "chat": {
            "params": {"system": "be kind"},
            "history": {
                "currentId": "c",
                "messages": {
                    "c": {
                        "id": "c",
                        "parentId": "a",
                        "childrenIds": [],
                        "role": "assistant",
                        "content": '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 seconds'
                        "</summary>\n&gt; I &lt;think&gt;\n&gt; so\n</details>\nGo by train.",
                        "model": "m",
                        "timestamp": 1700000001,
                    },
                    "a": {
                        "id": "a",
                        "parentId": None,
                        "childrenIds": ["b", "c"],
                        "role": "user",
                        "content": "How?",
                        "timestamp": 1700000000,
                        "files": [
                            {"type": "image", "url": "data:image/png;base64," + base64.b64encode(b"1").decode()},
                            {"type": "image", "url": "https://example.org/x.png"},
                        ],
                    },
                    "b": {"id": "b", "parentId": "a", "role": "assistant", "content": "By bus.", "done": False},
                    "d": {"id": "d", "parentId": "gone", "role": "user", "content": "Hanging"},
                    "e": {"id": "e", "parentId": "a", "role": "alien", "content": ""},
                },
            },
        },
    },
    {"nonsense": 1},
]


def test_open_webui_is_read_with_its_branches() -> None:
    report = read_file(json.dumps(OPEN_WEBUI))
    (found,) = report.transcripts
    assert (found.title, found.system, found.tags) == ("Trip", "be kind", ("travel",))
    question, reply = found.main_branch()
    assert question.message.parts == (Image("image/png", b"1"), Text("How?"))
    assert reply.message.text == "Go by train."
    assert reply.message.thinking == "I <think>\nso"
    assert reply.created_at == datetime.fromtimestamp(1700000001, UTC)
    assert [entry.complete for entry in found.entries if entry.message.text == "By bus."] == [False]
    assert len(report.skipped) == 4


LLAMA_CPP = {
    "conv": {"id": "v", "name": "Maths", "lastModified": 1, "currNode": "3"},
    "messages": [
        {"id": "0", "convId": "v", "type": "root", "role": "system", "content": "", "parent": "-1", "children": ["1"]},
        {"id": "s", "type": "text", "role": "system", "content": "be exact", "parent": "0"},
        {"id": "1", "type": "text", "timestamp": 1700000000000, "role": "user", "content": "1+1?", "parent": "s"},
        {"id": "2", "type": "text", "role": "assistant", "content": "2", "parent": "1", "reasoningContent": "add"},
        {
            "id": "3",
            "type": "text",
            "role": "assistant",
            "content": "two",
            "parent": "1",
            "thinking": "spell",
            "toolCalls": json.dumps([{"id": "c", "function": {"name": "add", "arguments": "{}"}}]),
            "extra": [{"type": "TEXT", "name": "a.txt", "content": "hello"}, {"type": "MCP", "content": 1}],
        },
    ],
}


@pytest.mark.parametrize(
    "text", [json.dumps(LLAMA_CPP), json.dumps([LLAMA_CPP]), json.dumps(LLAMA_CPP) + "\n\nbroken\n"]
)
def test_llama_cpp_is_read_with_its_branches(text: str) -> None:
    report = read_file(text)
    (found,) = report.transcripts
    assert (found.title, found.system) == ("Maths", "be exact")
    question, reply = found.main_branch()
    assert question.message == user("1+1?")
    assert (reply.message.thinking, reply.message.tool_calls[0].name) == ("spell", "add")
    assert reply.message.text == "a.txt:\n\nhello\n\ntwo"
    assert found.entries[1].message == assistant("2", thinking="add")
    assert any("MCP" in one.reason for one in report.skipped)


@pytest.mark.parametrize("text", ["", "hello", "[]", "[1, 2]", '{"a": 1}', "null", '{"a": 1}\n{"b": 2}', "# Title"])
def test_an_unknown_format_is_refused(text: str) -> None:
    with pytest.raises(UnknownFormat):
        read_file(text)


def test_a_cycle_of_messages_is_cut() -> None:
    circle = {
        "history": {
            "messages": {
                "a": {"role": "user", "content": "1", "parentId": "b"},
                "b": {"role": "user", "content": "2", "parentId": "a"},
            }
        }
    }
    report = read_file(json.dumps(circle))
    assert len(report.transcripts[0].entries) == 2
    assert len(report.skipped) == 1
