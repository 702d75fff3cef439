"""Sample tool calls as a template renders them, from which a syntax is learned, and the frame of a list of calls: the
section around them, and the markers around each call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from palaver.formats.markers import CONTROL_LIKE, common_end, common_start
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls.lark import LarkBuilder, join_expressions, one_of
from palaver.messages import ToolCall

NAME, OTHER_NAME = "probe_alpha_q", "probe_beta_q"
TEXT_KEY, TEXT_VALUE = "first_key_q", "text value q"
NUMBER_KEY, NUMBER_VALUE = "second_key_q", 47113
LISTED_VALUE = "listed_value_q"
IDS = ("probeid01", "probeid02")
ARGUMENTS: dict[str, Any] = {TEXT_KEY: TEXT_VALUE, NUMBER_KEY: NUMBER_VALUE}
LISTED_ARGUMENTS: dict[str, Any] = {TEXT_KEY: [LISTED_VALUE, True], NUMBER_KEY: True}


@dataclass(frozen=True, slots=True)
class CallSamples:
    """Rendered assistant turns, from the start of the reply to the end of the turn."""

    one: str
    """One call with two arguments."""
    two: str | None
    """Two calls to different tools; None if the template allows one call only."""
    none: str | None
    """One call without arguments."""
    ends: tuple[str, ...]
    """The markers that end a turn."""
    listed: str | None = None
    """One call with a list of a text and true, and with true itself."""


def sample_tools() -> list[dict[str, Any]]:
    properties = {
        TEXT_KEY: {"type": "string", "description": "a text"},
        NUMBER_KEY: {"type": "integer", "description": "a number"},
    }
    schema = {"type": "object", "properties": properties, "required": [TEXT_KEY]}
    return [
        {"type": "function", "function": {"name": name, "description": "a probe", "parameters": schema}}
        for name in (NAME, OTHER_NAME)
    ]


def sample_calls(count: int, as_text: bool, arguments: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    given = ARGUMENTS if arguments is None else arguments
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given) if as_text else dict(given)},
        }
        for name, call_id in list(zip((NAME, OTHER_NAME), IDS, strict=True))[:count]
    ]


def strip_turn_end(text: str, ends: tuple[str, ...]) -> str:
    """The text up to the first marker that ends a turn."""
    cuts = [at for end in ends if end and (at := text.find(end)) >= 0]
    return text[: min(cuts)] if cuts else text


@dataclass(frozen=True, slots=True)
class CallFrame:
    section_open: str
    call_open: str
    """The text up to the name."""
    call_close: str
    """The text after the arguments."""
    separator: str
    """Between two calls."""
    section_close: str
    counted: bool = False
    """Whether the name is followed by a number; together they are the id of the call."""
    tag_prefix: str = ""
    """The text before every tag of the calls, such as a control token."""

    @property
    def opening(self) -> str:
        return self.section_open or self.call_open

    def between(self, place: int) -> str:
        return (self.separator if place else "") + self.call_open

    def name(self, call: ToolCall, place: int) -> str:
        if not self.counted:
            return call.name
        counted_id = call.id.removeprefix(self.prefix)
        return counted_id if counted_id.endswith(f":{place}") else f"{call.name}:{place}"

    @property
    def prefix(self) -> str:
        """The word directly before the name, as in `functions.f`."""
        match = re.search(r"[\w.]+\Z", self.call_open)
        return match[0] if match else ""

    def without_prefix(self, written: str) -> str:
        return written.removeprefix(self.prefix) if self.prefix else written

    def grammar(self, lark: LarkBuilder, calls: list[str]) -> str:
        """The grammar of a list of calls. `calls` are expressions from a tool's name to the end of its arguments."""
        opening = lark.literal(self.call_open)
        one = lark.rule(join_expressions(opening, one_of(calls), lark.literal(self.call_close)))
        separator = lark.literal(self.separator)
        more = f"({join_expressions(separator, one)})*" if separator or opening else ""
        return join_expressions(lark.literal(self.section_open), one, more, lark.literal(self.section_close))

    def add_openings(self, builder: StateMachineBuilder, origins: tuple[int, ...], glue: int, name: int) -> None:
        """Transitions from text to a call: through the section, or directly if the model leaves it out."""
        builder.add_unit(self.tag_prefix)
        opener = self.call_open.removesuffix(self.prefix) if self._tagged else self.call_open
        if not opener.strip():
            self._add_bare_openings(builder, origins, name)
            return
        for origin in origins:
            if self.section_open.strip():
                builder.add_marker(origin, self.section_open, glue, fallback=origin)
            for marker in _endings(builder, opener):
                builder.add_marker(origin, marker, name, fallback=origin)
        for marker in _endings(builder, opener):
            builder.add_marker(glue, marker, name)

    def _add_bare_openings(self, builder: StateMachineBuilder, origins: tuple[int, ...], name: int) -> None:
        """If the prompt opens the first call, a reply starts with the name."""
        if not self.section_open.strip():
            builder.set_default(origins[0], name)
        for origin in origins:
            builder.add_marker(origin, self.section_open.strip() or self.separator, name)

    def add_closings(self, builder: StateMachineBuilder, last: int, glue: int, name: int, back: int) -> None:
        """Transitions from the end of a call to the next one, or out of the calls."""
        opener = self.call_open.removesuffix(self.prefix) if self._tagged else self.call_open
        has_section = bool(self.section_close.strip())
        if self.call_close.strip():
            builder.add_marker(last, self.call_close, glue if has_section else back)
        if has_section:
            builder.add_marker(last, self.section_close, back)
            builder.add_marker(glue, self.section_close, back)
        if opener.strip() or self.separator.strip():
            builder.add_marker(last, opener.strip() or self.separator, name)

    @property
    def _tagged(self) -> bool:
        """Whether the opening has a marker beside the word before the name."""
        return bool(CONTROL_LIKE.search(self.call_open))


def _endings(builder: StateMachineBuilder, opener: str) -> list[str]:
    """The opening, and its last markers alone: models may leave out the first ones."""
    found = builder.split(opener)
    starts = [place for place, part in enumerate(found) if part[0] in "<[" and (len(part) > 2)]
    return [opener, *(" ".join(found[place:]) for place in starts if place)]


def learn_frame(samples: CallSamples, name_at: int, end: int) -> CallFrame:
    """The frame of the samples. `end` is the end of the arguments in `samples.one`."""
    before = samples.one[:name_at]
    tail = samples.one[end:]
    counted = f"{NAME}:0" in samples.one
    if samples.two is None or OTHER_NAME not in samples.two:
        opening, closing = before.lstrip() or before, strip_turn_end(tail, samples.ends)
        return CallFrame("", opening, closing, "", "", counted, _tag_prefix(samples))
    middle = samples.two[_first_call_end(samples.two, samples.one[name_at:end]) : samples.two.index(OTHER_NAME)]
    call_open = common_end(before, middle)
    rest = middle[: len(middle) - len(call_open)]
    call_close = common_start(rest, tail).rstrip() if rest.strip() else ""
    call_close = rest[: len(rest) - len(rest[len(call_close) :])]
    separator = rest[len(call_close) :]
    section_open = before[: len(before) - len(call_open)]
    after = tail[len(call_close) :]
    section_close = strip_turn_end(after, samples.ends)
    if not section_open.strip():
        space = call_open[: len(call_open) - len(call_open.lstrip())]
        section_open, section_close, separator, call_open = "", "", separator + space, call_open.lstrip()
    section_open = section_open.lstrip()
    return CallFrame(section_open, call_open, call_close, separator, section_close, counted, _tag_prefix(samples))


def _tag_prefix(samples: CallSamples) -> str:
    """The text without white space that stands before every tag in the calls."""
    text = strip_turn_end(samples.one, samples.ends)
    before = [text[: tag.start()] for tag in re.finditer(r"</?\w[\w:.-]*", text)]
    if len(before) < 4:
        return ""
    size = 0
    while all(size < len(part) and part[-1 - size] == before[0][-1 - size] for part in before):
        size += 1
    shared = before[0][len(before[0]) - size :].split()
    return shared[-1] if shared and not before[0][-1:].isspace() else ""


def _first_call_end(two: str, body: str) -> int:
    """The end of the first call's arguments in `samples.two`."""
    return two.index(body) + len(body)
