"""JSON as it streams in: where values begin and end, without waiting for the whole."""

from __future__ import annotations

import json
from dataclasses import dataclass


class JsonText:
    """Follows one JSON value character by character."""

    def __init__(self) -> None:
        self.depth = 0
        self.begun = False
        self._in_string = False
        self._escaped = False

    @property
    def whole(self) -> bool:
        return self.begun and self.depth == 0 and not self._in_string

    def take(self, text: str) -> int:
        """How many characters belong to the value; those after it are not looked at."""
        for at, character in enumerate(text):
            self._step(character)
            if self.whole and character in '}]"':
                return at + 1
        return len(text)

    def _step(self, character: str) -> None:
        self.begun = self.begun or not character.isspace()
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


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
        self._text = ""
        self._key = ""
        self._value = JsonText()
        self._found: list[Found] = []
        self._piece = ""
        self.ignored = ""
        """What stands between objects and is neither white space nor a list's own marks."""

    @property
    def key(self) -> str:
        return self._key

    @property
    def waits(self) -> bool:
        """Whether a key was read whose value has not begun."""
        return self._step == self._before_value

    def feed(self, text: str) -> list[Found]:
        for character in text:
            self._step(character)
        self._flush_piece()
        found, self._found = self._found, []
        return found

    def _outside(self, character: str) -> None:
        if character == "{":
            self._step = self._before_key
        elif not character.isspace() and character not in "[],":
            self.ignored += character

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._text, self._value = character, JsonText()
            self._value.take(character)
            self._step = self._in_key
        elif character == "}":
            self._end_object()

    def _in_key(self, character: str) -> None:
        self._text += character
        self._value.take(character)
        if self._value.whole:
            self._key = decoded(self._text)
            self._step = self._before_value

    def _before_value(self, character: str) -> None:
        if character.isspace() or character == ":":
            return
        self._text, self._value = "", JsonText()
        self._step = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._text and self._value.depth == 0 and self._text[0] not in '{["' and character in ",}]":
            self._end_value()
            self._after_value(character)
            return
        self._text += character
        self._piece += character
        self._value.take(character)
        if self._value.whole and self._text[0] in '{["':
            self._end_value()

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._step = self._before_key
        elif character == "}":
            self._end_object()

    def _end_value(self) -> None:
        self._flush_piece()
        self._found.append(Whole(self._key, self._text.strip()))
        self._step = self._after_value

    def _end_object(self) -> None:
        self._found.append(ObjectEnd())
        self._step = self._outside

    def _flush_piece(self) -> None:
        piece, self._piece = self._piece, ""
        if piece:
            self._found.append(Piece(self._key, piece))


def decoded(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    return value if isinstance(value, str) else text
