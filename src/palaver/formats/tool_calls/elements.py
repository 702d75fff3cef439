"""Calls whose arguments are elements with the names of the arguments; lists and objects are nested elements.

<call><invoke name="f"><a>1</a><b><item>x</item></b></invoke></call>

All tags may have a prefix of their own, such as a control token before each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from palaver.events import ReadEvent
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.call_reader import CallRegistry, CompleteValue, ObjectReader, ValueDelta, decode_string
from palaver.formats.tool_calls.lark import (
    ANYTHING,
    ARRAY_KEYWORDS,
    LarkBuilder,
    ToolGrammar,
    check_argument_name,
    check_schema,
    check_tool_name,
    is_string,
    join_expressions,
    object_members,
    one_of,
    resolve_schema,
    text_patterns,
    unsupported_schema,
    with_definitions,
)
from palaver.formats.tool_calls.parameters import read_value
from palaver.formats.tool_calls.samples import (
    LISTED_VALUE,
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

NAME_SLOT, TAG_SLOT, VALUE_SLOT, CLOSING_SLOT, GLUE = "name", "tag", "value", "closing", "glue"
_TAG = re.compile(r"[\w.:-]+")
_MAX_DEPTH = 12


@dataclass(frozen=True, slots=True)
class Syntax:
    frame: CallFrame
    prefix: str
    """The text before every tag."""
    name_close: str
    """Between the name and the first argument."""
    between: str
    """Between two arguments."""
    item: str = ""
    """The tag of an item of a list. Empty if lists and objects are written as JSON."""
    family: Literal["elements"] = "elements"


def learn(samples: CallSamples) -> Syntax | None:
    text = samples.one
    found = re.search(rf"<{TEXT_KEY}>{TEXT_VALUE}(?P<prefix>[^\s\w]*)</{TEXT_KEY}>", text)
    last = re.search(rf"<{NUMBER_KEY}>{NUMBER_VALUE}(?P<prefix>[^\s\w]*|\S*)</{NUMBER_KEY}>", text)
    found = found or re.search(rf"<{TEXT_KEY}>{TEXT_VALUE}(?P<prefix>\S*)</{TEXT_KEY}>", text)
    name = text.find(NAME)
    if found is None or last is None or not 0 <= name < found.start() < last.start():
        return None
    prefix = found["prefix"]
    first_at, last_at = found.start() - len(prefix), last.start() - len(prefix)
    if text[first_at : found.start()] != prefix or text[last_at : last.start()] != prefix:
        return None
    listed = samples.listed or ""
    item = re.search(rf"{re.escape(prefix)}<(\w+)>{LISTED_VALUE}{re.escape(prefix)}</\1>", listed)
    return Syntax(
        learn_frame(samples, name, last.end()),
        prefix,
        text[name + len(NAME) : first_at],
        text[found.end() : last_at],
        item[1] if item and item[1] != TEXT_KEY else "",
    )


def add_states(builder: StateMachineBuilder, syntax: Syntax, origins: tuple[int, ...], back: int) -> None:
    glue = builder.add_state(Phase.TOOL_CALL, GLUE)
    name = builder.add_state(Phase.TOOL_CALL, NAME_SLOT)
    inside = builder.add_state(Phase.TOOL_CALL, GLUE)
    tag = builder.add_state(Phase.TOOL_CALL, TAG_SLOT)
    value = builder.add_state(Phase.TOOL_CALL, VALUE_SLOT)
    closing = builder.add_state(Phase.TOOL_CALL, CLOSING_SLOT)
    syntax.frame.add_openings(builder, origins, glue, name)
    builder.add_marker(name, syntax.name_close, inside)
    syntax.frame.add_closings(builder, inside, glue, name, back)
    for state in (inside, value):
        builder.add_marker(state, f"{syntax.prefix}</", closing)
        builder.add_marker(state, f"{syntax.prefix}<", tag)
    builder.add_text_marker(tag, ">", value)
    builder.add_text_marker(closing, ">", inside)


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    out = [syntax.frame.section_open]
    for place, call in enumerate(calls):
        is_open = last_is_open and place == len(calls) - 1
        out += [syntax.frame.between(place), call.name]
        if is_open and not call.arguments:
            return "".join(out)
        out.append(syntax.name_close + _arguments(syntax, call.arguments))
        if is_open:
            return "".join(out)
        out.append(syntax.frame.call_close)
    return "".join([*out, syntax.frame.section_close])


def _arguments(syntax: Syntax, text: str) -> str:
    """The arguments as elements, from their JSON text; its last value may be truncated."""
    reader = ObjectReader()
    found = reader.feed(text)
    out: list[str] = []
    complete = [item for item in found if isinstance(item, CompleteValue)]
    for item in complete:
        out.append((syntax.between if out else "") + _element(syntax, item.key, _decode(item.value)))
    partial = "".join(item.text for item in found if isinstance(item, ValueDelta) and item.key == reader.key)
    if reader.unfinished and partial.startswith('"'):
        out.append((syntax.between if out else "") + f"{syntax.prefix}<{reader.key}>")
        out.append(decode_string(partial.rstrip("\\") + '"'))
    return "".join(out)


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _element(syntax: Syntax, tag: str, value: Any) -> str:
    return f"{syntax.prefix}<{tag}>{_content(syntax, value)}{syntax.prefix}</{tag}>"


def _content(syntax: Syntax, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and syntax.item:
        return "".join(_element(syntax, key, inner) for key, inner in value.items() if inner is not None)
    if isinstance(value, list) and syntax.item:
        return "".join(_element(syntax, syntax.item, inner) for inner in value)
    return json.dumps(value, ensure_ascii=False)


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    return syntax.frame.grammar(lark, [_ToolGrammar(syntax, tool, lark).call() for tool in tools])


class _ToolGrammar(ToolGrammar):
    """The grammar of calls to one tool: each argument as an element, by its schema."""

    def __init__(self, syntax: Syntax, tool: Tool, lark: LarkBuilder) -> None:
        super().__init__(tool, lark)
        self._syntax = syntax

    def call(self) -> str:
        name = self._lark.literal(check_tool_name(self._tool) + self._syntax.name_close)
        return self._lark.rule(join_expressions(name, self._members(self._root, self._syntax.between, 0)))

    def _members(self, schema: Mapping[str, Any], between: str, depth: int) -> str:
        members = object_members(self._tool, schema, self._root)
        items = [(self._element(one.key, one.schema, depth), one.required) for one in members.properties]
        return self._lark.sequence(items, between)

    def _element(self, tag: str, schema: Any, depth: int) -> str:
        if not _TAG.fullmatch(tag):
            check_argument_name(self._tool, tag, _TAG)
        if depth > _MAX_DEPTH:
            raise unsupported_schema(self._tool, "its values are nested too deeply")
        opening = self._lark.literal(f"{self._syntax.prefix}<{tag}>")
        return join_expressions(opening, self._value(schema, f"{self._syntax.prefix}</{tag}>", depth))

    def _value(self, schema: Any, close: str, depth: int) -> str:
        """The content of an element and its closing tag."""
        lark, schema = self._lark, resolve_schema(self._tool, schema, self._root)
        if schema is True or schema == {}:
            return lark.until(close, ANYTHING)
        if isinstance(schema, Mapping) and "anyOf" in schema:
            return one_of([self._value(option, close, depth) for option in schema["anyOf"]])
        if isinstance(schema, Mapping) and is_string(schema):
            return lark.until(close, *text_patterns(self._tool, schema))
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if self._syntax.item and kind == "array":
            check_schema(self._tool, schema, ARRAY_KEYWORDS)
            item = self._element(self._syntax.item, schema.get("items", {}), depth + 1)
            times = f"{{{schema.get('minItems', 0)},{schema.get('maxItems', '')}}}"
            return join_expressions(f"({item}){times}", lark.literal(close))
        if self._syntax.item and kind == "object":
            return join_expressions(self._members(schema, "", depth + 1), lark.literal(close))
        return join_expressions(lark.json(with_definitions(schema, self._root)), lark.literal(close))


@dataclass
class _Node:
    """An element that is being read."""

    tag: str
    text: str = ""
    """Everything between its tags, as the model wrote it."""
    children: list[_Node] = field(default_factory=list)

    def value(self, schema: Any, resolve: Callable[[Any], Mapping[str, Any]]) -> Any:
        """The value of the element. Without a schema, children of one name are a list."""
        schema = resolve(schema)
        if is_string(schema):
            return self.text
        kind = schema.get("type")
        if self.children and (kind == "array" or (kind is None and len({child.tag for child in self.children}) == 1)):
            return [child.value(schema.get("items"), resolve) for child in self.children]
        if self.children:
            properties = schema.get("properties") or {}
            return {child.tag: child.value(properties.get(child.tag), resolve) for child in self.children}
        if not self.text.strip() and kind in ("array", "object"):
            return [] if kind == "array" else {}
        return json.loads(read_value(self.text))


class Calls:
    """Reads elements. An argument is emitted when its element is closed."""

    def __init__(self, syntax: Syntax, registry: CallRegistry) -> None:
        self._syntax = syntax
        self._registry = registry
        self._name = ""
        self._tag = ""
        self._open = False
        self._count = 0
        self._slot = ""
        self._stack: list[_Node] = []

    def enter(self, slot: str) -> list[ReadEvent]:
        left, self._slot = self._slot, slot
        if slot == NAME_SLOT:
            events = self._end_call()
            self._name, self._open, self._count = "", False, 0
            return events
        if slot in (TAG_SLOT, CLOSING_SLOT):
            self._tag = ""
            return self._begin()
        if slot == VALUE_SLOT and left == TAG_SLOT:
            return self._open_element()
        if slot == GLUE and left == CLOSING_SLOT:
            return self._close_element()
        return self._begin() if slot == GLUE and left == NAME_SLOT else []

    def feed(self, slot: str, text: str) -> list[ReadEvent]:
        if slot == NAME_SLOT:
            self._name += text
        elif slot in (TAG_SLOT, CLOSING_SLOT):
            self._tag += text
        elif self._stack:
            self._stack[-1].text += text
        else:
            self._registry.ignore(text)
        return []

    def leave(self) -> list[ReadEvent]:
        return self._end_call()

    def truncate(self) -> list[ReadEvent]:
        if self._name.strip() and not self._open:
            return self._begin()
        node = self._stack[0] if len(self._stack) == 1 else None
        if node is None or not is_string(self._schema(node.tag)) or self._slot != VALUE_SLOT:
            self._registry.ignore(" ".join(node.text for node in self._stack))
            return []
        return self._registry.arguments(self._key(node.tag) + json.dumps(node.text, ensure_ascii=False)[:-1])

    def _begin(self) -> list[ReadEvent]:
        if self._open or not self._name.strip():
            return []
        self._open = True
        return [self._registry.open(self._name.strip()), *self._registry.arguments("{")]

    def _open_element(self) -> list[ReadEvent]:
        if _TAG.fullmatch(self._tag):
            self._stack.append(_Node(self._tag))
        elif self._stack:  # an angle bracket that opens no element
            self._stack[-1].text += f"{self._syntax.prefix}<{self._tag}>"
        return []

    def _close_element(self) -> list[ReadEvent]:
        written = f"{self._syntax.prefix}</{self._tag}>"
        if not self._stack or self._stack[-1].tag != self._tag.strip():
            if self._stack:
                self._stack[-1].text += written
            return []
        node = self._stack.pop()
        if self._stack:
            self._stack[-1].text += f"{self._syntax.prefix}<{node.tag}>{node.text}{written}"
            self._stack[-1].children.append(node)
            return []
        resolve = partial(self._registry.resolve, self._name.strip())
        value = json.dumps(node.value(self._schema(node.tag), resolve), ensure_ascii=False)
        return self._registry.arguments(self._key(node.tag) + value)

    def _schema(self, key: str) -> Mapping[str, Any]:
        return self._registry.schema(self._name.strip(), key)

    def _key(self, key: str) -> str:
        self._count += 1
        return f"{', ' if self._count > 1 else ''}{json.dumps(key, ensure_ascii=False)}: "

    def _end_call(self) -> list[ReadEvent]:
        self._registry.ignore(" ".join(node.text for node in self._stack))
        self._stack = []
        if not self._name.strip():
            return []
        events = [*self._begin(), *self._registry.arguments("}")]
        self._name = ""
        return events
