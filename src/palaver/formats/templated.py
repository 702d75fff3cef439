"""A learned format: the two verbs `render` and `reader` over one template and one tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from palaver.errors import BadParameter, EmptyMessage, NoMessages, TemplateError, UnsupportedContent
from palaver.formats.facts import Facts
from palaver.formats.learning import learn
from palaver.formats.options import Options
from palaver.formats.provenance import Fence
from palaver.formats.reader import Reader
from palaver.formats.template import Template
from palaver.formats.tokenizer import Run, Tokenizer
from palaver.generation import Prompt
from palaver.messages import Message, Role, Text, Thinking, Tool, ToolCall, ToolResult
from palaver.phases import Phase, Phases, State, Trigger

_ANSWERING, _THINKING = 0, 1


class TemplateFormat:
    """How one model talks."""

    def __init__(self, template: Template, tokenizer: Tokenizer, strings: Mapping[str, str]) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._strings = strings
        self.facts: Facts = learn(template, strings, tokenizer.control)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options = Options(),  # noqa: B008 - frozen
        reply_so_far: Sequence[int] = (),
    ) -> Prompt:
        """The prompt for the assistant's next turn. Depends on its arguments alone."""
        _check(messages)
        said = {"messages": [self._message(m) for m in messages], "tools": _schemas(tools) or None}
        guarded = self._fence.guard({**said, **options.variables})
        given = {**self._strings, **guarded.value, **self._thinking(options)}
        text = self._template.render({**given, "add_generation_prompt": True}, options.now)
        opens_in = self._opens_in(text, self._closed(given, options.now))
        ids = self._tokenizer.encode(self._runs(text, guarded.mark))
        return Prompt(tuple(ids), tuple(reply_so_far), self._phases(opens_in))

    def reader(self, prompt: Prompt, stops: Sequence[str] = ()) -> Reader:
        return Reader(prompt, self._tokenizer.vocabulary, stops)

    @cached_property
    def _fence(self) -> Fence:
        """What no content may spell as more than text: the tokenizer's own tokens and the format's markers."""
        markers = self.facts.thinking
        return Fence([*self._tokenizer.control, *((markers.opener, markers.closer) if markers else ())])

    def _thinking(self, options: Options) -> dict[str, Any]:
        if options.thinking is None:
            return {}
        switch = self.facts.switch
        if switch is None:
            wanted = "on" if options.thinking else "off"
            raise BadParameter("think", wanted, "this model's chat template has no switch for thinking")
        return {switch.variable: switch.on if options.thinking else switch.off}

    def _closed(self, given: Mapping[str, Any], now: datetime | None) -> str:
        try:
            return self._template.render({**given, "add_generation_prompt": False}, now)
        except TemplateError:  # some refuse a conversation that doesn't end in a reply
            return ""

    def _opens_in(self, text: str, closed: str) -> Phase:
        """Only what the template itself added as the reply's opening is looked at."""
        markers = self.facts.thinking
        opening = text[len(closed) :] if closed and text.startswith(closed) else ""
        if markers and opening.rfind(markers.opener) > opening.rfind(markers.closer):
            return Phase.THINKING
        return Phase.ANSWER

    def _runs(self, text: str, mark: str = "") -> Iterator[Run]:
        """The text parted into control tokens and the runs between them, without the marks."""
        control = self._tokenizer.control
        at = 0
        for match in self._control_pattern.finditer(text) if control else ():
            if plain := text[at : match.start()].replace(mark, ""):
                yield plain
            yield control[match[0]]
            at = match.end()
        if plain := text[at:].replace(mark, ""):
            yield plain

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._tokenizer.control, key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, longest_first)))

    def _phases(self, opens_in: Phase) -> Phases:
        ends = frozenset(i for text in self.facts.turn_ends if (i := self._tokenizer.control.get(text)) is not None)
        markers = self.facts.thinking
        if markers is None:
            return Phases((State(Phase.ANSWER),), ends=ends, hidden=self._tokenizer.special_ids)
        closing = tuple(self._tokenizer.encode(self._runs(markers.closing)))
        states = (
            State(Phase.ANSWER, (Trigger(self._marker(markers.opener), _THINKING),)),
            State(Phase.THINKING, (Trigger(self._marker(markers.closer), _ANSWERING),), closing),
        )
        start = _THINKING if opens_in is Phase.THINKING else _ANSWERING
        return Phases(states, start, ends, self._tokenizer.special_ids)

    def _marker(self, text: str) -> int | bytes:
        return self._tokenizer.control.get(text, text.encode())

    def _message(self, message: Message) -> dict[str, Any]:
        out: dict[str, Any] = {"role": str(message.role), "content": _content(message)}
        if message.thinking and self.facts.reasoning_field:
            out[self.facts.reasoning_field] = message.thinking
        if message.tool_calls:
            out["tool_calls"] = [_call(call) for call in message.tool_calls]
        for result in message.tool_results:
            out |= {"tool_call_id": result.call_id} | ({"name": result.name} if result.name else {})
        return out


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise NoMessages
    if not any(message.role is Role.USER for message in messages):
        raise NoMessages
    last = messages[-1]
    if last.role is Role.USER and not last.text.strip() and all(isinstance(part, Text) for part in last.parts):
        raise EmptyMessage


def _content(message: Message) -> str:
    texts = []
    for part in message.parts:
        match part:
            case Text(text):
                texts.append(text)
            case ToolResult(_, content):
                texts.append(content)
            case Thinking() | ToolCall():
                pass
            case _:
                raise UnsupportedContent(f"This model takes text only, not {type(part).__name__.lower()}.")
    return "".join(texts)


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
        }
        for t in tools
    ]
