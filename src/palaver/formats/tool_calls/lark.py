"""Grammars of calls, in the notation of Lark: literals in which markers that are tokens go by their ids, JSON by its
schema, and text up to a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palaver.formats.markers import split_marker

ANYTHING = "(?s:.*)"
_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPACE = {"whitespace_pattern": r"[ \n\t]{0,24}"}
"""Between the parts of JSON: enough for any way of writing it, and an end to it."""


def escape_regex(text: str) -> str:
    """A pattern that is this text."""
    plain = _META.sub(r"\\\g<0>", text)
    return "".join(_CONTROL.get(character, character) for character in plain)


def join_expressions(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


def _or(expression: str, other: str) -> str:
    return f"({expression} | {other})" if other else f"({expression})?"


def one_of(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


class LarkBuilder:
    """Gathers the rules of one grammar. What is the same is written once."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        longest_first = sorted(control, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if control else None
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self.ids: set[int] = set()
        """The token ids that the grammar names."""

    def text(self, start: str) -> str:
        rules = (f"{name}: {body}" for name, body in self._rules.items())
        return "\n".join([f"start: {start}", *rules])

    def rule(self, body: str, name: str = "") -> str:
        return self._named(body, name or f"r{len(self._rules)}")

    def pending(self) -> str:
        """The name of a rule whose body comes later: for what refers to itself."""
        name = f"r{len(self._rules)}"
        self._rules[name] = ""
        return name

    def fill(self, name: str, body: str) -> None:
        self._rules[name] = body

    def pattern(self, *patterns: str, but: Sequence[str] = ()) -> str:
        """Text that all the patterns match as a whole, and none of `but` does."""
        bodies = [*(f"/{one}/" for one in patterns), *(f"~/{one}/" for one in but)]
        return self._named(" & ".join(bodies), f"T{len(self._rules)}")

    def json(self, schema: Any) -> str:
        shown = {**schema, "x-guidance": _SPACE} if isinstance(schema, Mapping) else schema
        return self._named(f"%json {json.dumps(shown, ensure_ascii=False)}", f"j{len(self._rules)}")

    def literal(self, text: str) -> str:
        return join_expressions(*(self._piece(run) for run in self._runs(text)))

    def until(self, close: str, *contents: str, but: str = "") -> str:
        """Text after the patterns that does not match `but`, then the marker. One that is text stands nowhere else."""
        first = next(iter(split_marker(close, self._control)), "")
        runs = list(self._runs(close))
        head = runs.pop(0) if runs and isinstance(runs[0], str) else ""
        assert isinstance(head, str)
        at = head.find(first) + len(first) if first and first not in self._control and first in head else len(head)
        head, rest = head[:at], head[at:]
        never = [f"{but}{escape_regex(head)}"] if but else []
        never += [f"(?s:.*){escape_regex(first)}(?s:.+)"] if head.endswith(first) and head.strip() else []
        said = self.pattern(*(f"{content}{escape_regex(head)}" for content in contents), but=never)
        return join_expressions(said, self.literal(rest), *(self._piece(run) for run in runs))

    def series(self, items: Sequence[tuple[str, bool]], between: str, more: str = "") -> str:
        """Items in their order, each with whether it must come; then `more`, any number of times."""
        parting = self.literal(between)
        after = f"({join_expressions(parting, more)})*" if more else ""
        first = f"({join_expressions(more, after)})?" if more else ""
        for item, required in reversed(items):
            further, fresh = join_expressions(parting, item, after), join_expressions(item, after)
            after = self.rule(further if required else _or(further, after))
            first = self.rule(fresh if required else _or(fresh, first))
        return first

    def is_text(self, marker: str) -> str:
        """The first letter of a marker that is ordinary text, and could be spelled by what stands before it."""
        first = next(iter(split_marker(marker, self._control)), "")
        return "" if first in self._control else first[:1]

    def _named(self, body: str, name: str) -> str:
        if body not in self._names:
            self._names[body] = name
            self._rules[name] = body
        return self._names[body]

    def _piece(self, run: str | int) -> str:
        if isinstance(run, str):
            return json.dumps(run, ensure_ascii=False)
        self.ids.add(run)
        return f"<[{run}]>"

    def _runs(self, text: str) -> Iterator[str | int]:
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > at:
                yield text[at : match.start()]
            yield self._control[match[0]]
            at = match.end()
        if at < len(text):
            yield text[at:]
