"""Calls written as Python calls in a list.

<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palaver.events import ReadEvent
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls import json_calls
from palaver.formats.tool_calls.call_reader import CallRegistry
from palaver.formats.tool_calls.lark import (
    LarkBuilder,
    accepts_type,
    additional_keys,
    arguments_schema,
    check_tool_name,
    join_expressions,
    object_members,
    one_of,
    unsupported_schema,
    with_definitions,
)
from palaver.formats.tool_calls.samples import (
    LISTED_VALUE,
    NAME,
    NUMBER_KEY,
    OTHER_NAME,
    TEXT_KEY,
    CallSamples,
    strip_turn_end,
)
from palaver.messages import Tool, ToolCall
from palaver.phases import Phase

SLOT = "python_calls"


@dataclass(frozen=True, slots=True)
class Syntax:
    opening: str
    closing: str
    quote: str = '"'
    """The quotation mark around strings."""
    json_constants: bool = False
    """Whether true, false and null are written as in JSON instead of Python."""
    json_values: bool = True
    """Whether lists and objects are written as in JSON instead of Python."""
    family: Literal["python_calls"] = "python_calls"


def learn(samples: CallSamples) -> Syntax | None:
    found = re.search(rf"\[?{NAME}\(\s*{TEXT_KEY}\s*=\s*(['\"])?", samples.one)
    if found is None:
        return None
    text = samples.two if samples.two is not None and OTHER_NAME in samples.two else samples.one
    end = text.rindex(")") + 1
    end += text[end : end + 1] == "]"
    listed = samples.listed or ""
    return Syntax(
        samples.one[: found.start()].lstrip(),
        strip_turn_end(text[end:], samples.ends),
        found[1] or '"',
        json_constants=bool(re.search(rf"{NUMBER_KEY}\s*=\s*true", listed)),
        json_values=not re.search(rf"'{LISTED_VALUE}'|{LISTED_VALUE}.,\s*True\]", listed),
    )


def add_states(builder: StateMachineBuilder, syntax: Syntax, origins: tuple[int, ...], back: int) -> None:
    state = builder.add_state(Phase.TOOL_CALL, SLOT, quotes=b"\"'")
    for origin in origins:
        builder.add_marker(origin, syntax.opening, state, fallback=origin)
    builder.add_marker(state, syntax.closing, back)


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    written = [_call(call, syntax, last_is_open and place == len(calls) - 1) for place, call in enumerate(calls)]
    text = syntax.opening + "[" + ", ".join(written)
    return text if last_is_open else text + "]" + syntax.closing


def _call(call: ToolCall, syntax: Syntax, is_open: bool) -> str:
    if not call.arguments:
        return call.name
    values, open_key = _split_arguments(call.arguments)
    if isinstance(values, dict):
        arguments = [f"{key}={_python(value, syntax)}" for key, value in values.items()]
        inside = ", ".join([*arguments, *([f"{open_key}="] if open_key else [])])
    else:  # a positional argument
        inside = _python(values, syntax)
    return f"{call.name}({inside}" + ("" if is_open else ")")


def _split_arguments(text: str) -> tuple[Any, str]:
    """The value of complete or truncated arguments, and the key of an argument whose value is missing."""
    open_key = re.search(r'([{,]\s*)"(\w+)":\s*\Z', text)
    complete = text[: open_key.start()] + "{" * (open_key[1][0] == "{") if open_key else text
    for end in ("", "}"):
        try:
            return json.loads(complete + end), open_key[2] if open_key else ""
        except ValueError:
            continue
    return {}, ""


def _python(value: object, syntax: Syntax) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value) if syntax.json_constants else repr(value)
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return text if syntax.json_values else repr(value)
    return text if syntax.quote == '"' else "'" + text[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    one = lark.rule(one_of([_tool_grammar(tool, lark) for tool in tools]))
    more = f"({join_expressions(lark.literal(', '), one)})*"
    return join_expressions(lark.literal(syntax.opening + "["), one, more, lark.literal("]" + syntax.closing))


def _tool_grammar(tool: Tool, lark: LarkBuilder) -> str:
    schema = arguments_schema(tool)
    members = object_members(tool, schema, schema)
    for argument in members.properties:
        if not argument.key.isidentifier():
            raise unsupported_schema(tool, f"{argument.key!r} can't be the name of an argument in Python")
    items = [
        (join_expressions(lark.literal(f"{argument.key}="), _value(argument.schema, schema, lark)), argument.required)
        for argument in members.properties
    ]
    more = ""
    if members.additional is not False:
        value = _value(members.additional, schema, lark)
        more = join_expressions(additional_keys(lark, members), lark.literal("="), value)
    return lark.rule(
        join_expressions(lark.literal(f"{check_tool_name(tool)}("), lark.sequence(items, ", ", more), lark.literal(")"))
    )


def _value(schema: Any, root: Mapping[str, Any], lark: LarkBuilder) -> str:
    """As JSON, which the reader accepts too, or one of Python's words for true, false and null."""
    words = [
        *(("True", "False") if accepts_type(schema, "boolean") else ()),
        *(("None",) if accepts_type(schema, "null") else ()),
    ]
    spelled = [lark.literal(word) for word in words]
    if isinstance(schema, Mapping) and schema.get("type") in ("boolean", "null") and spelled:
        return one_of(spelled)
    return one_of([lark.json(with_definitions(schema, root)), *spelled])


_JSON = json_calls.Syntax("", "", ", ", "[", "]", "name", "arguments", None, "", "", "")
"""Calls that are JSON objects, which some models write between the same markers."""


class Calls:
    """Scans the text character by character; an argument is emitted when it is complete. Calls that start with a brace
    are read as JSON."""

    def __init__(self, syntax: Syntax, registry: CallRegistry) -> None:
        self._registry = registry
        self._start = ""
        self._json: json_calls.Calls | None = None
        self._text: list[str] = []
        self._name = ""
        self._quote = ""
        self._escaped = False
        self._depth = 0
        self._in_call = False
        self._has_key = False
        self._count = 0

    def enter(self, slot: str) -> list[ReadEvent]:
        return []

    def leave(self) -> list[ReadEvent]:
        return self.truncate()

    def truncate(self) -> list[ReadEvent]:
        if self._json is not None:
            return self._json.truncate()
        self._registry.ignore(f" {self._pop_text()} ")
        return []

    def feed(self, slot: str, text: str) -> list[ReadEvent]:
        if self._json is None and not self._start.strip(" \n\t["):
            start = self._start
            self._start += text
            if self._start.strip(" \n\t[").startswith("{"):
                self._json = json_calls.Calls(_JSON, self._registry)
                text = start + text
        if self._json is not None:
            return self._json.feed(slot, text)
        return [event for character in text for event in self._feed_character(character)]

    def _feed_character(self, character: str) -> list[ReadEvent]:
        if self._quote:
            self._text.append(character)
            if not self._escaped and character == self._quote:
                self._quote = ""
            self._escaped = character == "\\" and not self._escaped
            return []
        if not self._in_call:
            return self._outside(character)
        return self._inside(character)

    def _outside(self, character: str) -> list[ReadEvent]:
        if character == "(":
            *before, self._name = self._pop_text().rsplit(maxsplit=1) or [""]
            self._registry.ignore(f" {' '.join(before)} ")
            self._in_call, self._count, self._depth = True, 0, 0
            return [self._registry.open(self._name), *self._registry.arguments("{")]
        self._text.append(" " if character in "[]," else character)
        return []

    def _pop_text(self) -> str:
        text, self._text = "".join(self._text).strip(), []
        return text

    def _inside(self, character: str) -> list[ReadEvent]:
        if character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}" and self._depth:
            self._depth -= 1
        elif character == ")":
            self._in_call = False
            return [*self._end_argument(), *self._registry.arguments("}")]
        elif character == "," and not self._depth:
            return self._end_argument()
        elif character == "=" and not self._depth and not self._has_key and "".join(self._text).strip().isidentifier():
            return self._key(self._pop_text())
        self._text.append(character)
        return []

    def _key(self, key: str) -> list[ReadEvent]:
        before = ", " if self._count else ""
        self._count += 1
        self._has_key = True
        return self._registry.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")

    def _end_argument(self) -> list[ReadEvent]:
        """Ends an argument. A positional one gets the name of the tool's parameter at its position."""
        text, has_key = self._pop_text(), self._has_key
        if not text and not has_key:
            return []
        key = [] if has_key else self._key(self._registry.parameter(self._name, self._count))
        self._has_key = False
        return [*key, *self._registry.arguments(_as_json(text) if text else "null")]


def _as_json(text: str) -> str:
    """A Python or JSON literal as JSON; anything else as a JSON string."""
    try:
        json.loads(text)
    except ValueError:
        pass
    else:
        return text
    words = re.sub(r"\btrue\b", "True", re.sub(r"\bfalse\b", "False", re.sub(r"\bnull\b", "None", text)))
    for source in (text, words):
        try:
            return json.dumps(ast.literal_eval(source), ensure_ascii=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)
