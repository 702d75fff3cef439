"""Reading tool calls: the calls of one reply, the interface of a syntax's reader, and incremental JSON scanners."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from palaver.events import ReadEvent, ToolCallDelta, ToolCallOpened
from palaver.formats.markers import visible_text
from palaver.messages import Tool

_MAX_REFERENCES = 16
"""References that lead to references are followed this often."""


class CallRegistry:
    """The calls of one reply. Assigns indexes and ids; an id is a hash of the prompt and the index, 9 hex digits."""

    def __init__(self, context_ids: Sequence[int], tools: Sequence[Tool]) -> None:
        self._context = context_ids
        self.tools = tools
        self.count = 0
        self.in_thought = False
        self._ignored: list[str] = []

    def open(self, name: str, call_id: str = "") -> ReadEvent:
        self.count += 1
        return ToolCallOpened(self.count - 1, call_id or self._id(self.count - 1), name, self.in_thought)

    def arguments(self, text: str) -> list[ReadEvent]:
        return [ToolCallDelta(self.count - 1, text)] if text else []

    def ignore(self, text: str) -> None:
        """Records text between calls that is no part of one. The reader reports it in a notice."""
        self._ignored.append(text)

    def pop_ignored(self) -> str:
        text, self._ignored = visible_text("".join(self._ignored)), []
        return text if any(map(str.isalnum, text)) else ""

    def schema(self, name: str, key: str) -> Mapping[str, Any]:
        """The schema of a tool's argument; empty if it is unknown."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        found = (tool.parameters.get("properties") or {}).get(key) if tool else None
        return self.resolve(name, found)

    def resolve(self, name: str, schema: Any) -> Mapping[str, Any]:
        """Follows the references of a schema inside the tool's own. Empty if one has no target."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema if isinstance(schema, Mapping) else {}
            place, schema = str(schema["$ref"]).removeprefix("#/"), tool.parameters if tool else {}
            for step in place.split("/"):
                schema = schema.get(step) if isinstance(schema, Mapping) else None
        return {}

    def parameter(self, name: str, place: int) -> str:
        """The name of the tool's parameter at this position."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        names = list(tool.parameters.get("properties") or {}) if tool else []
        return names[place] if place < len(names) else f"argument_{place + 1}"

    def _id(self, index: int) -> str:
        seed = ",".join(map(str, self._context)) + f"/{index}"
        return hashlib.sha256(seed.encode()).hexdigest()[:9]


class CallReader(Protocol):
    """Reads the text in the slots of one syntax."""

    def enter(self, slot: str) -> list[ReadEvent]:
        """The reply entered a state with this slot."""
        ...

    def feed(self, slot: str, text: str) -> list[ReadEvent]: ...

    def leave(self) -> list[ReadEvent]:
        """The calls end here. Text that is no part of them is passed to `CallRegistry.ignore`."""
        ...

    def truncate(self) -> list[ReadEvent]:
        """The reply stops inside a call. Text that is no event yet is passed to `CallRegistry.ignore`."""
        ...


class JsonScanner:
    """Scans one JSON object, list or string character by character. Other values never become complete."""

    def __init__(self) -> None:
        self.depth = 0
        self.started = False
        self.complete = False
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """The number of characters that belong to the value; scanning stops at its end."""
        for at, character in enumerate(text):
            if self.complete:
                return at
            self.step(character)
        return len(text)

    def stays_in_string(self, text: str) -> bool:
        """Whether all of the text is part of a string that stays open."""
        return self._in_string and not self._escaped and '"' not in text and "\\" not in text

    def step(self, character: str) -> None:
        self.started = self.started or not character.isspace()
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
            return
        elif character in "{[":
            self.depth += 1
        elif character in "}]" and self.depth:
            self.depth -= 1
        else:
            return
        self.complete = self.depth == 0 and not self._in_string


@dataclass(frozen=True, slots=True)
class ValueDelta:
    """More text of the value of a key."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class CompleteValue:
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class ObjectEnd:
    pass


ObjectEvent = ValueDelta | CompleteValue | ObjectEnd


class ObjectReader:
    """Reads JSON objects key by key. They may follow each other with or without a list around them."""

    def __init__(self) -> None:
        self._step = self._outside
        self._text: list[str] = []
        self._key = ""
        self._value = JsonScanner()
        self._events: list[ObjectEvent] = []
        self._piece: list[str] = []
        self._ignored: list[str] = []

    @property
    def key(self) -> str:
        return self._key

    @property
    def awaits_value(self) -> bool:
        """Whether a key was read whose value has not started."""
        return self._step == self._before_value

    @property
    def ignored(self) -> str:
        """Text that is not valid JSON at its position."""
        return "".join(self._ignored)

    @property
    def unfinished(self) -> str:
        """The text of an incomplete value."""
        return "".join(self._text) if self._step == self._in_value else ""

    @property
    def incomplete(self) -> str:
        """An incomplete key, or a key with its incomplete value."""
        if self._step == self._in_key:
            return "".join(self._text)
        return f"{self._key}: {self.unfinished}" if self.awaits_value or self._step == self._in_value else ""

    def feed(self, text: str) -> list[ObjectEvent]:
        reads_value = text and self._step == self._in_value and not self._is_bare
        if reads_value and self._value.stays_in_string(text):  # most tokens of a long value
            self._text.append(text)
            return [ValueDelta(self._key, text)]
        for character in text:
            self._step(character)
        self._flush_piece()
        events, self._events = self._events, []
        return events

    @property
    def _is_bare(self) -> bool:
        """Whether the value is no object, list or string: it ends before the next comma or bracket."""
        return bool(self._text) and self._text[0] not in '{["'

    def _outside(self, character: str) -> None:
        if character == "{":
            self._step = self._before_key
        elif character not in "[],":
            self._ignored.append(character)

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._text, self._value = [character], JsonScanner()
            self._value.step(character)
            self._step = self._in_key
        elif character == "}":
            self._end_object()
        elif character != ",":
            self._ignored.append(character)

    def _in_key(self, character: str) -> None:
        self._text.append(character)
        self._value.step(character)
        if self._value.complete:
            self._key = decode_string("".join(self._text))
            self._step = self._before_value

    def _before_value(self, character: str) -> None:
        if character.isspace() or character == ":":
            return
        self._text, self._value = [], JsonScanner()
        self._step = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        bare = self._is_bare
        if bare and character in ",}]":
            self._end_value()
            self._after_value(character)
            return
        self._text.append(character)
        self._piece.append(character)
        self._value.step(character)
        if self._value.complete and not bare:
            self._end_value()

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._step = self._before_key
        elif character == "}":
            self._end_object()
        else:
            self._ignored.append(character)

    def _end_value(self) -> None:
        self._flush_piece()
        self._events.append(CompleteValue(self._key, "".join(self._text).strip()))
        self._step = self._after_value

    def _end_object(self) -> None:
        self._events.append(ObjectEnd())
        self._step = self._outside

    def _flush_piece(self) -> None:
        if self._piece:
            self._events.append(ValueDelta(self._key, "".join(self._piece)))
            self._piece = []


def decode_string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    return value if isinstance(value, str) else text
