"""The anatomy of a reply: the automaton of its phases, put together from what is known of the format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from palaver.formats.facts import Facts
from palaver.formats.markers import CONTROL_LIKE, looks_special, split_marker
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls import json_calls, named_json, syntaxes
from palaver.formats.tool_calls.lark import LarkBuilder, join_expressions, one_of
from palaver.formats.tool_calls.schemas import arguments_schema, check_tool_name, without_letter
from palaver.messages import Tool
from palaver.phases import Phase, Phases

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
    opening, answer = split_marker(facts.thinking.opening), split_marker(facts.answer_opening)
    if len(opening) != 3 or len(answer) != 3:
        return None
    recipient, words = "", [answer[1]]
    if isinstance(facts.calls, named_json.Syntax):
        recipient = facts.calls.frame.call_open.strip()
        words += [part for part in split_marker(facts.calls.before_arguments) if not CONTROL_LIKE.fullmatch(part)]
    return Headers(
        opening[0],
        opening[2],
        split_marker(facts.thinking.closing)[0],
        facts.header,
        opening[1],
        tuple(words),
        recipient,
    )


def add_header_states(
    builder: StateMachineBuilder, headers: Headers, offers_tools: bool, closing: tuple[int, ...]
) -> dict[Phase, int]:
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
        builder.on_text(state, _addressed(headers.recipient) + split_marker(headers.opening)[-1], header)
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


def _add_call(builder: StateMachineBuilder, headers: Headers, origin: int) -> int:
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


def header_grammar(
    headers: Headers, syntax: named_json.Syntax, tools: Sequence[Tool], lead: str, lark: LarkBuilder
) -> str:
    """One call, from where a header goes on behind its opening: to whom it is comes first, or behind the channel.
    `lead` is what stands before the recipient."""
    return one_of([lark.rule(_held(headers, syntax, tool, lead, lark)) for tool in tools])


def _held(headers: Headers, syntax: named_json.Syntax, tool: Tool, lead: str, lark: LarkBuilder) -> str:
    to = (lead or " ") + syntax.frame.call_open + check_tool_name(tool)
    channel, *kind = headers.answers[1:] or headers.answers
    after = "".join(f" {word}" for word in kind)
    behind = join_expressions(
        lark.literal(headers.channel + channel + to), f"({lark.literal(after)})?" if after else ""
    )
    ways = [lark.literal(to + syntax.before_arguments), join_expressions(behind, lark.literal(headers.message))]
    arguments = lark.json(without_letter(arguments_schema(tool), lark.is_text(headers.message_end)))
    return join_expressions(one_of(ways), arguments, lark.literal(syntax.frame.call_close))


class ReplyStates:
    """Builds the phases of one turn. `offers_tools` is whether a call may come, `must_call` whether one must: then a
    thought neither calls nor ends the turn."""

    def __init__(self, facts: Facts, control: Mapping[str, int], special_ids: frozenset[int]) -> None:
        self._facts = facts
        self._control = control
        self._special_ids = special_ids
        self._known: dict[tuple[Phase, bool, tuple[int, ...], bool], Phases] = {}

    def phases(
        self, opens_in: Phase, offers_tools: bool, closing_ids: tuple[int, ...], must_call: bool = False
    ) -> Phases:
        key = (opens_in, offers_tools, closing_ids, must_call)
        if key not in self._known:
            self._known[key] = self._build(*key)
        return self._known[key]

    def _build(self, opens_in: Phase, offers_tools: bool, closing_ids: tuple[int, ...], must_call: bool) -> Phases:
        headers = find_headers(self._facts)
        if headers is not None:
            return self._typed(headers, opens_in, offers_tools, closing_ids, must_call)
        builder = StateMachineBuilder(self._control)
        fresh, answer = builder.state(Phase.ANSWER), builder.state(Phase.ANSWER)
        thinking = builder.state(Phase.THINKING)
        builder.leads(fresh, answer)
        ends = self._ends(offers_tools)
        self._add_thinking(builder, fresh, answer, thinking, closing_ids)
        if offers_tools and self._facts.calls is not None:
            self._add_calls(builder, fresh, answer, None if must_call else thinking)
        self._add_answer(builder, fresh, answer)
        self._add_ends(builder, ends, (fresh, answer) if must_call else (fresh, answer, thinking))
        self._add_strays(builder, fresh, answer)
        ids = frozenset(self._control[end] for end in ends if end in self._control)
        start = thinking if opens_in is Phase.THINKING else fresh
        return builder.build(start, ids, self._special_ids, self._call_marker_ids)

    @cached_property
    def _call_marker_ids(self) -> frozenset[int]:
        """The markers of calls that are tokens: no text of a reply that may not call, either."""
        if self._facts.calls is None:
            return frozenset()
        builder = StateMachineBuilder(self._control)
        answer = builder.state(Phase.ANSWER)
        if isinstance(self._facts.calls, json_calls.Syntax) and self._facts.calls.bare:
            json_calls.add_bare(builder, self._facts.calls, answer)
        else:
            syntaxes.add_states(builder, self._facts.calls, (answer,), answer)
        return builder.marker_ids

    def _typed(
        self, headers: Headers, opens_in: Phase, offers_tools: bool, closing: tuple[int, ...], must_call: bool
    ) -> Phases:
        builder = StateMachineBuilder(self._control)
        states = add_header_states(builder, headers, offers_tools, closing)
        ends = [end for end in self._facts.turn_ends if end != headers.message_end]
        own = states[Phase.THINKING] if must_call else None
        self._add_ends(builder, ends, tuple(state for state in range(builder.size) if state != own))
        ids = frozenset(self._control[end] for end in ends if end in self._control)
        start = states[Phase.THINKING if opens_in is Phase.THINKING else Phase.CONTROL]
        return builder.build(start, ids, self._special_ids, self._call_marker_ids)

    def _ends(self, offers_tools: bool) -> list[str]:
        """What ends the turn, but for what begins a call."""
        begins = ""
        if offers_tools and self._facts.calls is not None:
            begins = next(iter(split_marker(syntaxes.opening(self._facts.calls), self._control)), "")
        return [end for end in self._facts.turn_ends if end != begins]

    def _add_thinking(
        self, builder: StateMachineBuilder, fresh: int, answer: int, thinking: int, closing: tuple[int, ...]
    ) -> None:
        facts = self._facts.thinking
        if facts is None:
            return
        builder.on(fresh, facts.opener, thinking, fallback=answer)
        first = split_marker(facts.opener, self._control)[:1]
        if all(part in self._control or looks_special(part) for part in first):
            builder.on(answer, facts.opener, thinking)
        builder.on(thinking, facts.closer, fresh)
        builder.closes(thinking, closing)

    def _add_answer(self, builder: StateMachineBuilder, fresh: int, answer: int) -> None:
        """Markers around the answer are read and said to nobody."""
        opening = self._facts.answer_opening
        behind = split_marker(self._facts.thinking.closing, self._control) if self._facts.thinking else ()
        closer = split_marker(self._facts.thinking.closer, self._control) if self._facts.thinking else ()
        for part in (*behind[len(closer) :], *split_marker(opening, self._control)):
            if CONTROL_LIKE.fullmatch(part):
                builder.on(fresh, part, fresh)
        if opening.strip() and not CONTROL_LIKE.search(opening):
            builder.on_text(fresh, opening.lstrip(), answer)
        for part in split_marker(self._facts.answer_closing, self._control):
            if CONTROL_LIKE.fullmatch(part):
                builder.on(answer, part, fresh)
                builder.on(fresh, part, fresh)

    def _add_calls(self, builder: StateMachineBuilder, fresh: int, answer: int, thinking: int | None) -> None:
        calls = self._facts.calls
        assert calls is not None
        if isinstance(calls, json_calls.Syntax) and calls.bare:
            json_calls.add_bare(builder, calls, fresh)
            return
        syntaxes.add_states(builder, calls, (fresh, answer), fresh)
        if self._facts.thinking is not None and thinking is not None:
            syntaxes.add_states(builder, calls, (thinking,), thinking)

    def _add_ends(self, builder: StateMachineBuilder, ends: list[str], states: tuple[int, ...]) -> None:
        end = builder.state(Phase.END)
        for text in ends:
            if text not in self._control and text.strip():
                for state in states:
                    builder.on(state, text, end)

    def _add_strays(self, builder: StateMachineBuilder, fresh: int, answer: int) -> None:
        """Control text that nobody means as text is not said where it strays into an answer."""
        header = [part for part in split_marker(self._facts.header, self._control) if CONTROL_LIKE.fullmatch(part)]
        markers = [self._facts.thinking.closer] if self._facts.thinking else []
        for marker in (*header, *markers):
            if looks_special(marker):
                builder.on(fresh, marker, fresh)
                builder.on(answer, marker, answer)
