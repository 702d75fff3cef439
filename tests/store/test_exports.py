"""Exports of ChatGPT and Claude: trees, thoughts and tool calls are kept, and what is not imported is reported."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from datetime import UTC, datetime

import pytest

from palaver.messages import Image, Role, Text, Thinking, ToolCall, ToolResult
from palaver.store import Store
from palaver.transcripts import ReadResult, Transcript, read_file
from palaver.transcripts.archive import BadArchive
from palaver.transcripts.import_export import NotUtf8, UnknownFormat, store_transcript
from tests.store.exports import CHATGPT, CLAUDE, PNG, archive, node


def read(value: object) -> tuple[Transcript, list[str]]:
    result = read_file(json.dumps(value))
    (found,) = result.transcripts
    return found, reasons(result)


def reasons(result: ReadResult) -> list[str]:
    return [f"{one.item}: {one.reason}" for one in result.skipped]


def test_chatgpt_is_read_with_its_branches_and_thoughts() -> None:
    found, skipped = read(CHATGPT)
    assert (found.title, found.system, found.head) == ("Trip", "Be brief.", "a2")
    question, reply = found.main_branch()
    assert question.message.text == "How do I get there?"
    assert question.created_at == datetime.fromtimestamp(1700000000.5, UTC)
    assert reply.message.parts == (Thinking("Plan\nthe bus stops here"), Text("By bus."))
    other = found.branch("a1")[-1]
    assert (other.message.thinking, other.message.text, other.model) == ("Plan\nby rail or road", "By train.", "m")
    call, result, answer = found.branch("a3")[-3:]
    assert call.message.parts == (ToolCall("c", "python", '{"input": "1 + 1"}'),)
    assert result.message.parts == (ToolResult("c", "2", "python"),)
    assert answer.message.text == "Two."
    (stopped,) = (entry for entry in found.entries if entry.id == "z")
    assert (stopped.message.thinking, stopped.complete) == ("Plan\nhm", False)
    assert len(skipped) == 4
    for part, reason in (
        ("file of message q2", "import the whole ZIP archive"),
        ("attachment of message q2", "'plan.pdf' is not in the export"),
        ("message x", "the result of a tool without a call"),
        ("message y", "'alien'"),
    ):
        assert any(part in one and reason in one for one in skipped), (part, skipped)


def test_an_archive_of_chatgpt_has_the_pictures() -> None:
    result = read_file(archive(CHATGPT, **{"file_1a-photo.png": PNG, "file_1ab.png": b"other"}))
    (found,) = result.transcripts
    (picture, text) = found.branch("q2")[-1].message.parts
    assert picture == Image("image/png", PNG, "file-1a-photo.png")
    assert text == Text("What is it?")
    assert len(result.skipped) == 3
    program = read_file(archive(CHATGPT, **{"file_1a.exe": b"MZ"}))
    assert any("neither a picture" in one for one in reasons(program))


def test_parts_of_one_reply_are_joined_and_branches_within_it_kept() -> None:
    mapping = [
        node("q", None, "user", "Hi"),
        node("a", "q", "assistant", "One."),
        node("b", "a", "assistant", "Two."),
        node("e", "a", "assistant", ""),
        node("c", "e", "assistant", "Three."),
    ]
    found, skipped = read({"mapping": {one["id"]: one for one in mapping}, "current_node": "gone"})
    assert [found.branch(leaf)[-1].message.text for leaf in found.leaves()] == ["One.\n\nTwo.", "One.\n\nThree."]
    assert not skipped
    circle = {"a": node("a", "b", "user", "1"), "b": node("b", "a", "user", "2"), "c": None}
    found, skipped = read({"mapping": circle})
    assert len(found.entries) == 2
    assert len(skipped) == 2


def test_claude_is_read_with_its_branches_thoughts_and_calls() -> None:
    found, skipped = read(CLAUDE)
    assert found.title == "Sums"
    question, call, result, reply, thanks = found.branch("4")
    assert question.message.parts == (Text("What is 17 * 23?"), Text("\n\nFile a.txt:\n\nnotes\n\n"))
    assert question.created_at == datetime(2025, 1, 2, 3, 4, 5, 678000, UTC)
    assert call.message.parts == (
        Thinking("a product"),
        Text("Let me see."),
        ToolCall("u", "calculate", '{"of": "17 * 23"}'),
    )
    assert (result.message.role, result.message.parts) == (Role.TOOL, (ToolResult("u", "391"),))
    assert (reply.message.text, thanks.message.text) == ("It's 391.", "Thanks")
    assert [entry.message.text for entry in found.branch("3")][1:] == ["About 400."]
    assert len(skipped) == 3
    for text in ("b.png is not in the export", "hologram", "'alien'"):
        assert any(text in one for one in skipped)


def test_messages_of_claude_without_parents_follow_each_other() -> None:
    plain = [{"sender": "human", "text": "Hi"}, {"sender": "assistant", "text": ""}, {"sender": "human", "text": "?"}]
    found, skipped = read({"name": None, "chat_messages": plain})
    assert [entry.message.text for entry in found.main_branch()] == ["Hi", "?"]
    assert skipped == ["conversation 1, message 2: it is empty"]
    found, skipped = read({"chat_messages": [{"uuid": "1", "sender": "human", "text": "Hi"}] * 2})
    assert len(found.entries) == len(skipped) == 1


def test_what_whole_exports_have_beside_messages() -> None:
    """Null parts, marks of citations, calls without ids, and parts of unknown kinds that have text."""
    words = "It rains. \ue200cite\ue202turn0search3\ue201\n\nTake a coat."
    answer = {"content_type": "text", "parts": [None, words, ""]}
    mapping = [
        node("q", None, "user", "Weather in 東京?"),
        node("c", "q", "assistant", {"content_type": "code", "text": '{"q": "x"}'}, recipient="web.run"),
        node("r", "c", "tool", {"content_type": "text", "parts": [None, ""]}, name="web.run"),
        node("a", "r", "assistant", answer),
    ]
    found, skipped = read({"title": None, "mapping": {one["id"]: one for one in reversed(mapping)}})
    assert not skipped
    assert [entry.message.text for entry in found.main_branch()][-1] == "It rains.\n\nTake a coat."
    blocks = [
        {"type": "tool_use", "id": None, "name": "search", "input": {}},
        {"type": "tool_use", "id": None, "name": "draw", "input": None},
        {"type": "tool_result", "tool_use_id": None, "name": "search", "content": [{"type": "text", "text": "1"}]},
        {"type": "tool_result", "tool_use_id": None, "name": "draw", "content": None},
        {"type": "voice_note", "title": "", "text": "spoken"},
    ]
    found, skipped = read({"chat_messages": [{"uuid": "m", "sender": "assistant", "content": blocks}]})
    calls, results, spoken = (entry.message for entry in found.main_branch())
    assert [call.id for call in calls.tool_calls] == [one.call_id for one in results.tool_results] == ["m-1", "m-2"]
    assert spoken.text == "spoken"
    assert not skipped


def test_conversations_keep_their_dates(store: Store, owner: str) -> None:
    (found,) = read_file(json.dumps(CLAUDE)).transcripts
    imported = store_transcript(store, owner, found).conversation
    assert imported.created_at == imported.updated_at == datetime(2025, 1, 2, 3, 4, 5, 678000, UTC)
    future = [{"sender": "human", "text": "Hi", "created_at": "2999-01-01T00:00:00Z"}]
    (found,) = read_file(json.dumps({"chat_messages": future})).transcripts
    assert store_transcript(store, owner, found).conversation.updated_at <= datetime.now(UTC)


def packed(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr(name, data)
    return file.getvalue()


def claims(data: bytes, size: int) -> bytes:
    """The archive with another unpacked size of its one file in its directory."""
    place = data.rindex(b"PK\x01\x02") + 24
    return data[:place] + struct.pack("<I", size) + data[place + 4 :]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed("conversations.json", b" " * (8 << 20)), "more than 200 times its size"),
        (claims(packed("conversations.json", b"[]"), 0xFFFFFFF0), "larger than 1,024 MB"),
        (claims(packed("conversations.json", b"[]"), 1), "damaged"),
        (packed("chat.html", b"hello"), "contains no conversations.json"),
        (archive(CLAUDE)[:-30], "damaged or incomplete"),
    ],
)
def test_hostile_archives_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadArchive, match=reason):
        read_file(data)


@pytest.mark.parametrize("data", [b"[" * 1_000_000, b'{"mapping": {"a": ' + b"[" * 1_000_000])
def test_deeply_nested_files_are_refused(data: bytes) -> None:
    with pytest.raises(UnknownFormat):
        read_file(data)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(NotUtf8, match="neither text in UTF-8 nor a ZIP archive"):
        read_file(b"\xff\xfe")


@pytest.mark.parametrize(
    "value",
    [
        {"mapping": {"a": {"message": {"author": 1}}}},
        {"mapping": {"a": node("a", None, "user", {"parts": [{"asset_pointer": "x"}, 5]})}},
        {"mapping": {"a": node("a", None, "user", "Hi", create_time=1e300)}},
        {"chat_messages": [1, None, {}, {"sender": "human", "content": [3], "created_at": "yesterday"}]},
        {"chat_messages": [{"sender": "human", "text": "x", "attachments": [1]}]},
    ],
)
def test_damaged_conversations_are_reported(value: object) -> None:
    result = read_file(json.dumps([value]))
    assert result.skipped or result.transcripts
