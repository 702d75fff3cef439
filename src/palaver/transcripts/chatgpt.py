"""Conversations exported from ChatGPT: a tree of nodes, of which one reply may take several.

A thought, the text before a tool call and the answer are nodes of their own. Nodes of the assistant that follow each
other become one message here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from palaver.media.headers import sniff
from palaver.messages import Audio, Image, Message, Part, Role, Text, Thinking, ToolCall, ToolResult, Video
from palaver.transcripts.archive import ExportFiles
from palaver.transcripts.transcript import (
    ReadResult,
    SkippedConversation,
    Transcript,
    TranscriptEntry,
    parse_time,
    sort_parents_first,
)

_MEDIA: dict[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}
_EVERYONE = "all"
"""The recipient of messages that are no tool calls."""
_CITATIONS = re.compile(" ?\ue200[^\ue200\ue201]*\ue201")
"""Marks in an answer that ChatGPT's page shows as links. What they name is not in the text."""
_THOUGHTS = ("thoughts", "reasoning_recap")
_UNFINISHED = ("in_progress", "finished_partial_completion")


def matches(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("mapping"), dict)


def parse(value: Mapping[str, Any], files: ExportFiles | None = None) -> ReadResult:
    """`files`: the files of the archive, which messages name."""
    reader = _TreeReader(files or ExportFiles())
    for id, node in value["mapping"].items():
        try:
            reader.add(str(id), node)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reader.skip(f"message {id}", error)
    ordered, orphans = sort_parents_first(reader.nodes)
    joiner = _NodeJoiner(ordered)
    for node in ordered:
        joiner.add(node)
    transcript = Transcript(
        tuple(joiner.entries.values()),
        title=str(value.get("title") or ""),
        system="\n\n".join(dict.fromkeys(reader.system)),
        head=joiner.last_message(str(value.get("current_node"))),
    )
    return ReadResult((transcript,), (*reader.skipped, *joiner.skipped, *orphans))


@dataclass
class _TreeReader:
    """Reads nodes one by one. A node that is no message stays in the tree without parts, so that its children keep
    their place."""

    files: ExportFiles
    nodes: list[TranscriptEntry] = field(default_factory=list)
    system: list[str] = field(default_factory=list)
    skipped: list[SkippedConversation] = field(default_factory=list)

    def skip(self, item: str, reason: object) -> None:
        self.skipped.append(SkippedConversation(item, str(reason)))

    def add(self, id: str, node: Mapping[str, Any]) -> None:
        parent = node.get("parent")
        place = TranscriptEntry(id, None if parent is None else str(parent), Message(Role.SYSTEM, ()))
        self.nodes.append(place)
        message = node.get("message")
        if message is None:
            return
        role = Role(message["author"]["role"])
        content = message.get("content") or {}
        if content.get("content_type") in ("user_editable_context", "model_editable_context"):
            self.system += _instructions(content)
            return
        parts = tuple(self._parts(id, message, role, content))
        if role is Role.SYSTEM:
            self.system += [part.text for part in parts if isinstance(part, Text) and part.text.strip()]
            return
        about = message.get("metadata") or {}
        self.nodes[-1] = replace(
            place,
            message=Message(role, parts),
            created_at=parse_time(message.get("create_time")),
            model=str(about.get("model_slug") or ""),
            complete=message.get("status") not in _UNFINISHED,
        )
        self._check_attachments(id, message, about)

    def _parts(self, id: str, message: Mapping[str, Any], role: Role, content: Mapping[str, Any]) -> Iterator[Part]:
        kind = content.get("content_type")
        if kind in _THOUGHTS:
            if thought := _thought(content):
                yield Thinking(thought)
            return
        parts = list(self._content_parts(id, content))
        text = "".join(part.text for part in parts if isinstance(part, Text))
        recipient = str(message.get("recipient") or _EVERYONE)
        if role is Role.ASSISTANT and recipient != _EVERYONE:
            yield ToolCall(id, recipient, _arguments(text))
        elif role is Role.TOOL:
            yield ToolResult("", text, str(message["author"].get("name") or ""))
            for part in parts:
                if not isinstance(part, Text):
                    self.skip(f"file of message {id}", "a tool result holds text only")
        else:
            yield from parts

    def _content_parts(self, id: str, content: Mapping[str, Any]) -> Iterator[Part]:
        for part in content.get("parts") or ():
            try:
                if found := self._part(part):
                    yield found
            except (ValueError, KeyError, TypeError) as error:
                self.skip(f"file of message {id}", error)
        for name in ("text", "result"):  # code, the output of code, pages that were read
            if isinstance(found := content.get(name), str) and found:
                yield Text(found)
        unknown = {name for name, value in content.items() if value and name != "content_type"}
        if unknown and not unknown & {"parts", "text", "result"}:
            self.skip(f"message {id}", f"unknown type of content: {content.get('content_type')!r}")

    def _part(self, part: Any) -> Part | None:
        match part:
            case None | "":
                return None
            case str():
                return Text(_CITATIONS.sub("", part))
            case {"content_type": "audio_transcription", "text": str(text)}:
                return Text(text)
            case {"asset_pointer": str(pointer)}:
                return self._file(pointer)
            case {"audio_asset_pointer": dict(audio)}:
                return self._part(audio)
            case {"text": str(text)}:
                return Text(text)
            case _:
                raise ValueError(f"unknown part of the content: {str(part)[:80]}")

    def _file(self, pointer: str) -> Part:
        """A pointer is the id of a file behind a scheme, such as `file-service://file-1a2b`."""
        id = pointer.rpartition("/")[2].partition("#")[0]
        if not id:
            raise ValueError(f"unknown address of a file: {pointer[:80]!r}")
        name, data = self.files.find(id)
        media_type = sniff(data) or ""
        kind = _MEDIA.get(media_type.partition("/")[0])
        if kind is None:
            raise ValueError(f"the file {name} is neither a picture, nor sound or video")
        return kind(media_type, data, name)

    def _check_attachments(self, id: str, message: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Reports attached documents: their text is not in the export. Pictures are parts of the content."""
        pointers = json.dumps((message.get("content") or {}).get("parts") or "")
        for attached in about.get("attachments") or ():
            if isinstance(attached, dict) and str(attached.get("id")) not in pointers:
                name = attached.get("name") or attached.get("id")
                self.skip(f"attachment of message {id}", f"the text of {name!r} is not in the export")


def _thought(content: Mapping[str, Any]) -> str:
    thoughts = [one for one in content.get("thoughts") or () if isinstance(one, dict)]
    lines = ["\n".join(filter(None, (one.get("summary"), one.get("content")))) for one in thoughts]
    return "\n\n".join(filter(None, lines))


def _instructions(content: Mapping[str, Any]) -> list[str]:
    """The user's custom instructions, or what ChatGPT remembered of the user."""
    names = ("user_profile", "user_instructions", "model_set_context")
    return [text for name in names if isinstance(text := content.get(name), str) and text.strip()]


def _arguments(text: str) -> str:
    """Calls of some tools are code, not JSON."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return text if is_object else json.dumps({"input": text}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the children of a node go on: behind a message, or within one that is not complete yet."""

    message: str | None = None
    """The last message above."""
    opened: TranscriptEntry | None = None
    """The nodes since then, joined."""


class _NodeJoiner:
    """Joins nodes of the same role that follow each other. Where they branch, each branch becomes a message with the
    same beginning."""

    def __init__(self, nodes: tuple[TranscriptEntry, ...]) -> None:
        """`nodes`: every parent before its children."""
        self.entries: dict[str, TranscriptEntry] = {}
        self.skipped: list[SkippedConversation] = []
        self._places: dict[str | None, _Place] = {None: _Place()}
        self._next_roles: dict[str | None, set[Role]] = {}
        """The roles of the messages below each node. Nodes without parts are passed."""
        for node in reversed(nodes):
            below = {node.message.role} if node.message.parts else self._next_roles.get(node.id, set())
            self._next_roles.setdefault(node.parent, set()).update(below)

    def last_message(self, node_id: str) -> str | None:
        return self._places.get(node_id, _Place()).message

    def add(self, node: TranscriptEntry) -> None:
        place = self._places[node.parent]
        entry = self._joined(node, place)
        if entry is None:
            is_lost = place.opened is not None and not self._next_roles.get(node.id)
            self._places[node.id] = self._close(place.opened) if is_lost and place.opened else place
        elif self._next_roles.get(node.id) == {entry.message.role} and entry.message.role is not Role.USER:
            self._places[node.id] = _Place(place.message, entry)
        else:
            self._places[node.id] = self._close(entry)

    def _joined(self, node: TranscriptEntry, place: _Place) -> TranscriptEntry | None:
        """The node with those before it, or None if it adds nothing."""
        if not node.message.parts:
            return None
        role, before = node.message.role, place.opened
        if role is Role.TOOL and before is None and not self._call(place.message):
            self.skipped.append(SkippedConversation(f"message {node.id}", "it is the result of a tool without a call"))
            return None
        parts = before.message.parts if before else ()
        created_at = before.created_at if before else node.created_at
        message = Message(role, _append(parts, node.message.parts))
        return replace(node, parent=place.message, message=message, created_at=created_at)

    def _close(self, entry: TranscriptEntry) -> _Place:
        message = entry.message
        if call := self._call(entry.parent) if message.role is Role.TOOL else None:
            results = message.tool_results
            content = "\n\n".join(result.content for result in results if result.content)
            message = Message(Role.TOOL, (ToolResult(call.id, content, results[0].name or call.name),))
        is_thought = message.role is Role.ASSISTANT and all(isinstance(part, Thinking) for part in message.parts)
        complete = entry.complete and not is_thought
        self.entries[entry.id] = replace(entry, message=message, complete=complete)
        return _Place(entry.id)

    def _call(self, message_id: str | None) -> ToolCall | None:
        calls = self.entries[message_id].message.tool_calls if message_id is not None else ()
        return calls[-1] if calls else None


def _append(parts: tuple[Part, ...], more: tuple[Part, ...]) -> tuple[Part, ...]:
    """Texts of different nodes are separated by an empty line."""
    if parts and more and isinstance(more[0], Text | Thinking) and type(parts[-1]) is type(more[0]):
        return (*parts, replace(more[0], text=f"\n\n{more[0].text}"), *more[1:])
    return (*parts, *more)
