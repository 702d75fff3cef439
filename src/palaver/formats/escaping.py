"""Control text in contents is text: a mark is put inside it before rendering and taken out afterwards.

Templates trim, split and rewrite contents, so the mark travels with the characters it guards. It is one
private-use character that occurs nowhere else in the conversation, or a run of one that is longer than any such run
there; contents without control text carry none, and therefore render exactly as without it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))
_RUN = re.compile(f"{_PRIVATE_USE[0]}+")
_BRACKETS = "<>[]/|｜"
_ASKED_FOR = frozenset(
    "role content name type function functions tool tools tool_calls tool_call_id id arguments parameters properties "
    "description required enum items default text thinking reasoning reasoning_content".split()
)
"""Keys that templates ask for by their names."""


class ControlTextEscaper:
    """Guards contents against the given control strings."""

    def __init__(self, controls: Iterable[str]) -> None:
        longest_first = sorted({c for c in controls if len(c) > 1}, key=lambda c: (-len(c), c))
        pattern = "|".join(f"{re.escape(c[0])}(?={re.escape(c[1:])})" for c in longest_first)
        self.whole = re.compile(pattern) if pattern else None
        self.starts = {c[:size] for c in longest_first for size in range(1, len(c))}
        self.ends = {c[size:] for c in longest_first for size in range(1, len(c))}
        self.insides = {c.strip(_BRACKETS) for c in longest_first} - {""}
        self.longest = max(map(len, longest_first), default=0)
        self.firsts = {c[0] for c in longest_first}
        self.lasts = {c[-1] for c in longest_first}

    def guard(self, values: Mapping[str, Any]) -> EscapedContents:
        """The values with a mark inside every control string in their texts, and where one begins or ends."""
        mark = _free_mark(values)
        return EscapedContents({name: self._guard(value, mark) for name, value in values.items()}, mark)

    def _guard(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._guard_text(value, mark)
        if isinstance(value, Mapping):
            return {self._guard_key(key, mark): self._guard_under(key, item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, mark) for item in value]
        return value

    def _guard_under(self, key: Any, item: Any, mark: str) -> Any:
        return self._guard_name(item, mark) if key == "name" and isinstance(item, str) else self._guard(item, mark)

    def _guard_key(self, key: Any, mark: str) -> Any:
        return self._guard_name(key, mark) if isinstance(key, str) and key not in _ASKED_FOR else key

    def _guard_name(self, name: str, mark: str) -> str:
        """Templates put names of tools and arguments between brackets of their own."""
        return name[:1] + mark + name[1:] if name in self.insides else self._guard_text(name, mark)

    def _guard_text(self, text: str, mark: str) -> str:
        if self.whole is None or not text:
            return text
        text = self.whole.sub(lambda match: match[0] + mark, text)
        return self._guard_end(self._guard_start(text, mark), mark)

    def _guard_start(self, text: str, mark: str) -> str:
        """Where the text begins with the end of a control string, whose beginning may stand before it."""
        at = len(text) - len(text.lstrip())
        if self.lasts.isdisjoint(text[at : at + self.longest]):
            return text
        if any(text[at : at + size] in self.ends for size in range(1, self.longest)):
            return text[:at] + mark + text[at:]
        return text

    def _guard_end(self, text: str, mark: str) -> str:
        """Where the text ends with the beginning of a control string, whose end may come after it."""
        stop = len(text.rstrip())
        if self.firsts.isdisjoint(text[max(0, stop - self.longest) : stop]):
            return text
        for at in range(max(0, stop - self.longest), stop):
            if text[at:stop] in self.starts:
                return text[: at + 1] + mark + text[at + 1 :]
        return text


@dataclass(frozen=True, slots=True)
class EscapedContents:
    values: dict[str, Any]
    mark: str


def _free_mark(values: Any) -> str:
    """A mark that no text of the values holds. Takes time in proportion to the texts, whatever they are."""
    taken = set[str]().union(*map(set, _texts(values)))
    free = next((character for character in _PRIVATE_USE if character not in taken), None)
    if free is not None:
        return free
    longest = max((len(run[0]) for text in _texts(values) for run in _RUN.finditer(text)), default=0)
    return _PRIVATE_USE[0] * (longest + 1)


def _texts(value: Any) -> Iterator[str]:
    """All texts that are not ASCII alone, keys included."""
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
