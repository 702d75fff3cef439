"""Escapes control text in contents: a mark is put inside it before rendering and removed after tokenization.

Templates trim, split and rewrite contents, so the mark stands next to the characters it protects. It is one private-use
character that occurs nowhere else in the conversation, or a run of one that is longer than any such run there. Contents
without control text carry no mark and render unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))
_RUN = re.compile(f"{_PRIVATE_USE[0]}+")
_BRACKETS = "<>[]/|｜"
_TEMPLATE_KEYS = frozenset(
    "role content name type function functions tool tools tool_calls tool_call_id id arguments parameters properties "
    "description required enum items default text thinking reasoning reasoning_content".split()
)
"""Keys that templates read by name."""


class ControlTextEscaper:
    """Escapes the given control strings."""

    def __init__(self, controls: Iterable[str]) -> None:
        longest_first = sorted({c for c in controls if len(c) > 1}, key=lambda c: (-len(c), c))
        pattern = "|".join(f"{re.escape(c[0])}(?={re.escape(c[1:])})" for c in longest_first)
        self._pattern = re.compile(pattern) if pattern else None
        self._prefixes = {c[:size] for c in longest_first for size in range(1, len(c))}
        self._suffixes = {c[size:] for c in longest_first for size in range(1, len(c))}
        self._bracketed = {c.strip(_BRACKETS) for c in longest_first} - {""}
        self._longest = max(map(len, longest_first), default=0)
        self._first_letters = {c[0] for c in longest_first}
        self._last_letters = {c[-1] for c in longest_first}

    def escape(self, values: Mapping[str, Any]) -> EscapedContents:
        """The values with a mark inside every control string, and inside a partial one at either end of a text."""
        mark = _free_mark(values)
        return EscapedContents({name: self._escape(value, mark) for name, value in values.items()}, mark)

    def _escape(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._escape_text(value, mark)
        if isinstance(value, Mapping):
            return {self._escape_key(key, mark): self._escape_item(key, item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(item, mark) for item in value]
        return value

    def _escape_item(self, key: Any, item: Any, mark: str) -> Any:
        return self._escape_name(item, mark) if key == "name" and isinstance(item, str) else self._escape(item, mark)

    def _escape_key(self, key: Any, mark: str) -> Any:
        return self._escape_name(key, mark) if isinstance(key, str) and key not in _TEMPLATE_KEYS else key

    def _escape_name(self, name: str, mark: str) -> str:
        """Templates write the names of tools and arguments between brackets, which may complete a control string."""
        return name[:1] + mark + name[1:] if name in self._bracketed else self._escape_text(name, mark)

    def _escape_text(self, text: str, mark: str) -> str:
        if self._pattern is None or not text:
            return text
        text = self._pattern.sub(lambda match: match[0] + mark, text)
        return self._escape_end(self._escape_start(text, mark), mark)

    def _escape_start(self, text: str, mark: str) -> str:
        """Marks a text that starts with the end of a control string: the template may write the rest before it."""
        at = len(text) - len(text.lstrip())
        if self._last_letters.isdisjoint(text[at : at + self._longest]):
            return text
        if any(text[at : at + size] in self._suffixes for size in range(1, self._longest)):
            return text[:at] + mark + text[at:]
        return text

    def _escape_end(self, text: str, mark: str) -> str:
        """Marks a text that ends with the start of a control string: the template may write the rest after it."""
        stop = len(text.rstrip())
        if self._first_letters.isdisjoint(text[max(0, stop - self._longest) : stop]):
            return text
        for at in range(max(0, stop - self._longest), stop):
            if text[at:stop] in self._prefixes:
                return text[: at + 1] + mark + text[at + 1 :]
        return text


@dataclass(frozen=True, slots=True)
class EscapedContents:
    values: dict[str, Any]
    mark: str


def _free_mark(values: Any) -> str:
    """A mark that occurs in no text of the values. Linear in the length of the texts."""
    used = set[str]().union(*map(set, _texts(values)))
    free = next((character for character in _PRIVATE_USE if character not in used), None)
    if free is not None:
        return free
    longest = max((len(run[0]) for text in _texts(values) for run in _RUN.finditer(text)), default=0)
    return _PRIVATE_USE[0] * (longest + 1)


def _texts(value: Any) -> Iterator[str]:
    """All texts with characters beyond ASCII, keys included."""
    if isinstance(value, str):
        if not value.isascii():
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
