"""A data folder and exports of an earlier version (`tests/store/old`), read with this one."""

from __future__ import annotations

import asyncio
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.parameters import options_from_json
from palaver.messages import Text, Thinking
from palaver.store import Conversation, ReplyStatus, Store, open_store
from palaver.store.search import SearchHit
from palaver.transcripts import (
    ReadResult,
    Transcript,
    TranscriptFormat,
    read_conversation,
    read_file,
    store_transcript,
    write_transcript,
)
from tests.chat.scripted_service import OTHER, WAVE, read_entries, run_service
from tests.store.old.make import CLIENTS, KEYS, SEARCHES, plain

FOLDER = Path(__file__).parent / "old"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
EXPORTS = sorted((FOLDER / "exports").iterdir())
TREES = [path for path in EXPORTS if path.name.endswith(".tree.json") and EXPECTED["read"][path.name]]
NEW_SAMPLING = {
    "typical_p": 1.0,
    "top_a": 0.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "steps": None,
    "block_length": None,
    "remasking": "confidence",
}
"""Sampling parameters that old replies do not have: all of them are off."""
NEW_SETTINGS: dict[str, Any] = {"fingerprints": [], "answer_at": None}
"""The settings of a reply that the earlier version did not have, and their values for its replies."""
NEW_OPTIONS: dict[str, Any] = {"media": {}, "max_prompt_tokens": None}
"""The options of a prompt that the earlier version did not have."""
NEW_MEDIA: dict[str, Any] = {"name": "", "width": 0, "height": 0, "seconds": 0.0}
"""The fields of media that the earlier version did not have."""
MEDIA_NAME = re.compile(r"\((?:image|audio|video)/\w+, \d+ bytes\)\\n")
"""The name of a medium in the JSON of a ShareGPT export."""


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    with tarfile.open(FOLDER / "data.tar.xz") as archive:
        archive.extractall(tmp_path / "data", filter="data")
    return tmp_path / "data"


@pytest.fixture
def old_store(old_folder: Path) -> Iterator[Store]:
    with open_store(old_folder) as store:
        yield store


def conversation_ids(store: Store) -> tuple[str, ...]:
    return tuple(id for user in store.users.all() for id in store.conversations.ids(user.id))


def parts_in_old_form(message: dict[str, Any]) -> dict[str, Any]:
    for part in message["parts"]:
        if "media_type" in part:
            assert {name: part.pop(name) for name in NEW_MEDIA} == NEW_MEDIA
    return message


def messages_in_old_form(store: Store, id: str) -> list[Any]:
    found: list[Any] = plain(store.messages.all(id))
    for settings in (message["reply"]["settings"] for message in found if message["reply"]):
        assert {name: settings.pop(name) for name in NEW_SETTINGS} == NEW_SETTINGS
        assert {name: settings["sampling"].pop(name) for name in NEW_SAMPLING} == NEW_SAMPLING
    return [parts_in_old_form(message) for message in found]


def options_in_old_form(stored: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = plain(options_from_json(stored))
    assert {name: options.pop(name) for name in NEW_OPTIONS} == NEW_OPTIONS
    return options


def transcripts_in_old_form(result: ReadResult) -> dict[str, Any]:
    skipped = [{"what": one.item, "why": one.reason} for one in result.skipped]
    return {"transcripts": [_in_old_form(transcript) for transcript in result.transcripts], "skipped": skipped}


def _in_old_form(transcript: Transcript) -> dict[str, Any]:
    found: dict[str, Any] = plain(transcript)
    for entry in found["entries"]:
        entry["whole"] = entry.pop("complete")
        parts_in_old_form(entry["message"])
    return found


def conversation_in_old_form(conversation: Conversation) -> dict[str, Any]:
    found: dict[str, Any] = plain(conversation)
    assert found.pop("pinned") is False
    return found


def hit_in_old_form(hit: SearchHit) -> Any:
    """Without what was added since."""
    form = plain(hit)
    assert form.pop("in_thought") is False
    return form


def test_users_keys_presets_tags_and_lists_are_as_before(old_store: Store) -> None:
    store, users = old_store, old_store.users.all()
    assert plain(users) == EXPECTED["users"]
    assert plain(store.keys.all()) == EXPECTED["keys"]
    texts = (store.folder / KEYS).read_text().split()
    assert [plain(store.keys.find(text)) for text in texts] == EXPECTED["found_keys"]
    for user in users:
        assert plain(store.presets.all(user.id)) == EXPECTED["presets"][user.name]
        assert plain(store.conversations.tags(user.id)) == EXPECTED["tags"][user.name]
        listed, deleted = store.conversations.list(user.id), store.conversations.list(user.id, deleted=True)
        assert list(map(conversation_in_old_form, listed)) == EXPECTED["listed"][user.name]
        assert list(map(conversation_in_old_form, deleted)) == EXPECTED["deleted"][user.name]
        found = {query: list(map(hit_in_old_form, store.search.find(user.id, query))) for query in SEARCHES}
        assert found == EXPECTED["searches"][user.name]


def test_every_conversation_is_as_before(old_store: Store) -> None:
    store = old_store
    assert set(conversation_ids(store)) == set(EXPECTED["conversations"])
    for id, expected in EXPECTED["conversations"].items():
        messages = store.messages.all(id)
        replies = [message for message in messages if message.reply]
        assert conversation_in_old_form(store.conversations.get(id)) == expected["conversation"]
        assert plain(store.messages.nodes(id)) == expected["nodes"]
        assert messages_in_old_form(store, id) == expected["messages"]
        contents = [parts_in_old_form(plain(store.messages.load(message))) for message in messages]
        assert contents == expected["contents"]
        assert {one.id: plain(store.replies.tokens(one.id)) for one in replies} == expected["tokens"]
        options = {one.id: options_in_old_form(one.reply.settings.options) for one in replies if one.reply}
        assert options == expected["options"]
        assert store.messages.newest_leaf(id) == expected["newest_leaf"]
        assert {client: plain(store.cursors.get(id, client)) for client in CLIENTS} == expected["cursors"]


def test_undo_and_redo_go_on_where_they_were(old_store: Store) -> None:
    id = next(id for id in conversation_ids(old_store) if old_store.cursors.get(id, "page-1").can_redo)
    before = old_store.cursors.get(id, "page-1")
    undone = old_store.cursors.undo(id, "page-1")
    assert undone.message_id != before.message_id
    assert old_store.cursors.redo(id, "page-1") == before


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.name)
def test_exports_are_as_before(old_store: Store, path: Path) -> None:
    id, format, _ = path.name.split(".")
    before = path.read_bytes().decode()
    text = write_transcript(read_conversation(old_store, id), TranscriptFormat(format))
    if format in (TranscriptFormat.JSONL, TranscriptFormat.BRANCHES):
        _check_training_export(before, text)
    elif format == TranscriptFormat.SHAREGPT:  # media are named since
        assert MEDIA_NAME.sub("", text) == before
    else:
        assert text == before


def _check_training_export(before: str, text: str) -> None:
    """Since then contents are lists of parts, and turns without a complete reply follow or stand on their own lines."""
    lines = [[_old_content(message) for message in json.loads(line)["messages"]] for line in text.splitlines()]
    for line in before.splitlines():
        messages = json.loads(line)["messages"]
        found = next(number for number, one in enumerate(lines) if one[: len(messages)] == messages)
        del lines[: found + 1]


def _old_content(message: dict[str, Any]) -> dict[str, Any]:
    match message["content"]:
        case [{"type": "text", "text": text}]:
            return {**message, "content": text}
        case _:
            return message


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.name)
def test_old_exports_are_read_as_before(path: Path) -> None:
    expected = EXPECTED["read"][path.name]
    if expected is not None:  # else the earlier version could not read it
        assert transcripts_in_old_form(read_file(path.read_bytes().decode())) == expected


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.name)
def test_an_imported_tree_is_the_same_conversation(old_store: Store, path: Path, tmp_path: Path) -> None:
    text = path.read_bytes().decode()
    with open_store(tmp_path / "other") as store:
        (transcript,) = read_file(text).transcripts
        imported = store_transcript(store, store.users.ensure().id, transcript).conversation
        original = read_conversation(old_store, path.name.partition(".")[0])
        copy = read_conversation(store, imported.id)
    places = {entry.id: number for number, entry in enumerate(original.entries)}
    copied_places = {entry.id: number for number, entry in enumerate(copy.entries)}
    for entry, copied in zip(original.entries, copy.entries, strict=True):
        assert (copied.message, copied.created_at) == (entry.message, entry.created_at)
        assert copied_places.get(copied.parent or "") == places.get(entry.parent or "")
    assert (copy.title, copy.system, copy.tags) == (original.title, original.system, original.tags)
    assert copy.parameters == original.parameters
    assert copied_places.get(copy.head or "") == places.get(original.head or "")


def test_an_import_of_the_earlier_version_is_recognized(old_store: Store) -> None:
    """The idempotency key of an import is a digest of the tree that is written for it."""
    text = '{"conversations": [{"from": "human", "value": "Imported?"}, {"from": "gpt", "value": "Imported."}]}'
    (transcript,) = read_file(text).transcripts
    result = store_transcript(old_store, old_store.users.ensure().id, transcript)
    assert not result.new
    assert result.conversation.id in EXPECTED["conversations"]


@pytest.mark.parametrize("resume", [True, False])
async def test_the_reply_that_kill_9_left_running_is_recovered(old_folder: Path, resume: bool) -> None:
    store = await asyncio.to_thread(open_store, old_folder)
    try:
        async with run_service(store, resume=resume) as stage:
            id, before = _running_reply()
            await stage.service.recovered.wait()
            if not resume:
                interrupted = await stage.chat.message(id)
                assert interrupted.reply is not None
                assert interrupted.reply.status is ReplyStatus.INTERRUPTED
                await stage.chat.continue_reply(id)
            await read_entries(stage.chat, id)
            ended = await stage.chat.message(id)
            tokens = await stage.chat.tokens(id)
        assert ended.reply is not None
        assert ended.reply.status is ReplyStatus.DONE
        assert ended.parts == (Thinking("no"), Text("Another answer."))
        assert [token.token_id for token in tokens][: len(before)] == before
        assert [token.token_id for token in tokens] == OTHER
    finally:
        await asyncio.to_thread(store.close)


def _running_reply() -> tuple[str, list[int]]:
    """Its id and the tokens that were stored before the kill."""
    for conversation in EXPECTED["conversations"].values():
        for message in conversation["messages"]:
            if message["reply"] and message["reply"]["status"] == "running":
                return message["id"], [step["token_id"] for step in conversation["tokens"][message["id"]]]
    raise AssertionError("no reply was running")


async def test_a_reply_that_was_stopped_goes_on(old_folder: Path) -> None:
    store = await asyncio.to_thread(open_store, old_folder)
    try:
        async with run_service(store) as stage:
            await stage.service.recovered.wait()
            (turns,) = [one for one in await stage.chat.conversations() if one.title == "Turns"]
            path = await stage.chat.path(turns.head_id or "")
            (stopped,) = [one for one in path if one.reply and one.reply.status is ReplyStatus.STOPPED]
            before = [token.token_id for token in await stage.chat.tokens(stopped.id)]
            sibling = await stage.chat.continue_reply(stopped.id)
            await read_entries(stage.chat, sibling.id)
            tokens = [token.token_id for token in await stage.chat.tokens(sibling.id)]
        assert before
        assert tokens[: len(before)] == before
        assert tokens == WAVE
    finally:
        await asyncio.to_thread(store.close)
