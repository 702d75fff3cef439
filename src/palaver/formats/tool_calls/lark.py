"""Builds Lark grammars of tool calls from literals (control tokens in them as token ids), JSON schemas, and text up to
a marker."""

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
"""White space between the tokens of JSON is bounded, so that a model can't write it for ever."""


def escape_regex(text: str) -> str:
    """A pattern that matches exactly this text."""
    plain = _META.sub(r"\\\g<0>", text)
    return "".join(_CONTROL.get(character, character) for character in plain)


def join_expressions(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


def _either(expression: str, other: str) -> str:
    return f"({expression} | {other})" if other else f"({expression})?"


def one_of(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


class LarkBuilder:
    """Collects the rules of one grammar. Equal rules are written once."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        longest_first = sorted(control, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if control else None
        self._texts = {token_id: text for text, token_id in control.items()}
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self.ids: set[int] = set()
        """The token ids that the grammar refers to."""

    def build(self, start: str) -> str:
        """The text of the grammar with this start expression."""
        rules = (f"{name}: {body}" for name, body in self._rules.items())
        return "\n".join([f"start: {start}", *rules])

    def rule(self, body: str, name: str = "") -> str:
        return self._add_rule(body, name or f"r{len(self._rules)}")

    def declare_rule(self) -> str:
        """The name of a rule that is defined later, for recursive rules."""
        name = f"r{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define_rule(self, name: str, body: str) -> None:
        self._rules[name] = body

    def pattern(self, *patterns: str, excluding: Sequence[str] = ()) -> str:
        """Text that fully matches all patterns and none of `excluding`."""
        bodies = [*(f"/{one}/" for one in patterns), *(f"~/{one}/" for one in excluding)]
        return self._add_rule(" & ".join(bodies), f"T{len(self._rules)}")

    def json(self, schema: Any) -> str:
        schema = {**schema, "x-guidance": _SPACE} if isinstance(schema, Mapping) else schema
        return self._add_rule(f"%json {json.dumps(schema, ensure_ascii=False)}", f"j{len(self._rules)}")

    def literal(self, text: str) -> str:
        return join_expressions(*(self._piece(run) for run in self._runs(text)))

    def until(self, close: str, *contents: str, excluding: str = "") -> str:
        """Text that matches the patterns and not `excluding`, then the marker, which the text itself can't contain."""
        first = next(iter(split_marker(close, self._control)), "")
        runs = list(self._runs(close))
        head = runs.pop(0) if runs and isinstance(runs[0], str) else ""
        assert isinstance(head, str)
        at = head.find(first) + len(first) if first and first not in self._control and first in head else len(head)
        head, rest = head[:at], head[at:]
        never = [f"{excluding}{escape_regex(head)}"] if excluding else []
        if head.strip() and not rest and runs:  # the token after it decides; the text can't spell both
            spelled = close[: len(head)] + self._texts[int(runs[0])]
            never.append(f"(?s:.*){escape_regex(spelled)}(?s:.*)")
        elif head.strip() and head.endswith(first):
            never.append(f"(?s:.*){escape_regex(first)}(?s:.+)")
        text = self.pattern(*(f"{content}{escape_regex(head)}" for content in contents), excluding=never)
        return join_expressions(text, self.literal(rest), *(self._piece(run) for run in runs))

    def sequence(self, items: Sequence[tuple[str, bool]], separator: str, more: str = "") -> str:
        """Items in order, each with whether it is required; then `more`, any number of times."""
        between = self.literal(separator)
        after = f"({join_expressions(between, more)})*" if more else ""
        first = f"({join_expressions(more, after)})?" if more else ""
        for item, required in reversed(items):
            further, fresh = join_expressions(between, item, after), join_expressions(item, after)
            after = self.rule(further if required else _either(further, after))
            first = self.rule(fresh if required else _either(fresh, first))
        return first

    def text_marker_start(self, marker: str) -> str:
        """The first character of a marker that is ordinary text, so that text before it could spell it; else empty."""
        first = next(iter(split_marker(marker, self._control)), "")
        return "" if first in self._control else first[:1]

    def _add_rule(self, body: str, name: str) -> str:
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
