"""Calls that write each argument between separate markers.

<tool_call><function=f><parameter=a>1</parameter></function></tool_call>
<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
<invoke name="f"><parameter name="a">1</parameter></invoke>"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palaver.events import ReadEvent
from palaver.formats.markers import common_end, common_start, split_marker, split_space
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.call_reader import CallRegistry, CompleteValue, ObjectReader, ValueDelta, decode_string
from palaver.formats.tool_calls.lark import (
    ANYTHING,
    LarkBuilder,
    ToolGrammar,
    accepts_type,
    additional_keys,
    check_argument_name,
    check_tool_name,
    is_string,
    join_expressions,
    object_members,
    one_of,
    text_patterns,
    with_definitions,
    without_character,
)
from palaver.formats.tool_calls.samples import (
    NAME,
    NUMBER_KEY,
    NUMBER_VALUE,
    OTHER_NAME,
    TEXT_KEY,
    TEXT_VALUE,
    CallFrame,
    CallSamples,
    learn_frame,
)
from palaver.messages import Tool, ToolCall
from palaver.phases import Phase

NAME_SLOT, KEY_SLOT, GLUE = "name", "key", "glue"
VALUE_SLOT, TEXT_SLOT, JSON_SLOT = "value", "text_value", "json_value"
ATTRIBUTES_SLOT, TYPE_SLOT, TYPED_SLOT = "attributes", "type", "typed_value"
_ATTRIBUTES = re.compile(r"""(?P<quote>["'])(?P<inside>\s+[\w-]+=.*["'])(?P<end>[^"']+)""", re.S)
"""The end of a tag after a name: a quotation mark, attributes, and the end of the tag."""
_ATTRIBUTE_LIST = re.compile(r"""(\s+[\w-]+=(["'])[\w-]*\2)*\s*""")
_TYPE = re.compile(r"""(?P<before>["']\s+[\w-]+=["'])(?P<word>[\w-]+)(?P<end>["'][^"']+)""", re.S)
"""The end of a tag after a key: a quotation mark, an attribute with the type, and the end of the tag."""


@dataclass(frozen=True, slots=True)
class Syntax:
    frame: CallFrame
    name_close: str
    """Between the name and the marker of the first argument."""
    key_open: str
    key_close: str
    """Between the key of an argument and a string value."""
    key_close_json: str
    """The same for any other value. If it differs, the model declares the type."""
    value_close: str
    between: str
    """Between two arguments."""
    index: str = ""
    """The number of the first call, if `name_close` counts calls."""
    family: Literal["parameters"] = "parameters"

    @property
    def typed(self) -> bool:
        return self.key_close.strip() != self.key_close_json.strip()

    @property
    def type_words(self) -> tuple[str, str, str, str] | None:
        """The text before the word for a type, the words for a text and for a number, and the text after the word."""
        text, number = _TYPE.fullmatch(self.key_close), _TYPE.fullmatch(self.key_close_json)
        if text is None or number is None or (text["before"], text["end"]) != (number["before"], number["end"]):
            return None
        return text["before"], text["word"], number["word"], text["end"]

    def json_close(self, kind: str) -> str:
        """`key_close_json` with the word for a type of JSON: its name, if texts and numbers go by theirs."""
        words = self.type_words
        if words is None or words[1] != "string" or words[2] not in ("number", "integer"):
            return self.key_close_json
        word = words[2] if kind in ("number", "integer") else kind
        return words[0] + word + words[3]

    def name_end(self, place: int) -> str:
        """`name_close` of the call at this place."""
        return self.name_close.replace(self.index, str(int(self.index) + place)) if self.index else self.name_close


def learn(samples: CallSamples) -> Syntax | None:
    text = samples.one
    name, key, value = text.find(NAME), text.find(TEXT_KEY), text.find(TEXT_VALUE)
    second_key, number = text.find(NUMBER_KEY), text.find(str(NUMBER_VALUE))
    if not 0 <= name < key < value < second_key < number:
        return None
    before_key = text[name + len(NAME) : key]
    between = text[value + len(TEXT_VALUE) : second_key]
    key_open = common_end(before_key, between)
    tail = text[number + len(str(NUMBER_VALUE)) :]
    rest = between[: len(between) - len(key_open)]
    value_close = common_start(rest, tail)
    if not split_marker(key_open) or not split_marker(value_close):
        return None
    value_close = _whole_parts(value_close, rest)
    frame = learn_frame(samples, name, number + len(str(NUMBER_VALUE)) + len(value_close))
    name_close = before_key[: len(before_key) - len(key_open)]
    return Syntax(
        frame,
        name_close,
        key_open,
        text[key + len(TEXT_KEY) : value],
        text[second_key + len(NUMBER_KEY) : number],
        value_close,
        rest[len(value_close) :],
        _index(samples, name_close),
    )


def _index(samples: CallSamples, name_close: str) -> str:
    """The number in the text after a name, if it is the next one in the second call."""
    found = re.search(r"\d+", name_close)
    second = (samples.two or "").partition(OTHER_NAME)[2]
    if found is None or not second.startswith(name_close.replace(found[0], str(int(found[0]) + 1))):
        return ""
    return found[0]


def _whole_parts(close: str, rest: str) -> str:
    """The closing without trailing white space, which belongs to the next marker."""
    return close.rstrip() if close.strip() else rest


def add_states(builder: StateMachineBuilder, syntax: Syntax, origins: tuple[int, ...], back: int) -> None:
    glue = builder.add_state(Phase.TOOL_CALL, GLUE)
    name = builder.add_state(Phase.TOOL_CALL, NAME_SLOT)
    inside = builder.add_state(Phase.TOOL_CALL, GLUE)
    key = builder.add_state(Phase.TOOL_CALL, KEY_SLOT)
    syntax.frame.add_openings(builder, origins, glue, name)
    attributes = _ATTRIBUTES.fullmatch(syntax.name_close.strip())
    if attributes is not None:
        skipped = builder.add_state(Phase.TOOL_CALL, ATTRIBUTES_SLOT)
        builder.add_text_marker(name, attributes["quote"], skipped)
        builder.add_marker(skipped, attributes["end"], inside)
    elif syntax.name_close.strip():
        builder.add_marker(name, syntax.name_close, inside)
    builder.add_marker(name, syntax.key_open, key)
    builder.add_marker(inside, syntax.key_open, key)
    words = syntax.type_words
    if words is not None:
        kind, value = builder.add_state(Phase.TOOL_CALL, TYPE_SLOT), builder.add_state(Phase.TOOL_CALL, TYPED_SLOT)
        builder.add_text_marker(key, words[0][0], kind)
        builder.add_marker(kind, words[3][1:], value)
        builder.add_marker(value, syntax.value_close, inside)
    for state, marker in _values(builder, syntax) if words is None else ():
        builder.add_marker(key, marker, state)
        builder.add_marker(state, syntax.value_close, inside)
    for state in (inside, name):
        syntax.frame.add_closings(builder, state, glue, name, back)


def _values(builder: StateMachineBuilder, syntax: Syntax) -> list[tuple[int, str]]:
    """The states of a value, each with its marker."""
    if not syntax.typed:
        return [(builder.add_state(Phase.TOOL_CALL, VALUE_SLOT), syntax.key_close)]
    return [
        (builder.add_state(Phase.TOOL_CALL, TEXT_SLOT), syntax.key_close),
        (builder.add_state(Phase.TOOL_CALL, JSON_SLOT), syntax.key_close_json),
    ]


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    out = [syntax.frame.section_open]
    for place, call in enumerate(calls):
        is_open = last_is_open and place == len(calls) - 1
        out += [syntax.frame.between(place), call.name]
        if is_open and not call.arguments:
            return "".join(out)
        arguments = _arguments(syntax, call.arguments, is_open)
        out.append(syntax.name_end(place) + arguments)
        if is_open:
            return "".join(out)
        out.append(syntax.frame.call_close)
    return "".join([*out, syntax.frame.section_close])


def _arguments(syntax: Syntax, text: str, is_open: bool) -> str:
    """The arguments in this notation, from their JSON text; its last value may be truncated."""
    reader = ObjectReader()
    found = reader.feed(text)
    complete = {item.key: item.value for item in found if isinstance(item, CompleteValue)}
    keys = list(dict.fromkeys(item.key for item in found if isinstance(item, ValueDelta | CompleteValue)))
    keys += [reader.key] if reader.awaits_value and reader.key not in keys else []
    out = []
    for place, key in enumerate(keys):
        out.append((syntax.between if place else "") + syntax.key_open + key)
        raw = complete.get(key)
        if raw is None and is_open:
            partial = "".join(item.text for item in found if isinstance(item, ValueDelta) and item.key == key)
            return "".join([*out, _partial_value(syntax, partial)])
        out.append(_value(syntax, raw or "null") + syntax.value_close)
    return "".join(out)


def _value(syntax: Syntax, raw: str) -> str:
    """A value between its markers: strings without quotation marks."""
    return syntax.key_close + decode_string(raw) if raw.startswith('"') else syntax.json_close(_json_type(raw)) + raw


def _json_type(raw: str) -> str:
    names = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null", '"': "string"}
    return names.get(raw[:1], "number")


def _partial_value(syntax: Syntax, raw: str) -> str:
    """A truncated value. An empty one may still become a string or JSON."""
    if not raw:
        return "" if syntax.typed else syntax.key_close
    return (
        syntax.key_close + decode_string(raw.rstrip("\\") + '"')
        if raw.startswith('"')
        else syntax.json_close(_json_type(raw)) + raw
    )


_PLAIN = r"[^\s\-0-9\"\[{](?s:.*)"
_WORDS = r"\s*(true|false|null|NaN|-?Infinity|True|False|None)\s*"
"""Text that is no number, quoted string, list or object and none of these words can't be read as JSON."""


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    return syntax.frame.grammar(lark, [_ToolGrammar(syntax, tool, lark).call() for tool in tools])


class _ToolGrammar(ToolGrammar):
    """The grammar of calls to one tool: each argument between its markers, by its schema."""

    def __init__(self, syntax: Syntax, tool: Tool, lark: LarkBuilder) -> None:
        super().__init__(tool, lark)
        self._syntax = syntax

    def call(self) -> str:
        syntax, lark = self._syntax, self._lark
        members = object_members(self._tool, self._root, self._root)
        items = []
        for argument in members.properties:
            key = lark.literal(syntax.key_open + check_argument_name(self._tool, argument.key))
            items.append((join_expressions(key, self._value(argument.schema)), argument.required))
        more = ""
        if members.additional is not False:
            key = join_expressions(lark.literal(syntax.key_open), additional_keys(lark, members))
            more = join_expressions(key, self._value(members.additional))
        arguments = lark.sequence(items, syntax.between, more)
        before, _, after = syntax.name_close.partition(syntax.index or "\0")
        number = lark.pattern("[0-9]{1,3}") if syntax.index else ""
        name = join_expressions(lark.literal(check_tool_name(self._tool) + before), number, lark.literal(after))
        return lark.rule(join_expressions(name, arguments))

    def _value(self, schema: Any) -> str:
        """Strings as plain text, other values as JSON. A value that may be either is plain text if it is no JSON."""
        syntax, lark = self._syntax, self._lark
        text = lark.literal(syntax.key_close)
        if isinstance(schema, Mapping) and is_string(schema):
            return join_expressions(text, lark.until(syntax.value_close, *text_patterns(self._tool, schema)))
        safe = without_character(with_definitions(schema, self._root), lark.text_marker_start(syntax.value_close))
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        kind = kinds if isinstance(kinds, str) else "number"
        close = lark.literal(syntax.json_close(kind))
        options = [join_expressions(close, lark.json(safe), lark.literal(syntax.value_close))]
        if accepts_type(schema, "string"):
            plain = lark.until(syntax.value_close, ANYTHING) if syntax.typed else self._plain_text()
            options.append(join_expressions(text, plain))
        return one_of(options)

    def _plain_text(self) -> str:
        return self._lark.until(self._syntax.value_close, _PLAIN, excluding=_WORDS)


class Calls:
    def __init__(self, syntax: Syntax, registry: CallRegistry) -> None:
        self._syntax = syntax
        self._registry = registry
        self._lead, _, _ = split_space(syntax.key_close[::-1])
        self._trail, _, _ = split_space(syntax.value_close)
        self._lead = self._lead[::-1]
        self._name = ""
        self._open = False
        self._count = 0
        self._value: _TextValue | _JsonValue | None = None
        self._key = ""
        self._attributes = ""

    def enter(self, slot: str) -> list[ReadEvent]:
        events = self._end_value() if slot == GLUE else []
        if slot == NAME_SLOT:
            events += self._end_call()
            self._name, self._open, self._count = "", False, 0
        elif slot == KEY_SLOT:
            events += self._begin()
            self._ignore_key()
            self._ignore_attributes()
        elif slot == TYPE_SLOT:
            self._ignore_attributes()
        elif slot in (VALUE_SLOT, TEXT_SLOT, JSON_SLOT, TYPED_SLOT):
            return self._begin_value(slot)
        elif slot == GLUE and self._name.strip() and not self._open:
            events += self._begin()
        return events

    def feed(self, slot: str, text: str) -> list[ReadEvent]:
        if slot == NAME_SLOT:
            self._name += text
        elif slot == KEY_SLOT:
            self._key += text
        elif slot in (TYPE_SLOT, ATTRIBUTES_SLOT):
            self._attributes += text
        elif self._value is not None:
            return self._registry.arguments(self._value.feed(text))
        else:
            self._registry.ignore(text)
        return []

    def _ignore_key(self) -> None:
        """Ignores a key without a value."""
        self._registry.ignore(f" {self._key} ")
        self._key = ""

    def _ignore_attributes(self) -> None:
        """Ends the attributes of a tag. Those that are none are no part of the call."""
        text, self._attributes = self._attributes, ""
        if not _ATTRIBUTE_LIST.fullmatch(text):
            self._registry.ignore(f" {text} ")

    def leave(self) -> list[ReadEvent]:
        return self._end_call()

    def truncate(self) -> list[ReadEvent]:
        """The reply stops here. Values and calls that the model has not closed stay open."""
        if self._name.strip() and not self._open:
            return self._begin()
        self._ignore_key()
        self._ignore_attributes()
        if self._value is None:
            return []
        rest = self._value.truncate()
        self._registry.ignore("" if rest else f" {self._value.buffered} ")
        return self._registry.arguments(rest)

    def _begin(self) -> list[ReadEvent]:
        if self._open:
            return []
        self._open = True
        return [self._registry.open(self._name.strip()), *self._registry.arguments("{")]

    def _begin_value(self, slot: str) -> list[ReadEvent]:
        key, self._key = self._key.strip(), ""
        words = self._syntax.type_words
        word = re.split(r"""["']""", self._attributes.strip())[1:2] if slot == TYPED_SLOT else []
        self._ignore_attributes()
        plain = slot == TEXT_SLOT or (words is not None and word == [words[1]])
        plain = plain or (slot == VALUE_SLOT and is_string(self._registry.schema(self._name.strip(), key)))
        self._value = (_TextValue if plain else _JsonValue)(self._lead, self._trail)
        before = ", " if self._count else ""
        self._count += 1
        return self._registry.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")

    def _end_value(self) -> list[ReadEvent]:
        value, self._value = self._value, None
        return self._registry.arguments(value.end()) if value else []

    def _end_call(self) -> list[ReadEvent]:
        self._ignore_key()
        self._ignore_attributes()
        if not self._name.strip():
            return []
        events = [*self._begin(), *self._end_value(), *self._registry.arguments("}")]
        self._name = ""
        return events


class _TextValue:
    """A string argument: streamed, without the white space that the format puts around it."""

    def __init__(self, lead: str, trail: str) -> None:
        self._lead = lead
        self._trail = trail
        self._decided = False
        self._started = False
        self.buffered = ""

    def feed(self, text: str) -> str:
        self.buffered += text
        if not self._decided:
            if len(self.buffered) < len(self._lead) and self._lead.startswith(self.buffered):
                return ""
            self._decided, self.buffered = True, self.buffered.removeprefix(self._lead)
        return self._release(max(len(self.buffered) - len(self._trail), 0))

    def truncate(self) -> str:
        return self._release(len(self.buffered))

    def end(self) -> str:
        self.buffered = self.buffered.removesuffix(self._trail)
        rest = self.truncate()
        return f'{rest}"' if self._started else '""'

    def _release(self, size: int) -> str:
        fresh, self.buffered = self.buffered[:size], self.buffered[size:]
        opened = '"' if fresh and not self._started else ""
        self._started = self._started or bool(fresh)
        return opened + json.dumps(fresh, ensure_ascii=False)[1:-1]


class _JsonValue:
    """An argument of any type: emitted when it is complete."""

    def __init__(self, lead: str, trail: str) -> None:
        self._lead = lead
        self._trail = trail
        self._pieces: list[str] = []

    @property
    def buffered(self) -> str:
        return "".join(self._pieces)

    def feed(self, text: str) -> str:
        self._pieces.append(text)
        return ""

    def truncate(self) -> str:
        return ""

    def end(self) -> str:
        return read_value(self.buffered.removeprefix(self._lead).removesuffix(self._trail))


def read_value(text: str) -> str:
    """The JSON of a value: the text itself if it is JSON, else as a JSON string."""
    try:
        json.loads(text)
    except ValueError:
        return _python_literal(text)
    return text.strip()


def _python_literal(text: str) -> str:
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip())
    return word if word is not None else json.dumps(text, ensure_ascii=False)
