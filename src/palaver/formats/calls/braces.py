"""Calls with bare keys in braces and texts between quotation marks of the model's own.

<|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from palaver.events import ReadEvent
from palaver.formats.automaton import Builder
from palaver.formats.calls.opened import OpenedCalls
from palaver.formats.calls.repeated import Frame, learn_frame
from palaver.formats.calls.samples import NAME, NUMBER_KEY, NUMBER_VALUE, TEXT_KEY, TEXT_VALUE, Samples
from palaver.messages import ToolCall
from palaver.phases import Phase

NAME_SLOT, BRACES_SLOT, TEXT_SLOT, GLUE = "name", "braces", "text", "glue"


@dataclass(frozen=True, slots=True)
class Syntax:
    frame: Frame
    quote: str


def learn(samples: Samples) -> Syntax | None:
    pattern = rf"{NAME}\{{{TEXT_KEY}:(?P<quote>\S+?){re.escape(TEXT_VALUE)}(?P=quote),\s*{NUMBER_KEY}:{NUMBER_VALUE}\}}"
    found = re.search(pattern, samples.one)
    if found is None:
        return None
    return Syntax(learn_frame(samples, found.start(), found.end()), found["quote"])


def add_states(builder: Builder, syntax: Syntax, froms: tuple[int, ...], back: int) -> None:
    glue = builder.state(Phase.TOOL_CALL, GLUE)
    name = builder.state(Phase.TOOL_CALL, NAME_SLOT)
    braces = builder.state(Phase.TOOL_CALL, BRACES_SLOT)
    text = builder.state(Phase.TOOL_CALL, TEXT_SLOT)
    syntax.frame.add_openings(builder, froms, glue, name)
    builder.on_text(name, "{", braces, keep=True)
    builder.on(braces, syntax.quote, text)
    builder.on(text, syntax.quote, braces)
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
    """The JSON text with its own notation: bare keys, texts between the model's quotation marks."""
    out = re.sub(r'"(\w+)":\s*', r"\1:", text)
    out = re.sub(r'"((?:[^"\\]|\\.)*)("|\Z)', lambda m: _quoted(m[1], quote, bool(m[2])), out)
    return re.sub(r",\s+", ",", out)


def _quoted(text: str, quote: str, closed: bool) -> str:
    try:
        plain = json.loads(f'"{text}"')
    except ValueError:
        plain = text
    return f"{quote}{plain}{quote if closed else ''}"


class Calls:
    def __init__(self, syntax: Syntax, opened: OpenedCalls) -> None:
        self._opened = opened
        self._frame = syntax.frame
        self._name = ""
        self._word = ""
        self._last = ""
        self._depth = 0
        self._began = False

    def enter(self, slot: str) -> list[ReadEvent]:
        previous, self._last = self._last, slot
        if slot == NAME_SLOT:
            events = self.leave()
            self._name, self._began, self._depth = "", False, 0
            return events
        if slot == BRACES_SLOT and not self._began:
            self._began = True
            return [self._opened.open(self._frame.without_prefix(self._name.strip()).removeprefix("call:"))]
        if slot == TEXT_SLOT or (slot == BRACES_SLOT and previous == TEXT_SLOT):
            return [*self._flush(), *self._opened.arguments('"')]
        return []

    def cut(self) -> list[ReadEvent]:
        return self.leave()

    def say(self, slot: str, text: str) -> list[ReadEvent]:
        if slot == NAME_SLOT:
            self._name += text
            return []
        if slot == TEXT_SLOT:
            return self._opened.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if slot == BRACES_SLOT:
            return self._opened.arguments("".join(map(self._step, text)))
        self._opened.ignore(text)
        return []

    def leave(self) -> list[ReadEvent]:
        self._ignore_unopened()
        return self._flush()

    def _ignore_unopened(self) -> None:
        if not self._began:
            self._opened.ignore(f" {self._name} ")

    def _step(self, character: str) -> str:
        """Words are keys where a colon follows, else values."""
        if self._began and not self._depth and character != "{":
            self._opened.ignore(character)
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
        return self._opened.arguments(word)
