"""Reads files of any supported format, writes transcripts in one, and moves transcripts into and out of the store."""

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
from palaver.transcripts import chatgpt, claude, jsonl, llama_cpp, markdown, open_webui, palaver_json, sharegpt
from palaver.transcripts.archive import MAX_TEXT_BYTES, ZIP_START, ExportFiles, open_export
from palaver.transcripts.transcript import ReadResult, SkippedConversation, Transcript, TranscriptEntry


class TranscriptFormat(StrEnum):
    """What can be written."""

    JSONL = "jsonl"
    """The main branch, ready for training."""
    BRANCHES = "branches"
    """Every branch, ready for training, one line each."""
    TREE = "tree"
    """The whole tree without loss, for import."""
    MARKDOWN = "markdown"
    SHAREGPT = "sharegpt"


class UnknownFormat(RequestError):
    def __init__(self) -> None:
        super().__init__(
            "Can't read this file. Supported: JSONL with messages, ShareGPT, Markdown, and exports of Palaver, "
            "ChatGPT, Claude, Open WebUI and llama.cpp's page."
        )


_UNKNOWN_VALUE = "not a conversation in a supported format"
_READERS = (palaver_json, open_webui, llama_cpp, chatgpt, claude, sharegpt, jsonl)
"""The most specific first: an object with `conv` has `messages` too."""


def write_transcript(transcript: Transcript, format: TranscriptFormat) -> str:
    match format:
        case TranscriptFormat.JSONL:
            return jsonl.write(transcript)
        case TranscriptFormat.BRANCHES:
            return jsonl.write(transcript, all_branches=True)
        case TranscriptFormat.TREE:
            return palaver_json.write(transcript)
        case TranscriptFormat.MARKDOWN:
            return markdown.write(transcript)
        case TranscriptFormat.SHAREGPT:
            return sharegpt.write(transcript)
        case _:
            assert_never(format)


class NotUtf8(RequestError):
    def __init__(self, place: int) -> None:
        super().__init__(f"The file is neither text in UTF-8 nor a ZIP archive: byte {place} can't be read.")


def read_file(file: bytes | str, max_unpacked: int = MAX_TEXT_BYTES) -> ReadResult:
    """Detects the format and reads every conversation. Raises UnknownFormat if there is none, or BadArchive.

    `max_unpacked`: the bytes that the conversations of a ZIP archive may have.
    """
    texts: tuple[bytes | str, ...]
    if isinstance(file, bytes) and file.startswith(ZIP_START):
        texts, files = open_export(file, max_unpacked)
    else:
        texts, files = (file,), ExportFiles()
    found = [_read_text(text if isinstance(text, str) else _decode(text), files) for text in texts]
    return ReadResult(
        tuple(one for result in found for one in result.transcripts),
        tuple(one for result in found for one in result.skipped),
    )


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NotUtf8(error.start) from None


def _read_text(text: str, files: ExportFiles) -> ReadResult:
    text = text.removeprefix("\ufeff")
    values = list(_json_values(text))
    if not any(isinstance(value, dict) for value in values):
        if markdown.matches(text):
            return markdown.read(text)
        raise UnknownFormat
    transcripts: list[Transcript] = []
    skipped: list[SkippedConversation] = []
    for number, value in enumerate(values, 1):
        found = _read_value(number, value, files)
        transcripts += [one for one in found.transcripts if one.entries]
        skipped += found.skipped
    if not transcripts and all(one.reason == _UNKNOWN_VALUE for one in skipped):
        raise UnknownFormat
    return ReadResult(tuple(transcripts), tuple(skipped))


def _read_value(number: int, value: Any, files: ExportFiles) -> ReadResult:
    location = f"conversation {number}"
    for reader in _READERS:
        if reader.matches(value):
            try:
                found = chatgpt.parse(value, files) if reader is chatgpt else reader.parse(value)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                return ReadResult((), (SkippedConversation(location, f"{type(error).__name__}: {error}"),))
            return ReadResult(
                found.transcripts,
                tuple(SkippedConversation(f"{location}, {one.item}", one.reason) for one in found.skipped),
            )
    return ReadResult((), (SkippedConversation(location, _UNKNOWN_VALUE),))


def _json_values(text: str) -> Iterator[Any]:
    """The values of a JSON document, a JSON list, or JSON lines."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise UnknownFormat from None
    except ValueError:
        yield from _json_lines(text)
    else:
        yield from value if isinstance(value, list) else (value,)


def _json_lines(text: str) -> Iterator[Any]:
    for line in text.split("\n"):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


@dataclass(frozen=True, slots=True)
class ImportResult:
    conversation: Conversation
    new: bool
    """False if the same transcript was imported before."""


def read_conversation(store: Store, conversation_id: str) -> Transcript:
    """The transcript of a stored conversation, with all branches."""
    conversation = store.conversations.get(conversation_id)
    return Transcript(
        tuple(_entry(store, stored) for stored in store.messages.all(conversation_id)),
        title=conversation.title,
        system=conversation.system,
        tags=conversation.tags,
        parameters=conversation.parameters,
        head=conversation.head_id,
    )


def store_transcript(store: Store, owner: str, transcript: Transcript) -> ImportResult:
    """Imports the transcript as a new conversation. Importing the same one again changes nothing."""
    key = "import " + hashlib.sha256(palaver_json.write(transcript).encode()).hexdigest()
    conversation = store.conversations.create(
        owner,
        title=transcript.title,
        system=transcript.system,
        parameters=transcript.parameters,
        tags=(tag[:MAX_NAME] for tag in transcript.tags),
        key=key,
    )
    new = store.messages.append_all(
        conversation.id, [_new_message(entry) for entry in transcript.entries], transcript.head
    )
    return ImportResult(store.conversations.get(conversation.id, deleted=True), new)


def _entry(store: Store, stored: StoredMessage) -> TranscriptEntry:
    reply = stored.reply
    return TranscriptEntry(
        stored.id,
        stored.parent_id,
        store.messages.load(stored),
        stored.created_at,
        reply.settings.model if reply else "",
        reply is None or reply.status is ReplyStatus.DONE,
    )


def _new_message(entry: TranscriptEntry) -> NewMessage:
    return NewMessage(entry.id, entry.parent, entry.message, entry.created_at)
