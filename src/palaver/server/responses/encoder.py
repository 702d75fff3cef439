"""Encodes a reply as events and output items of the Responses API.

The sequence numbers depend only on the events that are fed in. A stream that was cut can therefore be encoded again
from any number on, by this process or by the next one."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

from palaver.events import (
    AnswerDelta,
    Notice,
    PhaseOpened,
    ReadEvent,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Usage,
)
from palaver.messages import Audio, Image, Part, Role, Text, Thinking, ToolCall, ToolResult, Video
from palaver.phases import Phase
from palaver.server.responses.mcp import ItemStep
from palaver.server.sse import encode_json
from palaver.store.encoding import StoredPart
from palaver.transcripts.openai import data_url

Event = dict[str, Any]
_ItemEvent = tuple[str, dict[str, Any]]
"""An event of an item: its type, and its fields without the sequence number, the item's id and its index."""
_FINAL_EVENTS = {"completed": "completed", "failed": "failed", "incomplete": "incomplete", "cancelled": "incomplete"}
"""The last event by final status. The API has no event of its own for a cancelled response."""


@dataclass(frozen=True, slots=True)
class ResponseEnding:
    """The final status of a response and the fields that come with it."""

    status: str
    usage: Usage | None = None
    error: str | None = None
    completed_at: int | None = None


@dataclass(frozen=True, slots=True)
class ResponseOutputOptions:
    """How thinking is shown, and whether log-probabilities are included."""

    summary: bool = False
    encrypted: bool = False
    logprobs: bool = False


class ResponseEncoder:
    """Encodes one response from its first event to its last. Without streaming only the last one is used."""

    def __init__(self, message_id: str, header: Mapping[str, Any], options: ResponseOutputOptions) -> None:
        """The items' ids contain `message_id`; `header` has the fields that are known beforehand."""
        self._message_id = message_id
        self._item_count = 0
        """Items of this message."""
        self._runs_here: Callable[[str], bool] = lambda name: False
        self._server_item: Mapping[str, Any] | None = None
        """An open item of a tool server."""
        self._header = header
        self._options = options
        self._next_number = 0
        self._current: _OpenItem | None = None
        self._output: list[dict[str, Any]] = []
        self._notices: list[str] = []
        self._pending_logprobs: list[dict[str, Any]] = []
        """Entries of tokens whose text has not been emitted yet."""

    def start(self) -> list[Event]:
        created = self.response("queued" if self._header["background"] else "in_progress")
        events = [self._event("response.created", {"response": created})]
        if self._header["background"]:
            events.append(self._event("response.queued", {"response": created}))
        running = {**created, "status": "in_progress"}
        return [*events, self._event("response.in_progress", {"response": running})]

    def enter_reply(self, message_id: str, runs_here: Callable[[str], bool]) -> None:
        """What is fed next is of this reply. `runs_here`: whether a call is one of a tool server, by the tool's name:
        its items come from steps."""
        self._message_id, self._item_count, self._runs_here = message_id, 0, runs_here

    def feed_steps(self, steps: Iterable[ItemStep]) -> list[Event]:
        return [event for step in steps for event in self._encode_step(step)]

    def feed(self, events: Iterable[ReadEvent], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._pending_logprobs += logprobs
        return [encoded for event in events for encoded in self._encode(event)]

    def finish(self, ending: ResponseEnding) -> list[Event]:
        """Call once, at the end."""
        completed = ending.status == "completed"
        events = self._close_item("completed" if completed else "incomplete")
        last = self._event(f"response.{_FINAL_EVENTS[ending.status]}", {"response": self._final_response(ending)})
        return [*events, last]

    def _final_response(self, ending: ResponseEnding) -> dict[str, Any]:
        value = self.response(ending.status)
        if ending.usage is not None:
            value["usage"] = response_usage(ending.usage)
        if ending.error is not None:
            value["error"] = {"code": "server_error", "message": ending.error}
        if ending.status == "incomplete":
            value["incomplete_details"] = {"reason": "max_output_tokens"}
        value["completed_at"] = ending.completed_at
        return value

    def response(self, status: str) -> dict[str, Any]:
        """The response so far."""
        unfinished = [self._current.value("in_progress")] if self._current is not None else []
        if self._server_item is not None:
            unfinished = [dict(self._server_item)]
        value = {**self._header, "status": status, "output": [*self._output, *unfinished]}
        return {**value, "notices": list(self._notices)} if self._notices else value

    def error_event(self, code: str | None, message: str) -> Event:
        """Ends the stream but not the response. It repeats the sequence number of the event before it, so that a client
        that resumes after this number misses nothing."""
        error = {"code": code, "message": message, "param": None}
        return {
            "type": "error",
            "sequence_number": self._next_number - 1,
            **error,
            "error": {"type": "server_error", **error},
        }

    def _encode(self, event: ReadEvent) -> list[Event]:
        match event:
            case PhaseOpened(phase):
                return self._enter_phase(phase)
            case ThinkingDelta(text):
                return [*self._ensure_item(_ReasoningItem), *self._append_text(text)]
            case AnswerDelta(text):
                return [*self._ensure_item(_MessageItem), *self._append_text(text)]
            case ToolCallOpened(_, id, name) if self._runs_here(name):
                closed = self._close_item("completed")
                self._item_count += 1
                return closed
            case ToolCallDelta() if self._current is None:
                return []
            case ToolCallOpened(_, id, name):
                return [
                    *self._close_item("completed"),
                    *self._open_item(_FunctionCallItem(self._next_item_id("function_call"), id, name)),
                ]
            case ToolCallDelta(_, arguments):
                return self._append_text(arguments)
            case Notice(text):
                self._notices.append(text)
                return []
            case _:
                assert_never(event)

    def _enter_phase(self, phase: Phase) -> list[Event]:
        """Opens and closes a reasoning item as soon as its phase does, before the next text."""
        if phase is Phase.THINKING:
            return self._ensure_item(_ReasoningItem)
        return self._close_item("completed") if isinstance(self._current, _ReasoningItem) else []

    def _ensure_item(self, kind: type[_ReasoningItem] | type[_MessageItem]) -> list[Event]:
        if isinstance(self._current, kind):
            return []
        closed = self._close_item("completed")
        opened: _OpenItem
        if kind is _ReasoningItem:
            opened = _ReasoningItem(self._next_item_id("reasoning"), self._options)
        else:
            opened = _MessageItem(self._next_item_id("message"))
        return [*closed, *self._open_item(opened)]

    def _next_item_id(self, kind: str) -> str:
        self._item_count += 1
        return item_id(kind, self._message_id, self._item_count - 1)

    def _open_item(self, item: _OpenItem) -> list[Event]:
        self._current = item
        return [self._output_event("response.output_item.added", {"item": item.value("in_progress")})]

    def _encode_step(self, step: ItemStep) -> list[Event]:
        events: list[Event] = []
        if step.opened is not None:
            events += self._close_item("completed")
            events.append(self._output_event("response.output_item.added", {"item": step.opened}))
            self._server_item = step.opened
        assert self._server_item is not None
        events += [self._output_event(name, {"item_id": self._server_item["id"], **part}) for name, part in step.events]
        if step.done is not None:
            events.append(self._output_event("response.output_item.done", {"item": step.done}))
            self._output.append(dict(step.done))
            self._server_item = None
        return events

    def _append_text(self, text: str) -> list[Event]:
        assert self._current is not None
        logprobs: list[dict[str, Any]] = []
        if isinstance(self._current, _MessageItem):
            logprobs, self._pending_logprobs = self._pending_logprobs, []
        return [self._item_event(part) for part in self._current.append(text, logprobs)]

    def _close_item(self, status: str) -> list[Event]:
        item, self._current = self._current, None
        if item is None:
            return []
        if isinstance(item, _MessageItem):
            item.logprobs += self._pending_logprobs
            self._pending_logprobs = []
        events = [self._item_event(part, item) for part in item.close()]
        done = item.value(status)
        events.append(self._output_event("response.output_item.done", {"item": done}))
        self._output.append(done)
        return events

    def _item_event(self, part: _ItemEvent, item: _OpenItem | None = None) -> Event:
        item = item or self._current
        assert item is not None
        return self._output_event(part[0], {"item_id": item.id, **part[1]})

    def _output_event(self, name: str, fields: Mapping[str, Any]) -> Event:
        return self._event(name, {"output_index": len(self._output), **fields})

    def _event(self, name: str, fields: Mapping[str, Any]) -> Event:
        self._next_number += 1
        return {"type": name, "sequence_number": self._next_number - 1, **fields}


class _OpenItem(Protocol):
    """An output item that is being streamed."""

    @property
    def id(self) -> str: ...

    def value(self, status: str) -> dict[str, Any]: ...

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> list[_ItemEvent]: ...

    def close(self) -> list[_ItemEvent]: ...


class _ReasoningItem:
    def __init__(self, id: str, options: ResponseOutputOptions) -> None:
        self.id = id
        self._options = options
        self._text: list[str] = []
        kind, index = ("reasoning_summary", "summary_index") if options.summary else ("reasoning", "content_index")
        self._text_event = f"response.{kind}_text"
        self._part_event = "response.reasoning_summary_part" if options.summary else "response.content_part"
        self._part_type = "summary_text" if options.summary else "reasoning_text"
        self._at = {index: 0}

    def value(self, status: str) -> dict[str, Any]:
        encrypt = self._options.encrypted and status != "in_progress"
        return reasoning_item(self.id, "".join(self._text), status, self._options.summary, encrypt)

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> list[_ItemEvent]:
        opened = [] if self._text else [(f"{self._part_event}.added", {**self._at, "part": self._part_value("")})]
        self._text.append(text)
        return [*opened, (f"{self._text_event}.delta", {**self._at, "delta": text})]

    def close(self) -> list[_ItemEvent]:
        if not self._text:
            return []
        text = "".join(self._text)
        done = (f"{self._text_event}.done", {**self._at, "text": text})
        return [done, (f"{self._part_event}.done", {**self._at, "part": self._part_value(text)})]

    def _part_value(self, text: str) -> dict[str, str]:
        return {"type": self._part_type, "text": text}


@dataclass
class _MessageItem:
    id: str
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def value(self, status: str) -> dict[str, Any]:
        return message_item(self.id, "".join(self.text), status, self.logprobs)

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> list[_ItemEvent]:
        added = ("response.content_part.added", {"content_index": 0, "part": text_part("")})
        opened = [] if self.text else [added]
        self.text.append(text)
        self.logprobs += logprobs
        return [*opened, ("response.output_text.delta", {"content_index": 0, "delta": text, "logprobs": logprobs})]

    def close(self) -> list[_ItemEvent]:
        text = "".join(self.text)
        done = {"content_index": 0, "text": text, "logprobs": self.logprobs}
        part = {"content_index": 0, "part": text_part(text, self.logprobs)}
        return [("response.output_text.done", done), ("response.content_part.done", part)]


@dataclass
class _FunctionCallItem:
    id: str
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def value(self, status: str) -> dict[str, Any]:
        return function_call_item(self.id, self.call_id, self.name, "".join(self.arguments), status)

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> list[_ItemEvent]:
        self.arguments.append(text)
        return [("response.function_call_arguments.delta", {"delta": text})]

    def close(self) -> list[_ItemEvent]:
        done = {"name": self.name, "arguments": "".join(self.arguments)}
        return [("response.function_call_arguments.done", done)]


def response_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.reply_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.reply_tokens,
    }


def encode_events(events: Iterable[Event]) -> bytes:
    """Encodes them as server-sent events."""
    return b"".join(encode_json(event, event["type"]) for event in events)


_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fco"}
ENCRYPTED_PREFIX = "thought."


def encrypt_thinking(thinking: str) -> str:
    """An opaque form of the thinking that clients send back unread. It is encoded, not secret."""
    return ENCRYPTED_PREFIX + base64.urlsafe_b64encode(thinking.encode("utf-8", "surrogatepass")).decode()


def item_id(kind: str, message: str, index: int) -> str:
    """The id names the message and the item's index in it, so that the item is found by its id alone."""
    return f"{_ID_PREFIXES[kind]}_{message}_{index}"


def message_items(message: str, role: Role, parts: Iterable[StoredPart | Part]) -> list[dict[str, Any]]:
    """A stored message as items. Media that are given as references are left out."""
    if role is Role.ASSISTANT:
        return _assistant_items(message, parts)
    if role is Role.TOOL:
        results = [part for part in parts if isinstance(part, ToolResult)]
        return [_tool_result_item(message, index, result) for index, result in enumerate(results)]
    content = [_input_part(part) for part in parts if isinstance(part, Text | Image | Audio | Video)]
    header = {"id": item_id("message", message, 0), "type": "message", "role": role.value, "status": "completed"}
    return [{**header, "content": content}]


def _input_part(part: Text | Image | Audio | Video) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "input_text", "text": text}
        case Image(media_type, data):
            return {"type": "input_image", "image_url": data_url(media_type, data), "detail": "auto"}
        case Audio(media_type, data, name) | Video(media_type, data, name):
            return {"type": "input_file", "file_data": data_url(media_type, data), "filename": name or None}
        case _:
            assert_never(part)


def _assistant_items(message: str, parts: Iterable[StoredPart | Part]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for part in parts:
        index = len(items)
        match part:
            case Thinking(text):
                items.append(reasoning_item(item_id("reasoning", message, index), text))
            case Text(text):
                items.append(message_item(item_id("message", message, index), text))
            case ToolCall(id, name, arguments):
                items.append(function_call_item(item_id("function_call", message, index), id, name, arguments))
    return items


def reasoning_item(
    id: str, text: str, status: str = "completed", as_summary: bool = False, encrypt: bool = False
) -> dict[str, Any]:
    content = [{"type": "summary_text" if as_summary else "reasoning_text", "text": text}] if text else []
    item: dict[str, Any] = {"id": id, "type": "reasoning", "status": status, "summary": content if as_summary else []}
    if not as_summary:
        item["content"] = content
    return {**item, "encrypted_content": encrypt_thinking(text)} if encrypt and text else item


def message_item(
    id: str, text: str, status: str = "completed", logprobs: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    header = {"id": id, "type": "message", "role": "assistant", "status": status}
    return {**header, "content": [text_part(text, logprobs)] if text else []}


def text_part(text: str, logprobs: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs or ())}


def function_call_item(id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    header = {"id": id, "type": "function_call", "status": status}
    return {**header, "call_id": call_id, "name": name, "arguments": arguments}


def _tool_result_item(message: str, index: int, result: ToolResult) -> dict[str, Any]:
    header = {"id": item_id("function_call_output", message, index), "type": "function_call_output"}
    return {**header, "call_id": result.call_id, "output": result.content, "status": "completed"}
