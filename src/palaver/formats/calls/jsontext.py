"""JSON as it streams in: where values begin and end, without waiting for the whole."""

from __future__ import annotations

import json
from dataclasses import dataclass


class JsonText:
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
class Piece:
    """More of the value of a key, as it is written."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Whole:
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class ObjectEnd:
    pass


Found = Piece | Whole | ObjectEnd


class ObjectWalk:
    """Walks over JSON objects that stand one after another, in a list or not, key by key."""

    def __init__(self) -> None:
        self._step = self._outside
        self._text: list[str] = []
        self._key = ""
        self._value = JsonText()
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
            self._text, self._value = [character], JsonText()
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
            self._key = decoded("".join(self._text))
            self._step = self._before_value

    def _before_value(self, character: str) -> None:
        if character.isspace() or character == ":":
            return
        self._text, self._value = [], JsonText()
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
        self._found.append(Whole(self._key, "".join(self._text).strip()))
        self._step = self._after_value

    def _end_object(self) -> None:
        self._found.append(ObjectEnd())
        self._step = self._outside

    def _flush_piece(self) -> None:
        if self._piece:
            self._found.append(Piece(self._key, "".join(self._piece)))
            self._piece = []


def decoded(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    return value if isinstance(value, str) else text
