"""Calls with bare keys in braces and strings between special quotation marks.

<|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palaver.events import ReadEvent
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.call_reader import CallRegistry
from palaver.formats.tool_calls.lark import (
    ARRAY_KEYWORDS,
    LarkBuilder,
    ToolGrammar,
    additional_keys,
    check_argument_name,
    check_schema,
    check_tool_name,
    join_expressions,
    object_members,
    one_of,
    resolve_pointer,
    text_patterns,
    unsupported_schema,
)
from palaver.formats.tool_calls.samples import (
    NAME,
    NUMBER_KEY,
    NUMBER_VALUE,
    TEXT_KEY,
    TEXT_VALUE,
    CallFrame,
    CallSamples,
    learn_frame,
)
from palaver.messages import Tool, ToolCall
from palaver.phases import Phase

NAME_SLOT, BRACES_SLOT, TEXT_SLOT, GLUE = "name", "braces", "text", "glue"


@dataclass(frozen=True, slots=True)
class Syntax:
    frame: CallFrame
    quote: str
    family: Literal["braces"] = "braces"


def learn(samples: CallSamples) -> Syntax | None:
    pattern = rf"{NAME}\{{{TEXT_KEY}:(?P<quote>\S+?){re.escape(TEXT_VALUE)}(?P=quote),\s*{NUMBER_KEY}:{NUMBER_VALUE}\}}"
    found = re.search(pattern, samples.one)
    if found is None:
        return None
    return Syntax(learn_frame(samples, found.start(), found.end()), found["quote"])


def add_states(builder: StateMachineBuilder, syntax: Syntax, origins: tuple[int, ...], back: int) -> None:
    glue = builder.add_state(Phase.TOOL_CALL, GLUE)
    name = builder.add_state(Phase.TOOL_CALL, NAME_SLOT)
    braces = builder.add_state(Phase.TOOL_CALL, BRACES_SLOT)
    text = builder.add_state(Phase.TOOL_CALL, TEXT_SLOT)
    syntax.frame.add_openings(builder, origins, glue, name)
    builder.add_text_marker(name, "{", braces, keep=True)
    builder.add_marker(braces, syntax.quote, text)
    builder.add_marker(text, syntax.quote, braces)
    syntax.frame.add_closings(builder, braces, glue, name, back)


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    out = [syntax.frame.section_open]
    for place, call in enumerate(calls):
        out += [syntax.frame.between(place), call.name]
        is_open = last_is_open and place == len(calls) - 1
        out.append(_braces(call.arguments, syntax.quote))
        if is_open:
            return "".join(out)
        out.append(syntax.frame.call_close)
    return "".join([*out, syntax.frame.section_close])


def _braces(text: str, quote: str) -> str:
    """JSON arguments in this notation: bare keys, strings between the model's quotation marks."""

    def convert(found: re.Match[str]) -> str:
        if found[0].startswith(","):
            return ","
        if found["colon"]:
            return f"{found['text']}:" if _KEY.fullmatch(found["text"]) else f"{_quoted(found['text'], quote, True)}:"
        return _quoted(found["text"], quote, bool(found["end"]))

    return _JSON_PART.sub(convert, text)


_JSON_PART = re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)(?:(?P<end>")(?P<colon>\s*:\s*)?|\\?\Z)|,\s+', re.S)
"""A string, a key, or a comma with white space after it."""


def _quoted(text: str, quote: str, closed: bool) -> str:
    try:
        plain = json.loads(f'"{text}"')
    except ValueError:
        plain = text
    return f"{quote}{plain}{quote if closed else ''}"


_KEY = re.compile(r"[\w.$/@-]+")
_NUMBERS = frozenset(("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_KINDS = ("null", "boolean", "number", "string", "array", "object")


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    return syntax.frame.grammar(lark, [_ToolGrammar(syntax, tool, lark).call() for tool in tools])


class _ToolGrammar(ToolGrammar):
    """The grammar of calls to one tool: its schema in this notation."""

    def __init__(self, syntax: Syntax, tool: Tool, lark: LarkBuilder) -> None:
        super().__init__(tool, lark)
        self._quote = syntax.quote
        self._rules: dict[str, str] = {}
        """The names of rules by the `$ref` that they stand for."""

    def call(self) -> str:
        return self._lark.rule(
            join_expressions(self._lark.literal(check_tool_name(self._tool)), self._object(self._root))
        )

    def _value(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return self._reference("", {"type": list(_KINDS)})
        if not isinstance(schema, Mapping):
            raise unsupported_schema(self._tool, "a schema is neither an object nor true")
        if "$ref" in schema:
            return self._reference(schema["$ref"], None)
        options = schema.get("anyOf", schema.get("oneOf"))
        if options is not None:
            check_schema(self._tool, schema, frozenset(("anyOf", "oneOf")))
            return one_of([self._value(option) for option in options])
        if "enum" in schema or "const" in schema:
            return one_of([self._constant(value) for value in schema.get("enum", [schema.get("const")])])
        kinds = schema["type"] if "type" in schema else self._infer_type(schema)
        return one_of([self._typed_value(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)])

    def _reference(self, pointer: str, schema: Any) -> str:
        """A separate rule for a value that may be recursive."""
        if pointer not in self._rules:
            self._rules[pointer] = name = self._lark.declare_rule()
            target = resolve_pointer(self._tool, self._root, pointer) if schema is None else schema
            self._lark.define_rule(name, self._value(target))
        return self._rules[pointer]

    def _infer_type(self, schema: Mapping[str, Any]) -> str:
        for keyword, kind in (("properties", "object"), ("items", "array"), ("pattern", "string")):
            if keyword in schema:
                return kind
        raise unsupported_schema(self._tool, f"a value has no type beside {', '.join(schema)}")

    def _typed_value(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                stated = {key: value for key, value in schema.items() if schema.get("type") == kind or key != "type"}
                return self._text(*text_patterns(self._tool, stated))
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "null" | "boolean" | "integer" | "number":
                alone = schema.get("type") == kind
                if alone:
                    check_schema(self._tool, schema, _NUMBERS)
                bounds = {key: value for key, value in schema.items() if key in _NUMBERS} if alone else {}
                return self._lark.json({**bounds, "type": kind})
        raise unsupported_schema(self._tool, f"there is no type {kind!r}")

    def _text(self, *patterns: str) -> str:
        return join_expressions(self._lark.literal(self._quote), self._lark.until(self._quote, *patterns))

    def _constant(self, value: Any) -> str:
        lark = self._lark
        if isinstance(value, str):
            return lark.literal(f"{self._quote}{value}{self._quote}")
        if isinstance(value, Mapping | list):
            raise unsupported_schema(self._tool, "a list of values may have texts, numbers, booleans and null only")
        return lark.literal(json.dumps(value))

    def _array(self, schema: Mapping[str, Any]) -> str:
        lark = self._lark
        if schema.get("type") == "array":
            check_schema(self._tool, schema, ARRAY_KEYWORDS)
        min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
        item = lark.rule(self._value(schema.get("items", {})))
        max_more = "" if max_items is None else max(max_items - 1, 0)
        more = f"({join_expressions(lark.literal(','), item)}){{{max(min_items - 1, 0)},{max_more}}}"
        items = "" if max_items == 0 else join_expressions(item, more)
        inside = items if min_items or not items else f"({items})?"
        return join_expressions(lark.literal("["), inside, lark.literal("]"))

    def _object(self, schema: Mapping[str, Any]) -> str:
        lark = self._lark
        members = object_members(
            self._tool, schema if schema.get("type") == "object" else {"type": "object"}, self._root
        )
        items = []
        for argument in members.properties:
            key = lark.literal(f"{check_argument_name(self._tool, argument.key, _KEY)}:")
            items.append((join_expressions(key, self._value(argument.schema)), argument.required))
        more = ""
        if members.additional is not False:
            more = join_expressions(additional_keys(lark, members), lark.literal(":"), self._value(members.additional))
        return join_expressions(lark.literal("{"), lark.sequence(items, ",", more), lark.literal("}"))


class Calls:
    def __init__(self, syntax: Syntax, registry: CallRegistry) -> None:
        self._registry = registry
        self._frame = syntax.frame
        self._name = ""
        self._word = ""
        self._last = ""
        self._depth = 0
        self._started = False

    def enter(self, slot: str) -> list[ReadEvent]:
        previous, self._last = self._last, slot
        if slot == NAME_SLOT:
            events = self.leave()
            self._name, self._started, self._depth = "", False, 0
            return events
        if slot == BRACES_SLOT and not self._started:
            self._started = True
            return [self._registry.open(self._frame.without_prefix(self._name.strip()).removeprefix("call:"))]
        if slot == TEXT_SLOT or (slot == BRACES_SLOT and previous == TEXT_SLOT):
            return [*self._flush(), *self._registry.arguments('"')]
        return []

    def truncate(self) -> list[ReadEvent]:
        return self.leave()

    def feed(self, slot: str, text: str) -> list[ReadEvent]:
        if slot == NAME_SLOT:
            self._name += text
            return []
        if slot == TEXT_SLOT:
            return self._registry.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if slot == BRACES_SLOT:
            return self._registry.arguments("".join(map(self._convert, text)))
        self._registry.ignore(text)
        return []

    def leave(self) -> list[ReadEvent]:
        self._ignore_unopened()
        return self._flush()

    def _ignore_unopened(self) -> None:
        if not self._started:
            self._registry.ignore(f" {self._name} ")

    def _convert(self, character: str) -> str:
        """A word before a colon is a key, any other word a value."""
        if self._started and not self._depth and character != "{":
            self._registry.ignore(character)
            return ""
        if character not in "{}[],:":
            self._word += character
            return ""
        self._depth += (character in "{[") - (character in "}]")
        word, self._word = self._word.strip(), ""
        if character == ":" and word:
            return json.dumps(word, ensure_ascii=False) + ": "
        space = ", " if character == "," else character
        return word + space

    def _flush(self) -> list[ReadEvent]:
        word, self._word = self._word.strip(), ""
        return self._registry.arguments(word)
