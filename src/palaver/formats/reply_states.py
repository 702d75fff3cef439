"""The state machine of a reply, built from the facts of the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from palaver.formats.facts import Facts
from palaver.formats.markers import CONTROL_LIKE, common_start, looks_special, split_marker
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls import json_calls, named_json, syntaxes
from palaver.phases import Phase, Phases

HEADER, ELSEWHERE, FIRST_LINE = "header", "elsewhere", "first_line"
"""Slots of states: a message header, a message to an unknown recipient, a thought whose first line the prompt wrote."""


@dataclass(frozen=True, slots=True)
class Headers:
    """The markers and words of typed message headers (channels)."""

    channel: str
    message: str
    message_end: str
    opening: str
    """The text that opens another message."""
    thinking: str
    answers: tuple[str, ...]
    recipient: str
    """The text before the name of a called function."""
    address: str
    """The text before any recipient; functions are one kind of recipient."""


def find_headers(facts: Facts) -> Headers | None:
    """The typed headers of a format, if any: then the closing of a thought ends one message and opens the next. Headers
    name a channel, or the recipient of the message."""
    if facts.thinking is None or not facts.header.strip() or facts.header.strip() not in facts.thinking.closing:
        return None
    opening, answer = split_marker(facts.thinking.opening), split_marker(facts.answer_opening)
    if len(opening) == len(answer) == 2:
        return _find_addresses(facts, opening, answer)
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
        _recipient_prefix(recipient),
    )


def _find_addresses(facts: Facts, opening: tuple[str, ...], answer: tuple[str, ...]) -> Headers | None:
    """Headers that name the recipient: one for thoughts, another for answers."""
    assert facts.thinking is not None
    shared = re.match(r"\w*\W+", common_start(opening[0], answer[0]))
    if shared is None or opening[1] != answer[1] or CONTROL_LIKE.search(opening[0] + answer[0]):
        return None
    message_end = split_marker(facts.thinking.closing)[0]
    return Headers("", opening[1], message_end, facts.header, opening[0], (answer[0],), "", shared[0])


def add_header_states(
    builder: StateMachineBuilder,
    headers: Headers,
    calls: syntaxes.CallSyntax | None,
    closing: tuple[int, ...],
) -> dict[Phase, int]:
    """Adds the states of a reply with typed headers. A header begins in the state of `Phase.CONTROL`."""
    header, thinks, answers, elsewhere = (builder.add_state(Phase.CONTROL, HEADER) for _ in range(4))
    thinking, answer = builder.add_state(Phase.THINKING), builder.add_state(Phase.ANSWER)
    dropped = builder.add_state(Phase.CONTROL, ELSEWHERE)
    between = builder.add_state(Phase.CONTROL, HEADER)
    builder.set_closing(thinking, closing)
    addressed, body = builder.add_state(Phase.CONTROL), builder.add_state(Phase.ANSWER)
    builder.add_marker(addressed, headers.message, body)
    if calls is not None and not headers.channel:
        syntaxes.add_states(builder, calls, (body,), body)
    last = [thinking, answer, dropped, body]
    for state in (header, thinks, answers):
        if calls is not None and headers.recipient:
            last.append(_add_call(builder, headers, state))
        elif calls is not None and not headers.channel:
            builder.add_text_marker(state, headers.address, addressed)
        builder.add_text_marker(state, headers.address, elsewhere)
        builder.add_text_marker(state, headers.address + split_marker(headers.opening)[-1], header)
        builder.add_marker(state, headers.channel, header)
    builder.add_marker(header, headers.thinking, thinks)
    for word in headers.answers:
        builder.add_marker(header, word, answers)
        builder.add_marker(answers, word, answers)
    for state, to in ((header, answer), (answers, answer), (thinks, thinking), (elsewhere, dropped)):
        builder.add_marker(state, headers.message, to)
    for state in last:
        builder.add_marker(state, headers.message_end, between)
    builder.add_marker(between, headers.opening, header)
    builder.add_marker(between, headers.channel, header)
    return {Phase.CONTROL: header, Phase.THINKING: thinking, Phase.ANSWER: answer}


def _recipient_prefix(recipient: str) -> str:
    """The text before any recipient; functions are one kind of recipient."""
    found = re.match(r"\s*\w+\W", recipient)
    return found[0] if found else "to="


def _add_call(builder: StateMachineBuilder, headers: Headers, origin: int) -> int:
    name = builder.add_state(Phase.TOOL_CALL, named_json.NAME_SLOT)
    rest = builder.add_state(Phase.TOOL_CALL, named_json.GLUE)
    arguments = builder.add_state(Phase.TOOL_CALL, named_json.ARGUMENTS_SLOT)
    builder.add_text_marker(origin, headers.recipient, name)
    builder.add_text_marker(name, " ", rest)
    builder.add_marker(name, headers.channel, rest)
    builder.add_marker(name, headers.message, arguments)
    builder.add_marker(rest, headers.message, arguments)
    for word in (headers.thinking, *headers.answers):
        builder.add_marker(rest, word, rest)
    return arguments


class ReplyStates:
    """Builds the phases of replies in one format.

    `offers_tools` allows tool calls, `must_call` requires one: then a thought neither calls nor ends the turn."""

    def __init__(self, facts: Facts, control: Mapping[str, int], special_ids: frozenset[int]) -> None:
        self._facts = facts
        self._control = control
        self._special_ids = special_ids

    def phases(
        self, opens_in: Phase, offers_tools: bool, closing_ids: tuple[int, ...], must_call: bool = False
    ) -> Phases:
        headers = find_headers(self._facts)
        if headers is not None:
            return self._build_with_headers(headers, opens_in, offers_tools, closing_ids, must_call)
        builder = StateMachineBuilder(self._control)
        fresh, answer = builder.add_state(Phase.ANSWER), builder.add_state(Phase.ANSWER)
        first_line = self._facts.thinking is not None and self._facts.thinking.first_line
        thoughts = builder.add_state(Phase.THINKING, FIRST_LINE * first_line), builder.add_state(Phase.THINKING)
        builder.set_default(fresh, answer)
        builder.set_default(*thoughts)
        ends = self._ends(offers_tools)
        self._add_thinking(builder, fresh, answer, thoughts, closing_ids)
        if offers_tools and self._facts.calls is not None:
            self._add_calls(builder, fresh, answer, () if must_call else thoughts)
        self._add_answer(builder, fresh, answer, thoughts)
        end = builder.add_state(Phase.END)
        if offers_tools:
            self._add_messages(builder, fresh, answer, end)
        self._add_ends(builder, ends, end, (fresh, answer) if must_call else (fresh, answer, *thoughts))
        self._add_strays(builder, fresh, answer)
        ids = frozenset(self._control[end] for end in ends if end in self._control)
        start = thoughts[0] if opens_in is Phase.THINKING else fresh
        return builder.build(start, ids, self._special_ids, self._call_marker_ids)

    @cached_property
    def _call_marker_ids(self) -> frozenset[int]:
        """The token ids of call markers. They are no text even in a reply without tools."""
        if self._facts.calls is None:
            return frozenset()
        builder = StateMachineBuilder(self._control)
        answer = builder.add_state(Phase.ANSWER)
        if isinstance(self._facts.calls, json_calls.Syntax) and self._facts.calls.bare:
            json_calls.add_bare(builder, self._facts.calls, answer)
        else:
            syntaxes.add_states(builder, self._facts.calls, (answer,), answer)
        return builder.marker_ids

    def _build_with_headers(
        self, headers: Headers, opens_in: Phase, offers_tools: bool, closing: tuple[int, ...], must_call: bool
    ) -> Phases:
        builder = StateMachineBuilder(self._control)
        states = add_header_states(builder, headers, self._facts.calls if offers_tools else None, closing)
        ends = [end for end in self._facts.turn_ends if end != headers.message_end]
        excluded = [states[Phase.THINKING]] if must_call else []
        if self._facts.call_header:  # such calls have a marker of their own at the end
            excluded += builder.states_in(Phase.TOOL_CALL)
        states_with_ends = tuple(state for state in range(builder.size) if state not in excluded)
        self._add_ends(builder, ends, builder.add_state(Phase.END), states_with_ends)
        ids = frozenset(self._control[end] for end in ends if end in self._control)
        start = states[Phase.THINKING if opens_in is Phase.THINKING else Phase.CONTROL]
        phases = builder.build(start, ids, self._special_ids, self._call_marker_ids)
        if not self._facts.call_header:
            return phases
        calls = self._call_marker_ids  # in messages to others they are text
        return replace(phases, markers=phases.markers - calls, hidden=phases.hidden - calls)

    def _ends(self, offers_tools: bool) -> list[str]:
        """The markers that end the turn, without one that opens a call."""
        call_opening = ""
        if offers_tools and self._facts.calls is not None:
            call_opening = next(iter(split_marker(syntaxes.opening(self._facts.calls), self._control)), "")
        return [end for end in self._facts.turn_ends if end != call_opening]

    def _add_thinking(
        self, builder: StateMachineBuilder, fresh: int, answer: int, thoughts: tuple[int, int], closing: tuple[int, ...]
    ) -> None:
        """A closing marker without a thought, and a second opening marker, have no meaning. Markers that are ordinary
        text have one only at the start of an answer or thought: later they are text."""
        facts = self._facts.thinking
        if facts is None:
            return
        opened, thinking = thoughts
        if facts.first_line:
            builder.add_text_marker(fresh, facts.opener, opened, keep=True)
        else:
            builder.add_marker(fresh, facts.opener, opened, fallback=answer)
            builder.add_marker(opened, facts.opener, opened, fallback=thinking)
        if self._is_never_text(facts.opener) and not facts.first_line:
            builder.add_marker(answer, facts.opener, opened)
            builder.add_marker(thinking, facts.opener, thinking)
        for state in thoughts:
            builder.add_marker(state, facts.closer, fresh)
            builder.set_closing(state, closing)
        if facts.closer in self._facts.turn_ends:
            return
        builder.add_marker(fresh, facts.closer, fresh, fallback=answer)
        if self._is_never_text(facts.closer):
            builder.add_marker(answer, facts.closer, answer)

    def _is_never_text(self, marker: str) -> bool:
        return all(part in self._control or looks_special(part) for part in split_marker(marker, self._control)[:1])

    def _add_answer(self, builder: StateMachineBuilder, fresh: int, answer: int, thoughts: tuple[int, ...]) -> None:
        """Markers around the answer are no part of it."""
        opening = self._facts.answer_opening
        if self._facts.sections is not None:
            for state in (fresh, *thoughts):  # an answer also ends a thought that was not closed
                builder.add_marker(state, opening, fresh)
            for state in (fresh, answer):
                builder.add_marker(state, self._facts.answer_closing, fresh)
            return
        closing = split_marker(self._facts.thinking.closing, self._control) if self._facts.thinking else ()
        closer = split_marker(self._facts.thinking.closer, self._control) if self._facts.thinking else ()
        if self._facts.thinking is not None and self._facts.header.strip() in self._facts.thinking.closing:
            builder.add_marker(fresh, self._facts.header, fresh, fallback=answer)  # the answer is another message
        if len(split_marker(opening, self._control)) > 1 and CONTROL_LIKE.search(opening):
            builder.add_marker(fresh, opening, fresh, fallback=answer)
        for part in (*closing[len(closer) :], *split_marker(opening, self._control)):
            if CONTROL_LIKE.fullmatch(part):
                builder.add_marker(fresh, part, fresh)
        if opening.strip() and not CONTROL_LIKE.search(opening):
            builder.add_text_marker(fresh, opening.lstrip(), answer)
        builder.add_marker(fresh, self._facts.called_text_opening, fresh, fallback=answer)
        for part in split_marker(self._facts.answer_closing + self._facts.called_text_closing, self._control):
            if CONTROL_LIKE.fullmatch(part):
                builder.add_marker(answer, part, fresh)
                builder.add_marker(fresh, part, fresh)

    def _add_calls(self, builder: StateMachineBuilder, fresh: int, answer: int, thoughts: tuple[int, ...]) -> None:
        calls = self._facts.calls
        assert calls is not None
        if isinstance(calls, json_calls.Syntax) and calls.bare:
            json_calls.add_bare(builder, calls, fresh)
            return
        syntaxes.add_states(builder, calls, (fresh, answer), fresh)
        if self._facts.thinking is not None and self._facts.calls_in_thought and thoughts:
            syntaxes.add_states(builder, calls, thoughts, thoughts[-1])
        elif self._facts.thinking is not None:
            for state in thoughts:
                builder.keep_tokens(state, self._call_marker_ids, thoughts[-1])

    def _add_messages(self, builder: StateMachineBuilder, fresh: int, answer: int, end: int) -> None:
        """If calls are in a message after that of the answer, the end of the answer's message does not end the turn.
        Anything but the header of another message does."""
        header = self._facts.header.strip()
        message_end, found, _ = self._facts.space_before_calls.partition(header) if header else ("", "", "")
        if not found or message_end.strip() not in self._facts.turn_ends:
            return
        between = builder.add_state(Phase.CONTROL, HEADER)
        builder.set_default(between, end)
        builder.add_marker(between, header, fresh, fallback=end)
        builder.add_marker(fresh, message_end, between)
        builder.add_marker(answer, message_end, between)

    def _add_ends(self, builder: StateMachineBuilder, ends: list[str], end: int, states: tuple[int, ...]) -> None:
        for text in ends:
            if text not in self._control and text.strip():
                for state in states:
                    builder.add_marker(state, text, end)

    def _add_strays(self, builder: StateMachineBuilder, fresh: int, answer: int) -> None:
        """Stray control markers in an answer are no text."""
        header = [part for part in split_marker(self._facts.header, self._control) if CONTROL_LIKE.fullmatch(part)]
        for marker in header:
            if looks_special(marker):
                builder.add_marker(fresh, marker, fresh)
                builder.add_marker(answer, marker, answer)
