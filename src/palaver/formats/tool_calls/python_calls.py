"""Calls written as Python calls in a list.

<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palaver.events import ReadEvent
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.call_reader import CallRegistry
from palaver.formats.tool_calls.lark import LarkBuilder, join_expressions, one_of
from palaver.formats.tool_calls.samples import NAME, OTHER_NAME, TEXT_KEY, CallSamples, strip_turn_end
from palaver.formats.tool_calls.schemas import (
    admits,
    arguments_schema,
    check_tool_name,
    object_members,
    other_keys,
    unsupported_schema,
    with_definitions,
)
from palaver.messages import Tool, ToolCall
from palaver.phases import Phase

SLOT = "python_calls"


@dataclass(frozen=True, slots=True)
class Syntax:
    opening: str
    closing: str


def learn(samples: CallSamples) -> Syntax | None:
    found = re.search(rf"\[?{NAME}\(\s*{TEXT_KEY}\s*=", samples.one)
    if found is None:
        return None
    text = samples.two if samples.two is not None and OTHER_NAME in samples.two else samples.one
    end = text.rindex(")") + 1
    end += text[end : end + 1] == "]"
    return Syntax(samples.one[: found.start()].lstrip(), strip_turn_end(text[end:], samples.ends))


def add_states(builder: StateMachineBuilder, syntax: Syntax, froms: tuple[int, ...], back: int) -> None:
    state = builder.state(Phase.TOOL_CALL, SLOT, quotes=b"\"'")
    for origin in froms:
        builder.on(origin, syntax.opening, state, fallback=origin)
    builder.on(state, syntax.closing, back)


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    written = [_call(call, last_is_open and place == len(calls) - 1) for place, call in enumerate(calls)]
    text = syntax.opening + "[" + ", ".join(written)
    return text if last_is_open else text + "]" + syntax.closing


def _call(call: ToolCall, is_open: bool) -> str:
    if not call.arguments:
        return call.name
    try:
        values = json.loads(call.arguments)
    except ValueError:
        return f"{call.name}("
    inside = ", ".join(f"{key}={_python(value)}" for key, value in values.items())
    return f"{call.name}({inside}" + ("" if is_open else ")")


def _python(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    one = lark.rule(one_of([_held(tool, lark) for tool in tools]))
    more = f"({join_expressions(lark.literal(', '), one)})*"
    return join_expressions(lark.literal(syntax.opening + "["), one, more, lark.literal("]" + syntax.closing))


def _held(tool: Tool, lark: LarkBuilder) -> str:
    schema = arguments_schema(tool)
    found = object_members(tool, schema, schema)
    for argument in found.listed:
        if not argument.key.isidentifier():
            raise unsupported_schema(tool, f"{argument.key!r} can't be the name of an argument in Python")
    items = [
        (join_expressions(lark.literal(f"{one.key}="), _value(one.schema, schema, lark)), one.required)
        for one in found.listed
    ]
    more = ""
    if found.others is not False:
        more = join_expressions(other_keys(lark, found), lark.literal("="), _value(found.others, schema, lark))
    return lark.rule(
        join_expressions(lark.literal(f"{check_tool_name(tool)}("), lark.series(items, ", ", more), lark.literal(")"))
    )


def _value(schema: Any, root: Mapping[str, Any], lark: LarkBuilder) -> str:
    """As JSON, which is read too, but for the words that Python spells otherwise."""
    words = [*(("True", "False") if admits(schema, "boolean") else ()), *(("None",) if admits(schema, "null") else ())]
    spelled = [lark.literal(word) for word in words]
    if isinstance(schema, Mapping) and schema.get("type") in ("boolean", "null") and spelled:
        return one_of(spelled)
    return one_of([lark.json(with_definitions(schema, root)), *spelled])


class Calls:
    """Follows the text from bracket to bracket; an argument is told when it is whole."""

    def __init__(self, syntax: Syntax, opened: CallRegistry) -> None:
        self._opened = opened
        self._text: list[str] = []
        self._name = ""
        self._quote = ""
        self._escaped = False
        self._depth = 0
        self._in_call = False
        self._keyed = False
        self._count = 0

    def enter(self, slot: str) -> list[ReadEvent]:
        return []

    def leave(self) -> list[ReadEvent]:
        return self.cut()

    def cut(self) -> list[ReadEvent]:
        self._opened.ignore(f" {self._take()} ")
        return []

    def say(self, slot: str, text: str) -> list[ReadEvent]:
        return [event for character in text for event in self._step(character)]

    def _step(self, character: str) -> list[ReadEvent]:
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
            *before, self._name = self._take().rsplit(maxsplit=1) or [""]
            self._opened.ignore(f" {' '.join(before)} ")
            self._in_call, self._count, self._depth = True, 0, 0
            return [self._opened.open(self._name), *self._opened.arguments("{")]
        self._text.append(" " if character in "[]," else character)
        return []

    def _take(self) -> str:
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
            return [*self._argument_ends(), *self._opened.arguments("}")]
        elif character == "," and not self._depth:
            return self._argument_ends()
        elif character == "=" and not self._depth and not self._keyed and "".join(self._text).strip().isidentifier():
            return self._key(self._take())
        self._text.append(character)
        return []

    def _key(self, key: str) -> list[ReadEvent]:
        before = ", " if self._count else ""
        self._count += 1
        self._keyed = True
        return self._opened.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")

    def _argument_ends(self) -> list[ReadEvent]:
        """An argument without a key goes by the name that the tool has for its place."""
        text, keyed = self._take(), self._keyed
        if not text and not keyed:
            return []
        key = [] if keyed else self._key(self._opened.parameter(self._name, self._count))
        self._keyed = False
        return [*key, *self._opened.arguments(_as_json(text) if text else "null")]


def _as_json(text: str) -> str:
    """A Python or JSON literal as JSON; anything else as a text."""
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
