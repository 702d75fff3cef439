"""Chats exported from Open WebUI: a list of chats, each with a message tree in its history."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

from palaver.messages import Image, Message, Part, Role, Text, Thinking
from palaver.transcripts.openai import from_data_url
from palaver.transcripts.transcript import (
    ReadResult,
    SkippedConversation,
    Transcript,
    TranscriptEntry,
    parse_time,
    sort_parents_first,
)

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_REASONING = re.compile(
    r'<details type="reasoning"[^>]*>\s*(?:<summary>.*?</summary>)?\s*(.*?)\s*</details>\s*', re.DOTALL
)
_QUOTED = re.compile(r"^> ?", re.MULTILINE)


def matches(value: Any) -> bool:
    chat = value.get("chat", value) if isinstance(value, dict) else None
    history = chat.get("history") if isinstance(chat, dict) else None
    return isinstance(history, dict) and isinstance(history.get("messages"), dict)


def parse(value: Mapping[str, Any]) -> ReadResult:
    chat = value.get("chat", value)
    history = chat["history"]
    skipped: list[SkippedConversation] = []
    entries = []
    for id, message in history["messages"].items():
        try:
            entries.append(_entry(str(id), message, skipped))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(SkippedConversation(f"message {id}", str(error)))
    ordered, orphans = sort_parents_first(entries)
    head = history.get("currentId")
    system = (chat.get("params") or {}).get("system") or chat.get("system") or ""
    transcript = Transcript(
        ordered,
        title=str(value.get("title") or chat.get("title") or ""),
        system=str(system),
        tags=_tags(value, chat),
        head=head if any(entry.id == head for entry in ordered) else None,
    )
    return ReadResult((transcript,), (*skipped, *orphans))


def _entry(id: str, message: Mapping[str, Any], skipped: list[SkippedConversation]) -> TranscriptEntry:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise ValueError(f"unknown role {message.get('role')!r}")
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise ValueError("its content is not text")
    parts = [*_images(id, message.get("files") or (), skipped), *_content_parts(role, content)]
    return TranscriptEntry(
        id,
        message.get("parentId") or None,
        Message(role, tuple(parts)),
        parse_time(message.get("timestamp")),
        str(message.get("model") or ""),
        complete=message.get("done") is not False and not message.get("error"),
    )


def _content_parts(role: Role, content: str) -> Iterable[Part]:
    """Open WebUI writes thinking into the content, in a `details` element."""
    position = 0
    if role is Role.ASSISTANT:
        while found := _REASONING.match(content, position):
            yield Thinking(_QUOTED.sub("", html.unescape(found[1])))
            position = found.end()
    if content[position:]:
        yield Text(content[position:])


def _images(id: str, files: Iterable[Any], skipped: list[SkippedConversation]) -> Iterable[Part]:
    for file in files:
        try:
            found = from_data_url(file["url"])
            if not isinstance(found, Image):
                raise ValueError("it is not a picture")
            yield found
        except (ValueError, KeyError, TypeError) as error:
            skipped.append(SkippedConversation(f"file of message {id}", str(error)))


def _tags(value: Mapping[str, Any], chat: Mapping[str, Any]) -> tuple[str, ...]:
    found = (value.get("meta") or {}).get("tags") or chat.get("tags") or ()
    names = (tag.get("name") if isinstance(tag, dict) else tag for tag in found)
    return tuple(name for name in names if isinstance(name, str) and name)
