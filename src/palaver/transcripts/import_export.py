"""A file of any known format, read; a conversation, written in one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, assert_never

from palaver.errors import RequestError
from palaver.store import Conversation, ReplyStatus, Store, StoredMessage
from palaver.store.messages import NewMessage
from palaver.store.records import MAX_NAME
from palaver.transcripts import jsonl, llama_cpp, markdown, open_webui, palaver_json, sharegpt
from palaver.transcripts.palaver_json import write
from palaver.transcripts.transcript import ReadResult, SkippedConversation, Transcript, TranscriptEntry


class TranscriptFormat(StrEnum):
    """What can be written."""

    TRAINING = "jsonl"
    """The head's branch, ready for training."""
    BRANCHES = "branches"
    """The same for every branch, a line each."""
    WHOLE = "tree"
    """Everything, to be read again."""
    MARKDOWN = "markdown"
    SHAREGPT = "sharegpt"


class UnknownFormat(RequestError):
    def __init__(self) -> None:
        super().__init__(
            "The file is no conversation that is known: JSONL with messages, ShareGPT, Markdown, "
            "or an export of Palaver's, of Open WebUI's or of llama.cpp's page."
        )


_KINDS = (palaver_json, open_webui, llama_cpp, sharegpt, jsonl)
"""The most particular first: a line with `conv` has `messages` too."""


def write_transcript(transcript: Transcript, format: TranscriptFormat) -> str:
    match format:
        case TranscriptFormat.TRAINING:
            return jsonl.write(transcript)
        case TranscriptFormat.BRANCHES:
            return jsonl.write(transcript, all_branches=True)
        case TranscriptFormat.WHOLE:
            return palaver_json.write(transcript)
        case TranscriptFormat.MARKDOWN:
            return markdown.write(transcript)
        case TranscriptFormat.SHAREGPT:
            return sharegpt.write(transcript)
        case _:
            assert_never(format)


def read_file(text: str) -> ReadResult:
    """Every conversation in the file, and what was left out; UnknownFormat where there is none to be seen."""
    text = text.removeprefix("\ufeff")
    values = list(_values(text))
    if not any(isinstance(value, dict) for value in values):
        if markdown.recognised(text):
            return markdown.read(text)
        raise UnknownFormat
    transcripts: list[Transcript] = []
    skipped: list[SkippedConversation] = []
    for number, value in enumerate(values, 1):
        found = _read_value(number, value)
        transcripts += [one for one in found.transcripts if one.entries]
        skipped += found.skipped
    if not transcripts and all(one.why == _UNKNOWN for one in skipped):
        raise UnknownFormat
    return ReadResult(tuple(transcripts), tuple(skipped))


_UNKNOWN = "it is no conversation of a known kind"


def _read_value(number: int, value: Any) -> ReadResult:
    where = f"conversation {number}"
    for kind in _KINDS:
        if kind.recognised(value):
            try:
                found = kind.read_line(value)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                return ReadResult((), (SkippedConversation(where, f"{type(error).__name__}: {error}"),))
            return ReadResult(
                found.transcripts, tuple(SkippedConversation(f"{where}, {one.what}", one.why) for one in found.skipped)
            )
    return ReadResult((), (SkippedConversation(where, _UNKNOWN),))


def _values(text: str) -> Iterator[Any]:
    """One JSON value, a list of them, or one a line."""
    try:
        value = json.loads(text)
    except ValueError:
        yield from _lines(text)
    else:
        yield from value if isinstance(value, list) else (value,)


def _lines(text: str) -> Iterator[Any]:
    for line in text.split("\n"):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield None


@dataclass(frozen=True, slots=True)
class ImportResult:
    conversation: Conversation
    new: bool
    """False where the same transcript had been put in before."""


def read_conversation(store: Store, conversation_id: str) -> Transcript:
    """The conversation as it is now, all branches."""
    conversation = store.conversations.get(conversation_id)
    return Transcript(
        tuple(_entry(store, stored) for stored in store.messages.everything(conversation_id)),
        title=conversation.title,
        system=conversation.system,
        tags=conversation.tags,
        parameters=conversation.parameters,
        head=conversation.head_id,
    )


def store_transcript(store: Store, owner: str, transcript: Transcript) -> ImportResult:
    """Puts the transcript into the store as a conversation of its own; the same one twice is kept once."""
    key = "import " + hashlib.sha256(write(transcript).encode()).hexdigest()
    conversation = store.conversations.create(
        owner,
        title=transcript.title,
        system=transcript.system,
        parameters=transcript.parameters,
        tags=(tag[:MAX_NAME] for tag in transcript.tags),
        key=key,
    )
    new = store.messages.append_all(conversation.id, [_arrival(entry) for entry in transcript.entries], transcript.head)
    return ImportResult(store.conversations.get(conversation.id, deleted=True), new)


def _entry(store: Store, stored: StoredMessage) -> TranscriptEntry:
    reply = stored.reply
    return TranscriptEntry(
        stored.id,
        stored.parent_id,
        store.messages.full(stored),
        stored.created_at,
        reply.settings.model if reply else "",
        reply is None or reply.status is ReplyStatus.DONE,
    )


def _arrival(entry: TranscriptEntry) -> NewMessage:
    return NewMessage(entry.id, entry.parent, entry.message, entry.created_at)
