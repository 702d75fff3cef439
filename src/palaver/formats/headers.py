"""Replies made of messages with typed headers: each says in its header whether it is thought, answer or call.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from palaver.formats.automaton import Builder
from palaver.formats.calls import named_json
from palaver.formats.calls.lark import Lark, joined, one_of
from palaver.formats.calls.schemas import checked_name, whole, without_letter
from palaver.formats.facts import Facts
from palaver.formats.markers import CONTROL_LIKE, parts
from palaver.messages import Tool
from palaver.phases import Phase

HEADER, ELSEWHERE = "header", "elsewhere"


@dataclass(frozen=True, slots=True)
class Headers:
    """The markers of a header and the words in it."""

    channel: str
    message: str
    message_end: str
    opening: str
    """What begins a further message."""
    thinking: str
    answers: tuple[str, ...]
    recipient: str
    """What stands before the name of a called function."""


def find_headers(facts: Facts) -> Headers | None:
    """Typed headers show in a thought's closing: it ends one message and opens the next."""
    if facts.thinking is None or not facts.header.strip() or facts.header.strip() not in facts.thinking.closing:
        return None
    opening, answer = parts(facts.thinking.opening), parts(facts.answer_opening)
    if len(opening) != 3 or len(answer) != 3:
        return None
    recipient, words = "", [answer[1]]
    if isinstance(facts.calls, named_json.Syntax):
        recipient = facts.calls.frame.call_open.strip()
        words += [part for part in parts(facts.calls.before_arguments) if not CONTROL_LIKE.fullmatch(part)]
    return Headers(
        opening[0], opening[2], parts(facts.thinking.closing)[0], facts.header, opening[1], tuple(words), recipient
    )


def add_states(builder: Builder, headers: Headers, offers_tools: bool, closing: tuple[int, ...]) -> dict[Phase, int]:
    """The states of the whole reply; the one in `Phase.CONTROL` is where a header begins."""
    header, thinks, answers, elsewhere = (builder.state(Phase.CONTROL, HEADER) for _ in range(4))
    thinking, answer = builder.state(Phase.THINKING), builder.state(Phase.ANSWER)
    dropped = builder.state(Phase.CONTROL, ELSEWHERE)
    between = builder.state(Phase.CONTROL, HEADER)
    builder.closes(thinking, closing)
    last = [thinking, answer, dropped]
    for state in (header, thinks, answers):
        if offers_tools and headers.recipient:
            last.append(_add_call(builder, headers, state))
        builder.on_text(state, _addressed(headers.recipient), elsewhere)
        builder.on_text(state, _addressed(headers.recipient) + parts(headers.opening)[-1], header)
        builder.on(state, headers.channel, header)
    builder.on(header, headers.thinking, thinks)
    for word in headers.answers:
        builder.on(header, word, answers)
        builder.on(answers, word, answers)
    for state, to in ((header, answer), (answers, answer), (thinks, thinking), (elsewhere, dropped)):
        builder.on(state, headers.message, to)
    for state in last:
        builder.on(state, headers.message_end, between)
    builder.on(between, headers.opening, header)
    builder.on(between, headers.channel, header)
    return {Phase.CONTROL: header, Phase.THINKING: thinking, Phase.ANSWER: answer}


def _addressed(recipient: str) -> str:
    """What stands before any recipient, of which functions are one kind."""
    found = re.match(r"\s*\w+\W", recipient)
    return found[0] if found else "to="


def _add_call(builder: Builder, headers: Headers, origin: int) -> int:
    name = builder.state(Phase.TOOL_CALL, named_json.NAME_SLOT)
    rest = builder.state(Phase.TOOL_CALL, named_json.GLUE)
    arguments = builder.state(Phase.TOOL_CALL, named_json.ARGUMENTS_SLOT)
    builder.on_text(origin, headers.recipient, name)
    builder.on_text(name, " ", rest)
    builder.on(name, headers.channel, rest)
    builder.on(name, headers.message, arguments)
    builder.on(rest, headers.message, arguments)
    for word in (headers.thinking, *headers.answers):
        builder.on(rest, word, rest)
    return arguments


def grammar(headers: Headers, syntax: named_json.Syntax, tools: Sequence[Tool], lead: str, lark: Lark) -> str:
    """One call, from where a header goes on behind its opening: to whom it is comes first, or behind the channel.
    `lead` is what stands before the recipient."""
    return one_of([lark.rule(_held(headers, syntax, tool, lead, lark)) for tool in tools])


def _held(headers: Headers, syntax: named_json.Syntax, tool: Tool, lead: str, lark: Lark) -> str:
    to = (lead or " ") + syntax.frame.call_open + checked_name(tool)
    channel, *kind = headers.answers[1:] or headers.answers
    after = "".join(f" {word}" for word in kind)
    behind = joined(lark.literal(headers.channel + channel + to), f"({lark.literal(after)})?" if after else "")
    ways = [lark.literal(to + syntax.before_arguments), joined(behind, lark.literal(headers.message))]
    arguments = lark.json(without_letter(whole(tool), lark.is_text(headers.message_end)))
    return joined(one_of(ways), arguments, lark.literal(syntax.frame.call_close))
