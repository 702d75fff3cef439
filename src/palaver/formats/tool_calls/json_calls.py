"""Calls that are JSON objects: in tags, in a list, line by line, or bare.

<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
{"f": {"a": 1}}"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from palaver.events import ReadEvent
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.call_reader import CallRegistry, CompleteValue, ObjectEnd, ObjectReader, ValueDelta
from palaver.formats.tool_calls.lark import LarkBuilder, arguments_schema, check_tool_name, join_expressions, one_of
from palaver.formats.tool_calls.samples import ARGUMENTS, IDS, NAME, OTHER_NAME, CallSamples, strip_turn_end
from palaver.messages import Tool, ToolCall
from palaver.phases import Phase

SLOT = "json_calls"
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")


@dataclass(frozen=True, slots=True)
class Syntax:
    opening: str
    """The text before the first object, or before the list of objects."""
    closing: str
    between: str
    """The text between two objects."""
    list_open: str
    """The text that opens a list of objects, white space included; empty if there is no list."""
    list_close: str
    name_key: str | None
    """None if the name itself is the key of the arguments."""
    arguments_key: str | None
    id_key: str | None
    before_name: str
    """The text from the opening brace to the name."""
    before_arguments: str
    after_arguments: str
    family: Literal["json_calls"] = "json_calls"

    @property
    def listed(self) -> bool:
        return bool(self.list_open)

    @property
    def written_keys(self) -> list[str]:
        return re.findall(r'"(\w+)":', self.before_name + self.before_arguments + self.after_arguments)

    @property
    def bare(self) -> bool:
        return not self.opening.strip()


def learn(samples: CallSamples) -> Syntax | None:
    start = _find_call(samples.one)
    if start is None:
        return None
    value, size = json.JSONDecoder().raw_decode(samples.one[start:])
    listed = isinstance(value, list)
    call = value[0] if listed else value
    keys = _keys(call)
    if keys is None:
        return None
    text = samples.one[start : start + size]
    one = text[text.index("{") : text.rindex("}") + 1]
    before, middle, after = _split_call(one)
    closing = strip_turn_end(samples.one[start + size :], samples.ends)
    list_open, list_close = (text[: text.index("{")], text[text.rindex("}") + 1 :]) if listed else ("", "")
    between = ", " if listed else "\n"
    if samples.two is not None:
        between, closing = _learn_separator(samples, start, listed, between, closing)
    return Syntax(samples.one[:start].lstrip(), closing, between, list_open, list_close, *keys, before, middle, after)


def _find_call(text: str) -> int | None:
    """The position of the first JSON value that contains the call."""
    for at, character in enumerate(text):
        if character not in "{[":
            continue
        try:
            value, size = json.JSONDecoder().raw_decode(text[at:])
        except ValueError:
            continue
        if isinstance(value, dict | list) and NAME in text[at : at + size]:
            return at
    return None


def _keys(call: Any) -> tuple[str | None, str | None, str | None] | None:
    if not isinstance(call, dict):
        return None
    name = next((key for key, value in call.items() if value == NAME), None)
    arguments = next((key for key, value in call.items() if value in (ARGUMENTS, json.dumps(ARGUMENTS))), None)
    known_id = next((key for key, value in call.items() if value in (*IDS, "0") and key != name), None)
    if name is None and NAME in call and call[NAME] == ARGUMENTS:
        return None, None, None
    return (name, arguments, known_id) if name is not None and arguments is not None else None


def _split_call(one: str) -> tuple[str, str, str]:
    """The text before the name, between name and arguments, and after the arguments."""
    name_at = one.index(NAME)
    arguments_at = next(
        at
        for at in range(name_at, len(one))
        if one[at] in '{"' and _decode(one[at:]) in (ARGUMENTS, json.dumps(ARGUMENTS))
    )
    size = json.JSONDecoder().raw_decode(one[arguments_at:])[1]
    return one[:name_at], one[name_at + len(NAME) : arguments_at], one[arguments_at + size :]


def _decode(text: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        return None


def _learn_separator(samples: CallSamples, start: int, listed: bool, between: str, closing: str) -> tuple[str, str]:
    assert samples.two is not None
    text = samples.two[start:]
    if listed:
        first = text.find("}", text.find("}") + 1) + 1
        second = text.rfind("{", 0, text.find(OTHER_NAME))
        return (text[first:second] if 0 < first <= second else between), closing
    size = json.JSONDecoder().raw_decode(text)[1]
    second = text.find("{", size)
    if second < 0 or OTHER_NAME not in text[second:]:
        return between, closing
    rest = text[second:]
    tail = rest[json.JSONDecoder().raw_decode(rest)[1] :]
    return text[size:second], strip_turn_end(tail, samples.ends)


def add_states(builder: StateMachineBuilder, syntax: Syntax, origins: tuple[int, ...], back: int) -> None:
    state = builder.add_state(Phase.TOOL_CALL, SLOT, quotes=b'"')
    for origin in origins:
        if syntax.bare:
            continue
        builder.add_marker(origin, syntax.opening, state, fallback=origin)
    if syntax.closing.strip():
        builder.add_marker(state, syntax.closing, back)


def add_bare(builder: StateMachineBuilder, syntax: Syntax, origin: int) -> None:
    """Calls without a marker: a reply that starts with a brace or bracket is a call."""
    state = builder.add_state(Phase.TOOL_CALL, SLOT, quotes=b'"')
    builder.add_text_marker(origin, "[" if syntax.listed else "{", state, keep=True)


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    """The calls as the model writes them. The last one may be open."""
    out = [syntax.opening + syntax.list_open]
    for place, call in enumerate(calls):
        out.append(syntax.between if place else "")
        out.append(_fill(syntax.before_name, call, place) + call.name)
        if last_is_open and place == len(calls) - 1:
            return "".join([*out, syntax.before_arguments + call.arguments if call.arguments else ""])
        out.append(syntax.before_arguments + call.arguments + _fill(syntax.after_arguments, call, place))
    return "".join([*out, syntax.list_close, syntax.closing])


def _fill(literal: str, call: ToolCall, place: int) -> str:
    return literal.replace(IDS[0], call.id).replace('"0"', f'"{place}"')


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    """Only one call if the syntax has no marker between calls."""
    one = lark.rule(one_of([_tool_grammar(syntax, tool, lark) for tool in tools]))
    several = syntax.listed or syntax.closing.strip()
    more = f"({join_expressions(lark.literal(syntax.between), one)})*" if several else ""
    closing = lark.literal(syntax.list_close + syntax.closing)
    return join_expressions(lark.literal(syntax.opening + syntax.list_open), one, more, closing)


def _tool_grammar(syntax: Syntax, tool: Tool, lark: LarkBuilder) -> str:
    before = _with_ids(syntax, lark, syntax.before_name)
    name = lark.literal(check_tool_name(tool) + syntax.before_arguments)
    return lark.rule(
        join_expressions(
            before, name, lark.json(arguments_schema(tool)), _with_ids(syntax, lark, syntax.after_arguments)
        )
    )


def _with_ids(syntax: Syntax, lark: LarkBuilder, literal: str) -> str:
    """The text around a call, with a pattern in place of the sample's id."""
    written = '"0"' if syntax.id_key is not None and '"0"' in literal else f'"{IDS[0]}"'
    before, found, after = literal.partition(written)
    if not found:
        return lark.literal(literal)
    known = lark.pattern("[0-9]{1,3}" if written == '"0"' else "[A-Za-z0-9]{9}")
    return join_expressions(lark.literal(before + '"'), known, lark.literal('"' + after))


class Calls:
    """Reads objects in a list or one after another. Arguments are streamed."""

    def __init__(self, syntax: Syntax, registry: CallRegistry) -> None:
        self._syntax = syntax
        self._registry = registry
        self._reader = ObjectReader()
        self._call = _Call()

    def enter(self, slot: str) -> list[ReadEvent]:
        return []

    def leave(self) -> list[ReadEvent]:
        return self.truncate()

    def truncate(self) -> list[ReadEvent]:
        call = self._call
        events = self._open() if call.name is not None and not call.opened else []
        in_arguments = call.started and self._holds_arguments(self._reader.key)
        if in_arguments and call.opened and not call.emitted and not call.packed:
            events += self._registry.arguments(self._reader.unfinished)
        elif not (in_arguments and call.emitted):
            self._registry.ignore(f" {self._reader.incomplete} ")
        self._ignore_fields(call)
        self._registry.ignore(self._reader.ignored)
        return events

    def feed(self, slot: str, text: str) -> list[ReadEvent]:
        events: list[ReadEvent] = []
        for found in self._reader.feed(text):
            match found:
                case ValueDelta(key, piece):
                    events += self._feed_value(key, piece)
                case CompleteValue(key, value):
                    events += self._end_field(key, value)
                case ObjectEnd():
                    events += self._end()
        return events

    def _feed_value(self, key: str, text: str) -> list[ReadEvent]:
        if self._syntax.name_key is None and self._call.name != key:
            self._call = _Call(key, opened=True)
            return [self._registry.open(key), *self._feed_value(key, text)]
        if not self._holds_arguments(key) or key in self._call.fields:
            return []
        if not self._call.started:
            self._call.started, self._call.packed = True, text.startswith('"')
        if not self._call.opened or self._call.packed:
            return []
        self._call.emitted = True
        return self._registry.arguments(text)

    def _end_field(self, key: str, value: str) -> list[ReadEvent]:
        if key in self._call.fields:  # the first one counts
            self._registry.ignore(f" {key}: {value} ")
            return []
        self._call.fields[key] = value
        if key == self._syntax.name_key or (self._call.name is None and key in _NAME_KEYS):
            self._call.name = _string(value)
        events = self._open() if self._ready() else []
        if self._call.opened and not self._call.emitted and self._holds_arguments(key):
            self._call.emitted = True
            events += self._registry.arguments(_unpack(value))
        return events

    def _ready(self) -> bool:
        """Whether the call can be opened: its name is known, and its id if the syntax has ids."""
        call = self._call
        waits = self._syntax.id_key is not None and self._syntax.id_key not in call.fields
        return call.name is not None and not call.opened and not waits

    def _open(self) -> list[ReadEvent]:
        call = self._call
        assert call.name is not None
        call.opened = True
        events = [self._registry.open(call.name, _string(call.fields.get(self._syntax.id_key or "", "")))]
        early = next((call.fields[key] for key in call.fields if self._holds_arguments(key)), None)
        if early is None:
            return events
        call.emitted = True
        return [*events, *self._registry.arguments(_unpack(early))]

    def _holds_arguments(self, key: str) -> bool:
        return self._holds_arguments_of(self._call, key)

    def _holds_arguments_of(self, call: _Call, key: str) -> bool:
        if self._syntax.name_key is None:
            return key == call.name
        return key == self._syntax.arguments_key or key in _ARGUMENT_KEYS

    def _end(self) -> list[ReadEvent]:
        late = self._open() if self._call.name is not None and not self._call.opened else []
        call, self._call = self._call, _Call()
        self._ignore_fields(call)
        return [*late, *(self._registry.arguments("{}") if call.opened and not call.emitted else [])]

    def _ignore_fields(self, call: _Call) -> None:
        """Ignores fields that are no part of a call, and all fields of an object that is no call."""
        known = (self._syntax.id_key, *_NAME_KEYS, *self._syntax.written_keys)
        for key, value in call.fields.items():
            if not (call.opened and (key in known or self._holds_arguments_of(call, key))):
                self._registry.ignore(f" {key}: {value} ")


@dataclass
class _Call:
    """The state of the call that is being read."""

    name: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    opened: bool = False
    emitted: bool = False
    """Whether arguments were emitted."""
    started: bool = False
    """Whether the arguments have started."""
    packed: bool = False
    """Whether the arguments are a JSON string that holds JSON."""


def _string(text: str) -> str:
    value = _decode(text.strip())
    return value if isinstance(value, str) else text.strip()


def _unpack(text: str) -> str:
    """Arguments that are a JSON string that holds JSON: the inner JSON."""
    value = _decode(text) if text.startswith('"') else None
    return value if isinstance(value, str) else text
