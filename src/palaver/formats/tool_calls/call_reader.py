"""The tool calls of one reply as they open: numbers, ids, and the pieces of their arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from palaver.events import ReadEvent, ToolCallDelta, ToolCallOpened
from palaver.formats.markers import visible_text
from palaver.messages import Tool


class CallRegistry:
    """Hands out numbers and ids. Ids are a function of the prompt and the number, nine letters and digits."""

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
        """Remembers what stands among the calls and is no part of one: nothing that was said is discarded."""
        self._ignored.append(text)

    def take_ignored(self) -> str:
        text, self._ignored = visible_text("".join(self._ignored)), []
        return text if any(map(str.isalnum, text)) else ""

    def schema(self, name: str, key: str) -> Mapping[str, Any]:
        """What the offered tool says of an argument; nothing where it is not known."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        found = (tool.parameters.get("properties") or {}).get(key) if tool else None
        return found if isinstance(found, Mapping) else {}

    def parameter(self, name: str, place: int) -> str:
        """The name of the tool's parameter at this place."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        names = list(tool.parameters.get("properties") or {}) if tool else []
        return names[place] if place < len(names) else f"argument_{place + 1}"

    def _id(self, index: int) -> str:
        seed = ",".join(map(str, self._context)) + f"/{index}"
        return hashlib.sha256(seed.encode()).hexdigest()[:9]


class CallReader(Protocol):
    """Reads what is said in the slots of one syntax."""

    def enter(self, slot: str) -> list[ReadEvent]:
        """The reply is in a state with this slot now."""
        ...

    def say(self, slot: str, text: str) -> list[ReadEvent]: ...

    def leave(self) -> list[ReadEvent]:
        """The calls end here; what is no part of them has been ignored."""
        ...

    def cut(self) -> list[ReadEvent]:
        """The reply stops here, in the midst of a call; what could not be told has been ignored."""
        ...


class JsonScanner:
    """Follows one JSON object, list or text character by character; anything else never becomes whole."""

    def __init__(self) -> None:
        self.depth = 0
        self.begun = False
        self.whole = False
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> int:
        """How many characters belong to the value; those after it are not looked at."""
        for at, character in enumerate(text):
            if self.whole:
                return at
            self.step(character)
        return len(text)

    def step(self, character: str) -> None:
        self.begun = self.begun or not character.isspace()
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
        self.whole = self.depth == 0 and not self._in_string


@dataclass(frozen=True, slots=True)
class ValueDelta:
    """More of the value of a key, as it is written."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class CompleteValue:
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class ObjectEnd:
    pass


Found = ValueDelta | CompleteValue | ObjectEnd


class ObjectReader:
    """Walks over JSON objects that stand one after another, in a list or not, key by key."""

    def __init__(self) -> None:
        self._step = self._outside
        self._text: list[str] = []
        self._key = ""
        self._value = JsonScanner()
        self._found: list[Found] = []
        self._piece: list[str] = []
        self._ignored: list[str] = []

    @property
    def key(self) -> str:
        return self._key

    @property
    def waits(self) -> bool:
        """Whether a key was read whose value has not begun."""
        return self._step == self._before_value

    @property
    def ignored(self) -> str:
        """What stands where JSON has no place for it."""
        return "".join(self._ignored)

    @property
    def unfinished(self) -> str:
        """The value that has begun and not ended."""
        return "".join(self._text) if self._step == self._in_value else ""

    @property
    def hanging(self) -> str:
        """All that has begun and not ended: a key, or a key and its value."""
        if self._step == self._in_key:
            return "".join(self._text)
        return f"{self._key}: {self.unfinished}" if self.waits or self._step == self._in_value else ""

    def feed(self, text: str) -> list[Found]:
        for character in text:
            self._step(character)
        self._flush_piece()
        found, self._found = self._found, []
        return found

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
        if self._value.whole:
            self._key = decode_string("".join(self._text))
            self._step = self._before_value

    def _before_value(self, character: str) -> None:
        if character.isspace() or character == ":":
            return
        self._text, self._value = [], JsonScanner()
        self._step = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        bare = bool(self._text) and self._text[0] not in '{["'
        if bare and character in ",}]":
            self._end_value()
            self._after_value(character)
            return
        self._text.append(character)
        self._piece.append(character)
        self._value.step(character)
        if self._value.whole and not bare:
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
        self._found.append(CompleteValue(self._key, "".join(self._text).strip()))
        self._step = self._after_value

    def _end_object(self) -> None:
        self._found.append(ObjectEnd())
        self._step = self._outside

    def _flush_piece(self) -> None:
        if self._piece:
            self._found.append(ValueDelta(self._key, "".join(self._piece)))
            self._piece = []


def decode_string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    return value if isinstance(value, str) else text
