"""A readable report of the facts of a format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from palaver.formats.facts import Facts, Switch
from palaver.formats.prefill import LeadingSpace, write_partial_reply
from palaver.formats.reply_states import find_headers
from palaver.formats.tool_calls import syntaxes
from palaver.formats.tool_calls.samples import IDS
from palaver.messages import Message, Role, Text, Thinking, ToolCall
from palaver.phases import Phase


@dataclass(frozen=True, slots=True)
class ExampleSpan:
    """A part of an example turn, and its kind."""

    text: str
    kind: str
    """header, marker, thinking, answer or call."""


_THOUGHT, _ANSWER = "Rain or not? I look it up.", "Let me check."
_CALL = ToolCall(IDS[0], "get_weather", '{"city": "Paris", "days": 2}')
_SYNTAXES = {
    "json_calls": "JSON objects",
    "named_json": "the name, then JSON arguments",
    "parameters": "a marker for each argument",
    "python_calls": "Python calls",
    "elements": "nested elements, one for each argument",
    "braces": "the name, then arguments in braces",
}


def example_turn(facts: Facts) -> list[ExampleSpan]:
    """A complete turn as the model writes it."""
    text, spans = _write_turn(facts), [ExampleSpan(facts.header, "header")]
    for content, kind in ((_THOUGHT, "thinking"), (_ANSWER, "answer")):
        before, found, after = text.partition(content)
        if found:
            spans += [ExampleSpan(before, "marker"), ExampleSpan(content, kind)]
            text = after
    end = (*facts.turn_ends[1:], *facts.turn_ends, "")[0]  # the first one is often only the tokenizer's
    return [span for span in (*spans, ExampleSpan(text, "call"), ExampleSpan(end, "marker")) if span.text]


def _write_turn(facts: Facts) -> str:
    thought = (Thinking(_THOUGHT),) if facts.thinking is not None else ()
    calls = (_CALL,) if facts.calls is not None else ()
    message = Message(Role.ASSISTANT, (*thought, Text(_ANSWER), *calls))
    text = write_partial_reply(facts, message, Phase.ANSWER, LeadingSpace())
    if facts.thinking is not None and facts.thinking.first_line:
        text = facts.thinking.opening + text
    if facts.calls is None:
        return text
    opened, closed = (syntaxes.write(facts.calls, calls, is_open) for is_open in (True, False))
    return text.removesuffix(opened) + closed


def describe_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    """The facts as pairs of a name and a description."""
    yield "the assistant's turn opens with", repr(facts.header)
    yield "and ends with", ", ".join(map(repr, facts.turn_ends)) or "nothing that could be learned"
    yield "thinking", _describe_thinking(facts)
    yield "thinking is switched by", _describe_thinking_switch(facts)
    yield "thinking of earlier turns", "is kept" if facts.keeps_thinking else "is dropped by the template"
    if facts.keeping is not None:
        yield "it is kept with", f"{facts.keeping.name} = {facts.keeping.on!r}"
    yield "the message field for thinking", facts.reasoning_field or "none: the template reads no thinking"
    yield "around an answer", _describe_frame(facts.answer_opening, facts.answer_closing)
    if facts.called_text_opening:
        yield (
            "around an answer with calls after it",
            _describe_frame(facts.called_text_opening, facts.called_text_closing),
        )
    if facts.sections is not None:
        open_, close, end = facts.sections.open, facts.sections.close, facts.sections.end
        yield "parts are sections with a name", f"{open_}NAME{end} ... {close}NAME{end}"
    yield "tool calls", _describe_calls(facts)
    if facts.calls is not None and facts.thinking is not None:
        inside = "is a call" if facts.calls_in_thought else "is text of the thought"
        yield "a call inside a thought", inside
    yield "the template gets their arguments as", "JSON text" if facts.arguments_as_text else "objects"
    yield "declared stop strings", ", ".join(map(repr, facts.stop_strings)) or "none"


def describe_variables(facts: Facts) -> Iterator[tuple[str, str]]:
    """The template variables as pairs of a name and a description."""
    for switch in facts.switches:
        yield f"{switch.name} ({switch.kind})", _describe_switch(switch)


def _describe_thinking(facts: Facts) -> str:
    if facts.thinking is None:
        return "none could be learned: the whole reply is the answer"
    if facts.thinking.first_line:
        return f"the prompt writes its first line, {facts.thinking.opening!r}, and {facts.thinking.closing!r} ends it"
    markers = f"between {facts.thinking.opening!r} and {facts.thinking.closing!r}"
    return f"{markers} (by convention: the template does not show it)" if facts.thinking.by_convention else markers


def _describe_thinking_switch(facts: Facts) -> str:
    switch = facts.switch
    if switch is None:
        return "nothing: the template has no switch"
    on = "left out" if switch.on is None else repr(switch.on)
    return f"{switch.name} = {on} / {switch.off!r}"


def _describe_switch(switch: Switch) -> str:
    values = ", ".join(map(repr, switch.values))
    kind = {"any": "anything"}.get(switch.type, switch.type)
    takes = f"{kind} ({values}{' or others' if switch.others else ''})" if values and kind != "boolean" else kind
    default = "" if switch.default is None else f"; the default is {switch.default!r}"
    return f"{takes}; changes {switch.changes}{default}"


def _describe_calls(facts: Facts) -> str:
    if facts.calls is None:
        return "none could be learned: calls are shown as text"
    opening = syntaxes.opening(facts.calls).strip()
    kind = _SYNTAXES[facts.calls.family] + (f", after {opening!r}" if opening else "")
    if facts.call_header:
        return f"{kind}, each in a message that is addressed to the tool"
    return f"{kind}, in messages with typed headers" if find_headers(facts) else kind


def _describe_frame(opening: str, closing: str) -> str:
    sides = [f"{text!r} {side} it" for text, side in ((opening, "before"), (closing, "after")) if text]
    return " and ".join(sides) or "nothing"


def describe_continuation(facts: Facts) -> Iterator[tuple[str, str]]:
    """How partial replies are written, by where they stopped."""
    thought = (Thinking(_THOUGHT[:12]),)
    answered = (Thinking(_THOUGHT), Text(_ANSWER[:6]))
    called = (replace(_CALL, arguments='{"city": "Par'),)
    for name, parts, needed in (
        ("in mid-thought", thought, facts.thinking),
        ("in the answer after a thought", answered, facts.thinking),
        ("in an answer", (Text(_ANSWER[:6]),), True),
        ("in a tool call", called, facts.calls),
    ):
        if needed is None:
            yield name, "not possible: the format has none"
        else:
            message = Message(Role.ASSISTANT, parts)
            yield name, repr(write_partial_reply(facts, message, Phase.ANSWER, LeadingSpace()))


def describe_unlearned(facts: Facts) -> list[str]:
    """The facts that could not be learned, and the consequences."""
    out = []
    if facts.thinking is None:
        out.append("Thinking: if the model thinks, its thoughts are part of the answer.")
    if facts.calls is None:
        out.append("Tool calls: the prompt lists the tools, and calls are shown as text.")
    if not facts.turn_ends:
        out.append("The end of a turn: only the end-of-sequence tokens of the model end one.")
    if not facts.header:
        out.append("The start of a turn: the template writes nothing before a reply.")
    return out
