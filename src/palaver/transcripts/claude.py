"""Conversations exported from Claude: `chat_messages`, which form a tree where they name their parents.

One of its messages may contain tool calls, their results and more text. It becomes several messages here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from palaver.messages import Message, Part, Role, Text, Thinking, ToolCall, ToolResult
from palaver.transcripts.transcript import (
    ReadResult,
    SkippedConversation,
    Transcript,
    TranscriptEntry,
    parse_time,
    sort_parents_first,
)

_ROLES = {"human": Role.USER, "user": Role.USER, "assistant": Role.ASSISTANT}
_PARENT = "parent_message_uuid"
_ROOT = "00000000-0000-4000-8000-000000000000"
_WITHOUT_CONTENT = ("token_budget", "flag")


def matches(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("chat_messages"), list)


def parse(value: Mapping[str, Any]) -> ReadResult:
    skipped: list[SkippedConversation] = []
    entries: list[TranscriptEntry] = []
    parents: dict[str, str | None] = {}
    ends: dict[str, str] = {}
    """The last of the messages that each message became, by its id."""
    last: str | None = None
    for number, message in enumerate(value["chat_messages"], 1):
        try:
            id = str(message.get("uuid") or number)
            if id in parents:
                raise ValueError(f"there are two messages {id}")
            parents[id] = _parent(message, last)
            pieces = list(_pieces(id, message, skipped))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(SkippedConversation(f"message {number}", str(error)))
            continue
        for place, piece in enumerate(pieces):
            piece_id = f"{id}/{place}" if place else id
            created_at = parse_time(message.get("created_at"))
            complete = not message.get("truncated")
            entries.append(TranscriptEntry(piece_id, ends.get(id), piece, created_at, complete=complete))
            ends[id] = piece_id
        last = id
    ordered, orphans = sort_parents_first(
        replace(entry, parent=_end_of(parents[entry.id], parents, ends)) if entry.id in parents else entry
        for entry in entries
    )
    head = ends.get(str(value.get("current_leaf_message_uuid")))
    return ReadResult((Transcript(ordered, title=str(value.get("name") or ""), head=head),), (*skipped, *orphans))


def _parent(message: Mapping[str, Any], last: str | None) -> str | None:
    """The message before it in files whose messages name no parents."""
    if _PARENT not in message:
        return last
    parent = message[_PARENT]
    return None if parent in (None, "", _ROOT) else str(parent)


def _end_of(id: str | None, parents: Mapping[str, str | None], ends: Mapping[str, str]) -> str | None:
    """The last of the messages that a message became; of one that became none, that of the nearest above it."""
    seen: set[str] = set()
    while id is not None and id not in ends and id in parents and id not in seen:
        seen.add(id)
        id = parents[id]
    return ends.get(id, id) if id is not None else None


def _pieces(id: str, message: Mapping[str, Any], skipped: list[SkippedConversation]) -> Iterator[Message]:
    """The message, divided where results of tools begin and end. Calls and their results stay together."""
    role = _ROLES.get(str(message.get("sender")))
    if role is None:
        raise ValueError(f"unknown sender {message.get('sender')!r}")
    parts: list[Part] = []
    for part in _parts(id, message, skipped):
        is_result = isinstance(part, ToolResult)
        if parts and is_result != isinstance(parts[-1], ToolResult):
            yield _message(role, parts)
            parts = []
        parts.append(part)
    if parts:
        yield _message(role, parts)
    elif not message.get("files"):  # those are reported
        skipped.append(SkippedConversation(f"message {id}", "it is empty"))


def _message(role: Role, parts: list[Part]) -> Message:
    return Message(Role.TOOL if isinstance(parts[0], ToolResult) else role, tuple(parts))


def _parts(id: str, message: Mapping[str, Any], skipped: list[SkippedConversation]) -> Iterator[Part]:
    attached = message.get("attachments") or ()
    names = {one.get("file_name") for one in attached}
    files: list[Text] = []
    for one in attached:
        if text := one.get("extracted_content"):
            files.append(Text(f"\n\nFile {one.get('file_name') or 'file'}:\n\n{text}\n\n"))
        else:
            skipped.append(_missing_file(id, one))
    skipped += [_missing_file(id, one) for one in message.get("files") or () if one.get("file_name") not in names]
    content = message.get("content")
    if not content and (text := message.get("text")):
        yield Text(str(text))
    calls = _CallIds(id)
    for block in content or ():
        try:
            yield from _block(block, calls)
        except (ValueError, KeyError, TypeError) as error:
            skipped.append(SkippedConversation(f"part of message {id}", str(error)))
    yield from files


def _missing_file(id: str, file: Mapping[str, Any]) -> SkippedConversation:
    return SkippedConversation(f"file of message {id}", f"{file.get('file_name') or 'a file'} is not in the export")


class _CallIds:
    """The ids of a message's tool calls. Where the export has none, results belong to calls in their order."""

    def __init__(self, message_id: str) -> None:
        self._message_id = message_id
        self._count = 0
        self._unanswered: deque[str] = deque()

    def call(self, id: Any) -> str:
        if id:
            return str(id)
        self._count += 1
        self._unanswered.append(f"{self._message_id}-{self._count}")
        return self._unanswered[-1]

    def result(self, id: Any) -> str:
        return str(id) if id else self._unanswered.popleft() if self._unanswered else ""


def _block(block: Any, calls: _CallIds) -> Iterator[Part]:
    match block:
        case {"type": "text", "text": str(text)}:
            if text:
                yield Text(text)
        case {"type": "thinking", "thinking": str(text)}:
            if text:
                yield Thinking(text)
        case {"type": "tool_use", "name": str(name)}:
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            yield ToolCall(calls.call(block.get("id")), name, arguments)
        case {"type": "tool_result"}:
            yield ToolResult(calls.result(block.get("tool_use_id")), _result(block), str(block.get("name") or ""))
        case {"type": str(kind)} if kind in _WITHOUT_CONTENT:
            return
        case {"text": str(text)} if text:  # such as a spoken note
            yield Text(text)
        case _:
            raise ValueError(f"unknown part of the content: {str(block)[:80]}")


def _result(block: Mapping[str, Any]) -> str:
    content = block.get("content") or ""
    if isinstance(content, str):
        return content
    texts = (one.get("text") if isinstance(one.get("text"), str) else json.dumps(one) for one in content)
    return "\n\n".join(text for text in texts if text)
