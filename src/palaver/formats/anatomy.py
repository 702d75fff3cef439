"""The anatomy of a reply: the automaton of its phases, put together from what is known of the format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from palaver.formats.automaton import Builder
from palaver.formats.calls import json_calls, syntaxes
from palaver.formats.facts import Facts
from palaver.formats.headers import Headers, add_states, find_headers
from palaver.formats.markers import CONTROL_LIKE, looks_special, parts
from palaver.phases import Phase, Phases


class Anatomy:
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
        builder = Builder(self._control)
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
        builder = Builder(self._control)
        answer = builder.state(Phase.ANSWER)
        if isinstance(self._facts.calls, json_calls.Syntax) and self._facts.calls.bare:
            json_calls.add_bare(builder, self._facts.calls, answer)
        else:
            syntaxes.add_states(builder, self._facts.calls, (answer,), answer)
        return builder.marker_ids

    def _typed(
        self, headers: Headers, opens_in: Phase, offers_tools: bool, closing: tuple[int, ...], must_call: bool
    ) -> Phases:
        builder = Builder(self._control)
        states = add_states(builder, headers, offers_tools, closing)
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
            begins = next(iter(parts(syntaxes.opening(self._facts.calls), self._control)), "")
        return [end for end in self._facts.turn_ends if end != begins]

    def _add_thinking(self, builder: Builder, fresh: int, answer: int, thinking: int, closing: tuple[int, ...]) -> None:
        facts = self._facts.thinking
        if facts is None:
            return
        builder.on(fresh, facts.opener, thinking, fallback=answer)
        first = parts(facts.opener, self._control)[:1]
        if all(part in self._control or looks_special(part) for part in first):
            builder.on(answer, facts.opener, thinking)
        builder.on(thinking, facts.closer, fresh)
        builder.closes(thinking, closing)

    def _add_answer(self, builder: Builder, fresh: int, answer: int) -> None:
        """Markers around the answer are read and said to nobody."""
        opening = self._facts.answer_opening
        behind = parts(self._facts.thinking.closing, self._control) if self._facts.thinking else ()
        closer = parts(self._facts.thinking.closer, self._control) if self._facts.thinking else ()
        for part in (*behind[len(closer) :], *parts(opening, self._control)):
            if CONTROL_LIKE.fullmatch(part):
                builder.on(fresh, part, fresh)
        if opening.strip() and not CONTROL_LIKE.search(opening):
            builder.on_text(fresh, opening.lstrip(), answer)
        for part in parts(self._facts.answer_closing, self._control):
            if CONTROL_LIKE.fullmatch(part):
                builder.on(answer, part, fresh)
                builder.on(fresh, part, fresh)

    def _add_calls(self, builder: Builder, fresh: int, answer: int, thinking: int | None) -> None:
        calls = self._facts.calls
        assert calls is not None
        if isinstance(calls, json_calls.Syntax) and calls.bare:
            json_calls.add_bare(builder, calls, fresh)
            return
        syntaxes.add_states(builder, calls, (fresh, answer), fresh)
        if self._facts.thinking is not None and thinking is not None:
            syntaxes.add_states(builder, calls, (thinking,), thinking)

    def _add_ends(self, builder: Builder, ends: list[str], states: tuple[int, ...]) -> None:
        end = builder.state(Phase.END)
        for text in ends:
            if text not in self._control and text.strip():
                for state in states:
                    builder.on(state, text, end)

    def _add_strays(self, builder: Builder, fresh: int, answer: int) -> None:
        """Control text that nobody means as text is not said where it strays into an answer."""
        header = [part for part in parts(self._facts.header, self._control) if CONTROL_LIKE.fullmatch(part)]
        markers = [self._facts.thinking.closer] if self._facts.thinking else []
        for marker in (*header, *markers):
            if looks_special(marker):
                builder.on(fresh, marker, fresh)
                builder.on(answer, marker, answer)
