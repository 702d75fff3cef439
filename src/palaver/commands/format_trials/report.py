"""A readable report of the facts of a format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from palaver.formats.facts import Facts
from palaver.formats.prefill import LeadingSpace, write_partial_reply
from palaver.formats.reply_states import find_headers
from palaver.formats.switches import Switch
from palaver.formats.tool_calls import syntaxes
from palaver.formats.tool_calls.samples import IDS, NAME
from palaver.messages import Message, Role, Text, Thinking, ToolCall
from palaver.phases import Phase


@dataclass(frozen=True, slots=True)
class ExampleSpan:
    """A part of an example turn, and its kind."""

    text: str
    kind: str
    """header, marker, thinking, answer or call."""


def example_turn(facts: Facts) -> list[ExampleSpan]:
    """A complete turn as the model writes it."""
    spans = [ExampleSpan(facts.header, "header")]
    if facts.thinking is not None:
        spans += [ExampleSpan(facts.thinking.opening, "marker"), ExampleSpan("Two and two are four.", "thinking")]
        spans += [ExampleSpan(facts.thinking.closing, "marker")]
    spans += [ExampleSpan("It is 4.", "answer")]
    if facts.calls is not None:
        call = ToolCall(IDS[0], NAME, '{"first_key_q": "text value q", "second_key_q": 47113}')
        spans += [ExampleSpan(facts.space_before_calls + syntaxes.write(facts.calls, (call,), False), "call")]
    return [*spans, ExampleSpan(next(iter(facts.turn_ends), ""), "marker")]


def describe_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    """The facts as pairs of a name and a description."""
    yield "the assistant's turn opens with", repr(facts.header)
    yield "and ends with", ", ".join(map(repr, facts.turn_ends)) or "nothing that could be learned"
    yield "thinking", _describe_thinking(facts)
    yield "thinking is switched by", _describe_thinking_switch(facts)
    yield "thinking of earlier turns", "is kept" if facts.keeps_thinking else "is dropped by the template"
    if facts.keeping is not None:
        yield "it is kept with", f"{facts.keeping.name} = {facts.keeping.on!r}"
    yield "a message's thinking goes under", facts.reasoning_field or "nothing: the template does not take it"
    yield (
        "around an answer",
        f"{facts.answer_opening!r} and {facts.answer_closing!r}" if facts.answer_opening else "nothing",
    )
    yield "tool calls", _describe_calls(facts)
    yield "their arguments are handed over as", "JSON text" if facts.arguments_as_text else "objects"
    yield "declared stop strings", ", ".join(map(repr, facts.stop_strings)) or "none"


def describe_variables(facts: Facts) -> Iterator[tuple[str, str]]:
    """The template variables as pairs of a name and a description."""
    for switch in facts.switches:
        yield f"{switch.name} ({switch.kind})", _describe_switch(switch)


def _describe_thinking(facts: Facts) -> str:
    if facts.thinking is None:
        return "none could be learned: all that the model says is its answer"
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
    default = "" if switch.default is None else f"; left out it is as {switch.default!r}"
    return f"{takes}; changes {switch.changes}{default}"


def _describe_calls(facts: Facts) -> str:
    if facts.calls is None:
        return "none could be learned: markup of calls is shown as text"
    kind = facts.calls.family.replace("_", " ")
    return f"{kind}, in messages with typed headers" if find_headers(facts) else kind


def describe_continuation(facts: Facts) -> Iterator[tuple[str, str]]:
    """How partial replies are written, by where they stopped."""
    thought = (Thinking("Two and"),)
    answered = (Thinking("Two and two are four."), Text("It is"))
    called = (ToolCall(IDS[0], NAME, '{"first_key_q": "te'),)
    for name, parts, needed in (
        ("in mid-thought", thought, facts.thinking),
        ("in the answer after a thought", answered, facts.thinking),
        ("in an answer", (Text("It is"),), True),
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
        out.append("No thinking is split off; where the model thinks in words, they are part of its answer.")
    if facts.calls is None:
        out.append("Tool calls can't be read; offered tools are told to the model, its calls are shown as text.")
    if not facts.turn_ends:
        out.append("Only the model's own end tokens end a turn.")
    if not facts.header:
        out.append("The template writes nothing to open the assistant's turn.")
    return out
