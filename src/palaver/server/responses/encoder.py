"""A reply in the words of the Responses API: events with names and numbers while it comes, items when it is there.

The numbers are a function of what was said: each event of the reader makes the same events here, so a stream that was
cut is told again from any number on, by this process or the next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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
from palaver.phases import Phase
from palaver.server.responses.items import function_call_item, item_id, message_item, reasoning_item, text_part

Event = dict[str, Any]
_Piece = tuple[str, dict[str, Any]]
"""An event without its number and the place of its item."""
_LAST = {"completed": "completed", "failed": "failed", "incomplete": "incomplete", "cancelled": "incomplete"}
"""By how a response ended, the name of its last event: there is none of its own for one that was cancelled."""


@dataclass(frozen=True, slots=True)
class ResponseEnding:
    """How a response ended."""

    status: str
    usage: Usage | None = None
    error: str | None = None
    completed_at: int | None = None


@dataclass(frozen=True, slots=True)
class ResponseOutputOptions:
    """How a thought is told, and whether log-probabilities are."""

    summary: bool = False
    sealed: bool = False
    logprobs: bool = False


class ResponseEncoder:
    """One response from its first event to its last. Not streaming is taking all and asking for the `response`."""

    def __init__(self, message: str, heading: Mapping[str, Any], shows: ResponseOutputOptions) -> None:
        """`message` is what the items' ids are made of; `heading` all that is known of the response beforehand."""
        self._message = message
        self._heading = heading
        self._shows = shows
        self._next = 0
        self._open: _OpenItem | None = None
        self._done: list[dict[str, Any]] = []
        self._notices: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text was not told yet."""

    def opening(self) -> list[Event]:
        begun = self.response("queued" if self._heading["background"] else "in_progress")
        events = [self._numbered("response.created", {"response": begun})]
        if self._heading["background"]:
            events.append(self._numbered("response.queued", {"response": begun}))
        runs = {**begun, "status": "in_progress"}
        return [*events, self._numbered("response.in_progress", {"response": runs})]

    def take(self, events: Iterable[ReadEvent], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._logprobs += logprobs
        return [told for event in events for told in self._take(event)]

    def end(self, ending: ResponseEnding) -> list[Event]:
        """To be asked for once."""
        whole = ending.status == "completed"
        events = self._close("completed" if whole else "incomplete")
        last = self._numbered(f"response.{_LAST[ending.status]}", {"response": self.ended(ending)})
        return [*events, last]

    def ended(self, ending: ResponseEnding) -> dict[str, Any]:
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
        """The response as it stands."""
        growing = [self._open.value("in_progress")] if self._open is not None else []
        value = {**self._heading, "status": status, "output": [*self._done, *growing]}
        return {**value, "notices": list(self._notices)} if self._notices else value

    def failure(self, code: str | None, message: str) -> Event:
        """What ends the stream but not the response. It has the number of the event before it: whoever comes back with
        that misses nothing."""
        told = {"code": code, "message": message, "param": None}
        return {
            "type": "error",
            "sequence_number": self._next - 1,
            **told,
            "error": {"type": "server_error", **told},
        }

    def _take(self, event: ReadEvent) -> list[Event]:
        match event:
            case PhaseOpened(phase):
                return self._turn_to(phase)
            case ThinkingDelta(text):
                return [*self._ensure(_ReasoningItem), *self._said(text)]
            case AnswerDelta(text):
                return [*self._ensure(_MessageItem), *self._said(text)]
            case ToolCallOpened(_, id, name):
                return [
                    *self._close("completed"),
                    *self._begin(_FunctionCallItem(self._item("function_call"), id, name)),
                ]
            case ToolCallDelta(_, arguments):
                return self._said(arguments)
            case Notice(text):
                self._notices.append(text)
                return []
            case _:
                assert_never(event)

    def _turn_to(self, phase: Phase) -> list[Event]:
        """A thought is told of when it is opened, and when it is over, not with the next text."""
        if phase is Phase.THINKING:
            return self._ensure(_ReasoningItem)
        return self._close("completed") if isinstance(self._open, _ReasoningItem) else []

    def _ensure(self, kind: type[_ReasoningItem] | type[_MessageItem]) -> list[Event]:
        if isinstance(self._open, kind):
            return []
        closed = self._close("completed")
        opened: _OpenItem
        if kind is _ReasoningItem:
            opened = _ReasoningItem(self._item("reasoning"), self._shows)
        else:
            opened = _MessageItem(self._item("message"), self._shows.logprobs)
        return [*closed, *self._begin(opened)]

    def _item(self, kind: str) -> str:
        return item_id(kind, self._message, len(self._done))

    def _begin(self, item: _OpenItem) -> list[Event]:
        self._open = item
        return [self._placed("response.output_item.added", {"item": item.value("in_progress")})]

    def _said(self, text: str) -> list[Event]:
        assert self._open is not None
        logprobs: list[dict[str, Any]] = []
        if isinstance(self._open, _MessageItem):
            logprobs, self._logprobs = self._logprobs, []
        return [self._inside(piece) for piece in self._open.say(text, logprobs)]

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        if isinstance(item, _MessageItem):
            item.logprobs += self._logprobs
            self._logprobs = []
        events = [self._inside(piece, item) for piece in item.close()]
        whole = item.value(status)
        events.append(self._placed("response.output_item.done", {"item": whole}))
        self._done.append(whole)
        return events

    def _inside(self, piece: _Piece, item: _OpenItem | None = None) -> Event:
        item = item or self._open
        assert item is not None
        return self._placed(piece[0], {"item_id": item.id, **piece[1]})

    def _placed(self, name: str, fields: Mapping[str, Any]) -> Event:
        return self._numbered(name, {"output_index": len(self._done), **fields})

    def _numbered(self, name: str, fields: Mapping[str, Any]) -> Event:
        self._next += 1
        return {"type": name, "sequence_number": self._next - 1, **fields}


class _OpenItem(Protocol):
    """An item in the making."""

    @property
    def id(self) -> str: ...

    def value(self, status: str) -> dict[str, Any]: ...

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> list[_Piece]: ...

    def close(self) -> list[_Piece]: ...


class _ReasoningItem:
    def __init__(self, id: str, shows: ResponseOutputOptions) -> None:
        self.id = id
        self._shows = shows
        self._text: list[str] = []
        kind, place = ("reasoning_summary", "summary_index") if shows.summary else ("reasoning", "content_index")
        self._names = f"response.{kind}_text"
        self._parts = "response.reasoning_summary_part" if shows.summary else "response.content_part"
        self._part = "summary_text" if shows.summary else "reasoning_text"
        self._at = {place: 0}

    def value(self, status: str) -> dict[str, Any]:
        seal = self._shows.sealed and status != "in_progress"
        return reasoning_item(self.id, "".join(self._text), status, self._shows.summary, seal)

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> list[_Piece]:
        opened = [] if self._text else [(f"{self._parts}.added", {**self._at, "part": self._told("")})]
        self._text.append(text)
        return [*opened, (f"{self._names}.delta", {**self._at, "delta": text})]

    def close(self) -> list[_Piece]:
        if not self._text:
            return []
        text = "".join(self._text)
        done = (f"{self._names}.done", {**self._at, "text": text})
        return [done, (f"{self._parts}.done", {**self._at, "part": self._told(text)})]

    def _told(self, text: str) -> dict[str, str]:
        return {"type": self._part, "text": text}


@dataclass
class _MessageItem:
    id: str
    shows_logprobs: bool
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def value(self, status: str) -> dict[str, Any]:
        return message_item(self.id, "".join(self.text), status, self.logprobs)

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> list[_Piece]:
        added = ("response.content_part.added", {"content_index": 0, "part": text_part("")})
        opened = [] if self.text else [added]
        self.text.append(text)
        self.logprobs += logprobs
        return [*opened, ("response.output_text.delta", {"content_index": 0, "delta": text, "logprobs": logprobs})]

    def close(self) -> list[_Piece]:
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

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> list[_Piece]:
        self.arguments.append(text)
        return [("response.function_call_arguments.delta", {"delta": text})]

    def close(self) -> list[_Piece]:
        done = {"name": self.name, "arguments": "".join(self.arguments)}
        return [("response.function_call_arguments.done", done)]


def response_usage(counted: Usage) -> dict[str, Any]:
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.reply_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.thinking_tokens},
        "total_tokens": counted.prompt_tokens + counted.reply_tokens,
    }


def encode_events(events: Iterable[Event]) -> bytes:
    """As server-sent events."""
    return "".join(f"event: {one['type']}\ndata: {_json(one)}\n\n" for one in events).encode("utf-8", "replace")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
