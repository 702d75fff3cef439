"""Conversations exported from llama.cpp's web UI: `conv` and its `messages`, a tree under an empty root."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from palaver.messages import Audio, Image, Message, Part, Role, Text, Thinking
from palaver.transcripts.openai import from_data_url, from_openai
from palaver.transcripts.transcript import (
    ReadResult,
    SkippedConversation,
    Transcript,
    TranscriptEntry,
    parse_time,
    sort_parents_first,
)


def matches(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("conv"), dict) and isinstance(value.get("messages"), list)


def parse(value: Mapping[str, Any]) -> ReadResult:
    skipped: list[SkippedConversation] = []
    entries, roots = [], set()
    for message in value["messages"]:
        if message.get("type") == "root":
            roots.add(str(message["id"]))
            continue
        try:
            entries.append(_entry(message, skipped))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(SkippedConversation(f"message {message.get('id')}", str(error)))
    system, system_parents = _system(entries)
    ordered, orphans = sort_parents_first(
        _reparent(entry, roots, system_parents) for entry in entries if entry.id not in system_parents
    )
    conv = value["conv"]
    head = str(conv.get("currNode") or "")
    transcript = Transcript(
        ordered,
        title=str(conv.get("name") or ""),
        system=system,
        head=head if any(entry.id == head for entry in ordered) else None,
    )
    return ReadResult((transcript,), (*skipped, *orphans))


def _entry(message: Mapping[str, Any], skipped: list[SkippedConversation]) -> TranscriptEntry:
    content = from_openai({"role": message["role"], "content": message.get("content") or "", **_calls(message)})
    thought = message.get("reasoningContent") or message.get("reasoning_content") or message.get("thinking")
    thinking: tuple[Part, ...] = (Thinking(thought),) if isinstance(thought, str) and thought else ()
    extras = tuple(_extras(message, skipped))
    return TranscriptEntry(
        str(message["id"]),
        _id(message.get("parent")),
        Message(content.role, (*thinking, *extras, *content.parts)),
        parse_time(message.get("timestamp")),
        str(message.get("model") or ""),
    )


def _calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Tool calls are stored as a JSON string."""
    calls = message.get("toolCalls") or message.get("tool_calls")
    found = {"tool_call_id": message.get("toolCallId")}
    if isinstance(calls, str):
        calls = json.loads(calls)
    return {**found, "tool_calls": calls} if calls else found


def _extras(message: Mapping[str, Any], skipped: list[SkippedConversation]) -> Iterable[Part]:
    for extra in message.get("extra") or ():
        try:
            yield _extra(extra)
        except (ValueError, KeyError, TypeError) as error:
            skipped.append(SkippedConversation(f"attachment of message {message.get('id')}", str(error)))


def _extra(extra: Mapping[str, Any]) -> Part:
    match extra:
        case {"type": "imageFile" | "IMAGE", "base64Url": str(url)}:
            found = from_data_url(url)
            if isinstance(found, Image):
                return found
        case {"type": "audioFile" | "AUDIO", "base64Data": str(data)}:
            return Audio(str(extra.get("mimeType") or "audio/wav"), base64.b64decode(data))
        case {"type": "textFile" | "TEXT" | "context" | "pdfFile" | "PDF", "content": str(content)}:
            return Text(f"{extra.get('name') or 'File'}:\n\n{content}\n\n")
    raise ValueError(f"unknown type of attachment: {extra.get('type')!r}")


def _system(entries: Iterable[TranscriptEntry]) -> tuple[str, dict[str, str | None]]:
    """The system prompt, and the parent of each system message."""
    found = [entry for entry in entries if entry.message.role is Role.SYSTEM]
    return (found[0].message.text if found else ""), {entry.id: entry.parent for entry in found}


def _reparent(entry: TranscriptEntry, roots: set[str], system_parents: Mapping[str, str | None]) -> TranscriptEntry:
    """Skips parents that are not imported as messages: the root and system messages."""
    parent = entry.parent
    seen: set[str] = set()
    while parent is not None and parent in system_parents and parent not in seen:
        seen.add(parent)
        parent = system_parents[parent]
    return TranscriptEntry(
        entry.id, None if parent in roots else parent, entry.message, entry.created_at, entry.model, entry.complete
    )


def _id(value: Any) -> str | None:
    return None if value in (None, "", -1) else str(value)
