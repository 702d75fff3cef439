"""Calls with the function's name between markers and its arguments as JSON.

<|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|>
[TOOL_CALLS]f[ARGS]{"a": 1}
<function=f>{"a": 1}</function>"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from palaver.events import ReadEvent
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.call_reader import CallRegistry, JsonScanner
from palaver.formats.tool_calls.lark import LarkBuilder, arguments_schema, check_tool_name, join_expressions
from palaver.formats.tool_calls.samples import ARGUMENTS, IDS, NAME, TEXT_KEY, CallFrame, CallSamples, learn_frame
from palaver.messages import Tool, ToolCall
from palaver.phases import Phase

NAME_SLOT, ID_SLOT, ARGUMENTS_SLOT, GLUE = "name", "id", "arguments", "glue"


@dataclass(frozen=True, slots=True)
class Syntax:
    frame: CallFrame
    before_id: str
    """Between the name and the id of the call, if the syntax has ids."""
    before_arguments: str
    """From the name or the id to the arguments."""
    family: Literal["named_json"] = "named_json"


def learn(samples: CallSamples) -> Syntax | None:
    at = samples.one.find(NAME)
    if at < 0:
        return None
    start = _arguments_at(samples.one, at)
    if start is None:
        return None
    middle = samples.one[at + len(NAME) : start]
    size = json.JSONDecoder().raw_decode(samples.one[start:])[1]
    frame = learn_frame(samples, at, start + size)
    if frame.counted:
        middle = middle.removeprefix(":0")
    before_id, found, rest = middle.partition(IDS[0])
    return Syntax(frame, before_id, rest) if found else Syntax(frame, "", middle)


def _arguments_at(text: str, start: int) -> int | None:
    for at in range(start, len(text)):
        if text[at] == "{" and TEXT_KEY in text[at:]:
            try:
                value = json.JSONDecoder().raw_decode(text[at:])[0]
            except ValueError:
                continue
            if value == ARGUMENTS:
                return at
    return None


def add_states(builder: StateMachineBuilder, syntax: Syntax, origins: tuple[int, ...], back: int) -> None:
    glue = builder.add_state(Phase.TOOL_CALL, GLUE)
    name = builder.add_state(Phase.TOOL_CALL, NAME_SLOT)
    arguments = builder.add_state(Phase.TOOL_CALL, ARGUMENTS_SLOT, quotes=b'"')
    syntax.frame.add_openings(builder, origins, glue, name)
    if syntax.before_id.strip():
        call_id = builder.add_state(Phase.TOOL_CALL, ID_SLOT)
        builder.add_marker(name, syntax.before_id, call_id)
        _on_arguments(builder, call_id, syntax, arguments)
    _on_arguments(builder, name, syntax, arguments)
    syntax.frame.add_closings(builder, arguments, glue, name, back)
    if not syntax.frame.call_close.strip():
        builder.set_default(glue, back)


def _on_arguments(builder: StateMachineBuilder, state: int, syntax: Syntax, arguments: int) -> None:
    if syntax.before_arguments.strip():
        builder.add_marker(state, syntax.before_arguments, arguments)
    elif syntax.before_arguments:
        builder.add_text_marker(state, syntax.before_arguments, arguments)
    builder.add_text_marker(state, "{", arguments, keep=True)


def write(syntax: Syntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    out = [syntax.frame.section_open]
    for place, call in enumerate(calls):
        out.append(syntax.frame.between(place) + syntax.frame.name(call, place))
        if last_is_open and place == len(calls) - 1 and not call.arguments:
            return "".join(out)
        out += [f"{syntax.before_id}{call.id}" if syntax.before_id else "", syntax.before_arguments, call.arguments]
        if last_is_open and place == len(calls) - 1:
            return "".join(out)
        out.append(syntax.frame.call_close)
    return "".join([*out, syntax.frame.section_close])


def grammar(syntax: Syntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    return syntax.frame.grammar(lark, [_tool_grammar(syntax, tool, lark) for tool in tools])


def _tool_grammar(syntax: Syntax, tool: Tool, lark: LarkBuilder) -> str:
    counted = lark.pattern(":[0-9]{1,3}") if syntax.frame.counted else ""
    call_id = (
        join_expressions(lark.literal(syntax.before_id), lark.pattern("[A-Za-z0-9]{9}")) if syntax.before_id else ""
    )
    named = join_expressions(lark.literal(check_tool_name(tool)), counted, call_id)
    return lark.rule(join_expressions(named, lark.literal(syntax.before_arguments), lark.json(arguments_schema(tool))))


_COUNTED = re.compile(r"\A(?:functions?\.)?(.+?):\d+\Z")


class Calls:
    def __init__(self, syntax: Syntax, registry: CallRegistry) -> None:
        self._syntax = syntax
        self._registry = registry
        self._name = ""
        self._id = ""
        self._json = JsonScanner()
        self._open = False

    def enter(self, slot: str) -> list[ReadEvent]:
        if slot == NAME_SLOT:
            self._ignore_unopened()
            self._name, self._id, self._open = "", "", False
        elif slot == ARGUMENTS_SLOT and not self._open:
            return self._begin()
        return []

    def truncate(self) -> list[ReadEvent]:
        return self.leave()

    def feed(self, slot: str, text: str) -> list[ReadEvent]:
        if slot == NAME_SLOT:
            self._name += text
        elif slot == ID_SLOT:
            self._id += text
        elif slot == ARGUMENTS_SLOT:
            text = text if self._json.started else text.lstrip()
            size = self._json.feed(text)
            self._registry.ignore(text[size:])
            return self._registry.arguments(text[:size])
        else:
            self._registry.ignore(text)
        return []

    def leave(self) -> list[ReadEvent]:
        """A name without arguments is a call if it is the start of a tool's name."""
        name = self._syntax.frame.without_prefix(self._name.strip())
        is_tool = name and any(tool.name.startswith(name) for tool in self._registry.tools)
        if is_tool and not self._open:
            return self._begin()
        self._ignore_unopened()
        return []

    def _ignore_unopened(self) -> None:
        if not self._open:
            self._registry.ignore(f" {self._name} {self._id} ")

    def _begin(self) -> list[ReadEvent]:
        self._open, self._json = True, JsonScanner()
        written = self._syntax.frame.without_prefix(self._name.strip())
        counted = _COUNTED.match(self._name.strip()) if self._syntax.frame.counted else None
        if counted:
            name = self._syntax.frame.without_prefix(counted[1])
            return [self._registry.open(self._tool_name(name), self._name.strip())]
        return [self._registry.open(self._tool_name(written), self._id.strip())]

    def _tool_name(self, name: str) -> str:
        """The name of an offered tool that stands as a word in the written name, else the written name."""
        names = sorted((tool.name for tool in self._registry.tools), key=len, reverse=True)
        known = next((known for known in names if _contains_word(name, known)), name)
        self._registry.ignore(f" {name.replace(known, ' ', 1)} ")
        return known


def _contains_word(text: str, name: str) -> bool:
    """Whether the name stands in the text and is no part of a longer name; `functions.` may come before it."""
    before = r"(?:(?<![\w.-])|(?<=\bfunctions\.)|(?<=\bfunction\.))"
    return re.search(rf"{before}{re.escape(name)}(?![\w.-])", text) is not None
