"""Calls that write each argument between markers of its own.

<tool_call><function=f><parameter=a>1</parameter></function></tool_call>
<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
<invoke name="f"><parameter name="a">1</parameter></invoke>"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palaver.events import ReadEvent
from palaver.formats.markers import common_end, common_start, split_marker, split_space
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.call_reader import CallRegistry, CompleteValue, ObjectReader, ValueDelta, decode_string
from palaver.formats.tool_calls.frame import CallFrame, learn_frame
from palaver.formats.tool_calls.lark import ANYTHING, LarkBuilder, join_expressions, one_of
from palaver.formats.tool_calls.samples import NAME, NUMBER_KEY, NUMBER_VALUE, TEXT_KEY, TEXT_VALUE, CallSamples
from palaver.formats.tool_calls.schemas import (
    admits,
    arguments_schema,
    check_argument_name,
    check_tool_name,
    is_text,
    object_members,
    other_keys,
    text_patterns,
    with_definitions,
    without_letter,
)
from palaver.messages import Tool, ToolCall
from palaver.phases import Phase

NAME_SLOT, KEY_SLOT, GLUE = "name", "key", "glue"
VALUE_SLOT, TEXT_SLOT, JSON_SLOT = "value", "text_value", "json_value"


@dataclass(frozen=True, slots=True)
class Syntax:
    frame: CallFrame
    name_close: str
    """Between the name and the first argument's marker."""
    key_open: str
    key_close: str
    """Between an argument's key and a text value."""
    key_close_json: str
    """The same for any other value; where it differs, the model says which it is."""
    value_close: str
    between: str
    """Between two arguments."""

    @property
    def typed(self) -> bool:
        return self.key_close.strip() != self.key_close_json.strip()


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
    return Syntax(
        frame,
        before_key[: len(before_key) - len(key_open)],
        key_open,
        text[key + len(TEXT_KEY) : value],
        text[second_key + len(NUMBER_KEY) : number],
        value_close,
        rest[len(value_close) :],
    )


def _whole_parts(close: str, rest: str) -> str:
    """White space behind the last marker belongs to what comes next."""
    return close.rstrip() if close.strip() else rest


def add_states(builder: StateMachineBuilder, syntax: Syntax, froms: tuple[int, ...], back: int) -> None:
    glue = builder.state(Phase.TOOL_CALL, GLUE)
    name = builder.state(Phase.TOOL_CALL, NAME_SLOT)
    inside = builder.state(Phase.TOOL_CALL, GLUE)
    key = builder.state(Phase.TOOL_CALL, KEY_SLOT)
    syntax.frame.add_openings(builder, froms, glue, name)
    if syntax.name_close.strip():
        builder.on(name, syntax.name_close, inside)
    builder.on(name, syntax.key_open, key)
    builder.on(inside, syntax.key_open, key)
    for state, marker in _values(builder, syntax):
        builder.on(key, marker, state)
        builder.on(state, syntax.value_close, inside)
    for state in (inside, name):
        syntax.frame.add_closings(builder, state, glue, name, back)


def _values(builder: StateMachineBuilder, syntax: Syntax) -> list[tuple[int, str]]:
    """The states of a value, each with the marker that leads to it."""
    if not syntax.typed:
        return [(builder.state(Phase.TOOL_CALL, VALUE_SLOT), syntax.key_close)]
    return [
        (builder.state(Phase.TOOL_CALL, TEXT_SLOT), syntax.key_close),
        (builder.state(Phase.TOOL_CALL, JSON_SLOT), syntax.key_close_json),
    ]


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    out = [syntax.frame.section_open]
    for place, call in enumerate(calls):
        is_open = last_is_open and place == len(calls) - 1
        out += [syntax.frame.between(place), call.name]
        if is_open and not call.arguments:
            return "".join(out)
        arguments = _arguments(syntax, call.arguments, is_open)
        out.append(syntax.name_close + arguments)
        if is_open:
            return "".join(out)
        out.append(syntax.frame.call_close)
    return "".join([*out, syntax.frame.section_close])


def _arguments(syntax: Syntax, text: str, is_open: bool) -> str:
    """The arguments back from their JSON text, whose last value may be cut off."""
    walk = ObjectReader()
    found = walk.feed(text)
    whole = {item.key: item.value for item in found if isinstance(item, CompleteValue)}
    keys = list(dict.fromkeys(item.key for item in found if isinstance(item, ValueDelta | CompleteValue)))
    keys += [walk.key] if walk.waits and walk.key not in keys else []
    out = []
    for place, key in enumerate(keys):
        out.append((syntax.between if place else "") + syntax.key_open + key)
        raw = whole.get(key)
        if raw is None and is_open:
            cut = "".join(item.text for item in found if isinstance(item, ValueDelta) and item.key == key)
            return "".join([*out, _cut_value(syntax, cut)])
        out.append(_value(syntax, raw or "null") + syntax.value_close)
    return "".join(out)


def _value(syntax: Syntax, raw: str) -> str:
    """A value as it stands between its markers: texts without their quotation marks."""
    return syntax.key_close + decode_string(raw) if raw.startswith('"') else syntax.key_close_json + raw


def _cut_value(syntax: Syntax, raw: str) -> str:
    """A value that breaks off; only texts do, and what is not begun yet may be either kind."""
    if not raw:
        return "" if syntax.typed else syntax.key_close
    return (
        syntax.key_close + decode_string(raw.rstrip("\\") + '"') if raw.startswith('"') else syntax.key_close_json + raw
    )


_PLAIN = r"[^\s\-0-9\"\[{](?s:.*)"
_WORDS = r"\s*(true|false|null|NaN|-?Infinity|True|False|None)\s*"
"""Text that begins so, or is one of these words, may be read as JSON."""


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    return syntax.frame.around(lark, [_Held(syntax, tool, lark).call() for tool in tools])


class _Held:
    """The grammar of one tool's calls: each argument between its markers, by its own schema."""

    def __init__(self, syntax: Syntax, tool: Tool, lark: LarkBuilder) -> None:
        self._syntax = syntax
        self._tool = tool
        self._lark = lark
        self._root = arguments_schema(tool)

    def call(self) -> str:
        syntax, lark = self._syntax, self._lark
        found = object_members(self._tool, self._root, self._root)
        items = []
        for one in found.listed:
            key = lark.literal(syntax.key_open + check_argument_name(self._tool, one.key))
            items.append((join_expressions(key, self._value(one.schema)), one.required))
        more = ""
        if found.others is not False:
            more = join_expressions(lark.literal(syntax.key_open), other_keys(lark, found), self._value(found.others))
        arguments = lark.series(items, syntax.between, more)
        return lark.rule(join_expressions(lark.literal(check_tool_name(self._tool) + syntax.name_close), arguments))

    def _value(self, schema: Any) -> str:
        """Texts as they are, all else as JSON; what may be both is written as text where it can't be mistaken."""
        syntax, lark = self._syntax, self._lark
        text = lark.literal(syntax.key_close)
        if isinstance(schema, Mapping) and is_text(schema):
            return join_expressions(text, lark.until(syntax.value_close, *text_patterns(self._tool, schema)))
        safe = without_letter(with_definitions(schema, self._root), lark.is_text(syntax.value_close))
        ways = [
            join_expressions(lark.literal(syntax.key_close_json), lark.json(safe), lark.literal(syntax.value_close))
        ]
        if admits(schema, "string"):
            said = lark.until(syntax.value_close, ANYTHING) if syntax.typed else self._plain_text()
            ways.append(join_expressions(text, said))
        return one_of(ways)

    def _plain_text(self) -> str:
        return self._lark.until(self._syntax.value_close, _PLAIN, but=_WORDS)


class Calls:
    def __init__(self, syntax: Syntax, opened: CallRegistry) -> None:
        self._syntax = syntax
        self._opened = opened
        self._lead, _, _ = split_space(syntax.key_close[::-1])
        self._trail, _, _ = split_space(syntax.value_close)
        self._lead = self._lead[::-1]
        self._name = ""
        self._open = False
        self._count = 0
        self._value: _TextValue | _OtherValue | None = None
        self._key = ""

    def enter(self, slot: str) -> list[ReadEvent]:
        events = self._end_value() if slot == GLUE else []
        if slot == NAME_SLOT:
            events += self._end_call()
            self._name, self._open, self._count = "", False, 0
        elif slot == KEY_SLOT:
            events += self._begin()
            self._ignore_key()
        elif slot in (VALUE_SLOT, TEXT_SLOT, JSON_SLOT):
            return self._begin_value(slot)
        elif slot == GLUE and self._name.strip() and not self._open:
            events += self._begin()
        return events

    def say(self, slot: str, text: str) -> list[ReadEvent]:
        if slot == NAME_SLOT:
            self._name += text
        elif slot == KEY_SLOT:
            self._key += text
        elif self._value is not None:
            return self._opened.arguments(self._value.say(text))
        else:
            self._opened.ignore(text)
        return []

    def _ignore_key(self) -> None:
        """A key without a value is no argument."""
        self._opened.ignore(f" {self._key} ")
        self._key = ""

    def leave(self) -> list[ReadEvent]:
        return self._end_call()

    def cut(self) -> list[ReadEvent]:
        """The reply stops here; nothing is closed that the model has not closed."""
        if self._name.strip() and not self._open:
            return self._begin()
        self._ignore_key()
        if self._value is None:
            return []
        told = self._value.cut()
        self._opened.ignore("" if told else f" {self._value.untold} ")
        return self._opened.arguments(told)

    def _begin(self) -> list[ReadEvent]:
        if self._open:
            return []
        self._open = True
        return [self._opened.open(self._name.strip()), *self._opened.arguments("{")]

    def _begin_value(self, slot: str) -> list[ReadEvent]:
        key, self._key = self._key.strip(), ""
        plain = slot == TEXT_SLOT or (slot == VALUE_SLOT and is_text(self._opened.schema(self._name.strip(), key)))
        self._value = (_TextValue if plain else _OtherValue)(self._lead, self._trail)
        before = ", " if self._count else ""
        self._count += 1
        return self._opened.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")

    def _end_value(self) -> list[ReadEvent]:
        value, self._value = self._value, None
        return self._opened.arguments(value.end()) if value else []

    def _end_call(self) -> list[ReadEvent]:
        self._ignore_key()
        if not self._name.strip():
            return []
        events = [*self._begin(), *self._end_value(), *self._opened.arguments("}")]
        self._name = ""
        return events


class _TextValue:
    """An argument that is text: told as it comes, but for the white space around it that is the format's."""

    def __init__(self, lead: str, trail: str) -> None:
        self._lead = lead
        self._trail = trail
        self._decided = False
        self._begun = False
        self.untold = ""

    def say(self, text: str) -> str:
        self.untold += text
        if not self._decided:
            if len(self.untold) < len(self._lead) and self._lead.startswith(self.untold):
                return ""
            self._decided, self.untold = True, self.untold.removeprefix(self._lead)
        return self._tell(max(len(self.untold) - len(self._trail), 0))

    def cut(self) -> str:
        return self._tell(len(self.untold))

    def end(self) -> str:
        self.untold = self.untold.removesuffix(self._trail)
        told = self.cut()
        return f'{told}"' if self._begun else '""'

    def _tell(self, size: int) -> str:
        fresh, self.untold = self.untold[:size], self.untold[size:]
        opened = '"' if fresh and not self._begun else ""
        self._begun = self._begun or bool(fresh)
        return opened + json.dumps(fresh, ensure_ascii=False)[1:-1]


class _OtherValue:
    """An argument that may be anything: told when it is whole."""

    def __init__(self, lead: str, trail: str) -> None:
        self._lead = lead
        self._trail = trail
        self._said: list[str] = []

    @property
    def untold(self) -> str:
        return "".join(self._said)

    def say(self, text: str) -> str:
        self._said.append(text)
        return ""

    def cut(self) -> str:
        return ""

    def end(self) -> str:
        return _as_json(self.untold.removeprefix(self._lead).removesuffix(self._trail))


def _as_json(text: str) -> str:
    """The value as it is where it is JSON, else as a text."""
    try:
        json.loads(text)
    except ValueError:
        return _python_literal(text)
    return text.strip()


def _python_literal(text: str) -> str:
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip())
    return word if word is not None else json.dumps(text, ensure_ascii=False)
