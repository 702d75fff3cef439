"""Grammars of one reply: which tokens its constraint allows next.

`AnswerGrammar` constrains the answer alone. `ReplyGrammar` constrains the whole reply, for calls that must come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from palaver.constraints import Constraint, MarkerConstraint
from palaver.engines.core.logits_changes import LogitsChanges, TokenMask
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.token_masks import BannedStrings, VocabularyIndex
from palaver.engines.grammars import CompiledGrammar, check_matcher
from palaver.phases import Phase, Phases, Trigger


def control_ids(phases: Phases) -> frozenset[int]:
    """Token ids that are no text."""
    markers = {t.marker for state in phases.states for t in state.triggers if isinstance(t.marker, int)}
    return phases.ends | phases.hidden | phases.markers | markers


def text_mask(size: int, index: VocabularyIndex, control: Iterable[int]) -> TokenMask:
    """The tokens that a grammar may allow: control tokens are no text, whatever they spell, and the id after the
    vocabulary is the grammar's own end token."""
    return TokenMask.without(size, (*control, *range(len(index.vocabulary), size)))


def next_tokens(matcher: Any, text: TokenMask) -> TokenMask:
    """The tokens of the text that a grammar allows next."""
    allowed = TokenMask(text.size, matcher.compute_bitmask())
    allowed.intersect(text)
    return allowed


class AnswerGrammar:
    """Constrains the answer, token by token. Thinking and tool calls are never constrained."""

    def __init__(self, phases: Phases, grammar: CompiledGrammar, index: VocabularyIndex) -> None:
        self._phases = phases
        self._grammar = grammar
        self._index = index
        self._control = control_ids(phases)
        self._text_mask = cache(lambda size: text_mask(size, index, self._control))
        self._destinations = cache(self._find_destinations)
        self._matcher: Any = grammar.matcher()
        self._started = False
        """Whether the matcher has accepted a token."""
        self._state = phases.start
        self._partial_marker: bytes | None = None
        """The text so far of a marker that leads out of the answer."""
        self._thought_closed = False
        self._blank_ids = _blank_ids(phases, index) if phases.may_think else frozenset[int]()
        """White space that the model writes between a thought and its answer; allowed once."""

    def accept_token(self, token_id: int, reply: ReplyState, forced: bool) -> None:
        """Call after the reply has appended the token."""
        left_thought = self._is_thinking(self._state) and not self._is_thinking(reply.state)
        self._thought_closed = self._thought_closed or left_thought
        before, self._state = self._state, reply.state
        if self._is_answer(before) != self._is_answer(reply.state):
            self._change_phase(reply)
        elif self._is_answer(reply.state) and token_id not in self._control:
            self._accept_answer_token(token_id, forced)

    def apply_mask(self, changes: LogitsChanges, reply: ReplyState) -> None:
        """Forbids all tokens that neither the constraint nor an exit from the answer allows. Raises RequestError if the
        grammar exceeds its limits at this token."""
        if self._is_part_of_marker(reply.state):
            allowed = self._rest_of_marker(changes.size, reply)
            if allowed.any():  # a continued reply may have other text there
                changes.allow_only(allowed)
            return
        if not self._is_answer(reply.state):
            if self._must_still_answer(reply.state):
                changes.ban(reply.stop_token_ids)
            return
        allowed = TokenMask(changes.size)
        if self._partial_marker is None:
            allowed = next_tokens(self._matcher, self._text_mask(changes.size))
        check_matcher(self._matcher)
        if self._may_exit():
            allowed.add(self._exit_ids(reply))
        changes.allow_only(allowed)

    def _is_answer(self, state: int) -> bool:
        return self._phases.states[state].phase is Phase.ANSWER

    def _is_thinking(self, state: int) -> bool:
        return self._phases.states[state].phase is Phase.THINKING

    def _must_still_answer(self, state: int) -> bool:
        """Whether the state is a thought that leads to an unfinished answer: the turn can't end inside of it."""
        if not self._is_thinking(state):
            return False
        triggers = self._phases.states[state].triggers
        leads_to_answer = any(Phase.ANSWER in self._destinations(trigger.to) for trigger in triggers)
        return leads_to_answer and not (self._started and self._matcher.is_accepting())

    def _may_exit(self) -> bool:
        """The model may think or call a tool before the answer, or after a complete one."""
        return self._partial_marker is not None or not self._started or bool(self._matcher.is_accepting())

    def _exit_ids(self, reply: ReplyState) -> set[int]:
        """Tokens that lead out of the answer: markers, and the end of the turn once there is an answer."""
        triggers = [t for t in self._phases.states[reply.state].triggers if self._leads_out(t)]
        written = self._partial_marker
        spelling = self._spelling_ids(triggers, written or b"")
        if written is not None and spelling:  # other tokens would leave the part of a marker in the answer
            return spelling
        ids = {t.marker for t in triggers if isinstance(t.marker, int)} | spelling
        if self._started:
            ids |= reply.stop_token_ids
        elif written is None:
            ids |= self._blank_ids
        return ids

    def _is_part_of_marker(self, state: int) -> bool:
        """Whether the state is inside of a marker of several parts, and other text leads into the answer."""
        here = self._phases.states[state]
        return here.phase is Phase.CONTROL and here.other is not None and self._is_answer(here.other)

    def _rest_of_marker(self, size: int, reply: ReplyState) -> TokenMask:
        """The tokens that continue a marker whose first part has come."""
        every = [trigger for trigger in self._phases.states[reply.state].triggers if trigger.to != reply.state]
        triggers = [trigger for trigger in every if self._may_follow(trigger)] or every
        allowed = TokenMask(size)
        allowed.add({trigger.marker for trigger in triggers if isinstance(trigger.marker, int)})
        allowed.add(self._spelling_ids(triggers, reply.buffered))
        if not reply.buffered:  # calls and answers may have white space between the parts
            others = [trigger for trigger in triggers if Phase.THINKING not in self._destinations(trigger.to)]
            for space in (b" ", b"\n"):
                allowed.add(self._spelling_ids(others, b"", space))
        return allowed

    def _leads_out(self, trigger: Trigger) -> bool:
        return not self._is_answer(trigger.to) and self._may_follow(trigger)

    def _may_follow(self, trigger: Trigger) -> bool:
        """Whether the trigger leads to what may come now, at once or as a part of a marker."""
        destinations = self._destinations(trigger.to)
        return not destinations or any(map(self._may_enter, destinations))

    def _may_enter(self, phase: Phase) -> bool:
        """After one thought no second one is allowed, and none where thinking is off. The turn ends with an answer."""
        if phase is Phase.THINKING:
            return self._phases.may_think and not self._thought_closed
        return self._started or phase is not Phase.END

    def _find_destinations(self, state: int, before: frozenset[int] = frozenset()) -> frozenset[Phase]:
        """The phase of the state; inside of a marker of several parts, those that it may lead to."""
        here = self._phases.states[state]
        if here.phase is not Phase.CONTROL or here.other is None:
            return frozenset((here.phase,))
        before |= {state}
        following = {trigger.to for trigger in here.triggers} - before
        return frozenset(phase for one in following for phase in self._find_destinations(one, before))

    def _spelling_ids(self, triggers: Iterable[Trigger], written: bytes, space: bytes = b"") -> set[int]:
        """Tokens that continue to spell one of the markers, of which so much is there, with the white space before it.
        Between the parts of a marker they have no other text."""
        ids: set[int] = set()
        for trigger in triggers:
            if isinstance(trigger.marker, bytes) and trigger.marker != written and trigger.marker.startswith(written):
                rest = space + trigger.marker[len(written) :]
                ids |= {i for size in range(1, len(rest)) for i in self._index.equal_to(rest[:size])}
                last = self._index.starting_with(rest)
                if self._is_part_of_marker(trigger.to):
                    last = [i for i in last if not self._index.vocabulary[i][len(rest) :].strip()]
                ids.update(last)
        return ids - self._control

    def _accept_answer_token(self, token_id: int, forced: bool) -> None:
        text = self._index.vocabulary[token_id] if token_id < len(self._index.vocabulary) else b""
        if self._partial_marker is not None:
            self._partial_marker += text
        elif self._matcher.try_consume_tokens([token_id]) == 1:
            self._started = True
        elif not forced and (self._started or text.strip()):
            self._partial_marker = text
        else:
            self._blank_ids = frozenset()

    def _change_phase(self, reply: ReplyState) -> None:
        """Enters or leaves the answer. An answer that has started is continued."""
        self._partial_marker = None
        text = reply.text_since_transition
        if not self._is_answer(reply.state) or not text.strip():
            return
        if self._matcher.try_consume_tokens(self._grammar.tokenize(text)) > 0:
            self._started = True


def _blank_ids(phases: Phases, index: VocabularyIndex) -> frozenset[int]:
    closing = {token_id for state in phases.states for token_id in state.closing}
    return frozenset(i for i in closing if i < len(index.vocabulary) and not index.vocabulary[i].strip())


class ReplyGrammar:
    """Constrains a whole reply, markers included (`Phases.held`). Thoughts are free; the required text must follow."""

    def __init__(self, phases: Phases, grammars: Mapping[Constraint, CompiledGrammar], index: VocabularyIndex) -> None:
        assert phases.held is not None
        self._phases = phases
        self._held = phases.held
        self._grammars = grammars
        self._index = index
        self._control = control_ids(phases)
        self._state = phases.start
        self._constraint = self._held.first
        self._matcher: Any = grammars[self._constraint].matcher()
        self._text_mask = cache(lambda size, control: text_mask(size, index, control))
        self._fits_after_thought = cache(self._can_follow_thought)
        self._completing_marker = cache(lambda marker: BannedStrings([marker.decode()], index, self._control))

    def accept_token(self, token_id: int, reply: ReplyState, forced: bool) -> None:
        """Call after the reply has appended the token."""
        was_thinking, self._state = self._is_thinking(self._state), reply.state
        if self._is_thinking(reply.state):
            return
        if was_thinking:
            self._start(self._held.later)
            self._consume(self._grammars[self._constraint].tokenize(reply.text_since_transition))
        else:
            self._consume([token_id])

    def apply_mask(self, changes: LogitsChanges, reply: ReplyState) -> None:
        """Forbids all tokens that do not lead to the required text; after it the turn may end. Raises RequestError if
        the grammar exceeds its limits at this token."""
        if self._is_thinking(reply.state):
            changes.ban(self._forbidden_in_thought(reply))
            return
        control = self._control.difference(self._constraint.ids)
        allowed = next_tokens(self._matcher, self._text_mask(changes.size, control))
        check_matcher(self._matcher)
        if self._matcher.is_accepting():
            allowed.add(reply.stop_token_ids)
        if allowed.any():  # otherwise no token could come, and the reply would never end
            changes.allow_only(allowed)

    def _start(self, constraint: MarkerConstraint) -> None:
        self._constraint, self._matcher = constraint, self._grammars[constraint].matcher()

    def _consume(self, ids: list[int]) -> None:
        """If a continued reply does not fit the grammar, its text stays and the required text follows it."""
        if self._matcher.try_consume_tokens(ids) < len(ids) and not self._matcher.is_error():
            self._start(self._held.later)

    def _is_thinking(self, state: int) -> bool:
        """Whether the state is a thought, or a marker that may still turn out to be a part of one."""
        here = self._phases.states[state]
        if here.phase is Phase.CONTROL and here.other is not None:
            return self._phases.states[here.other].phase is Phase.THINKING
        return here.phase is Phase.THINKING

    def _forbidden_in_thought(self, reply: ReplyState) -> set[int]:
        """The end of the turn, markers of calls, and tokens that would close the thought with text behind it that the
        grammar does not allow."""
        triggers = self._phases.states[reply.state].triggers
        markers = {trigger.marker for trigger in triggers if isinstance(trigger.marker, int)}
        forbidden = (set(reply.stop_token_ids) | set(self._held.later.ids)) - markers
        for trigger in triggers:
            if isinstance(trigger.marker, bytes) and not self._is_thinking(trigger.to):
                forbidden |= self._overrunning_ids(trigger.marker, reply)
        return forbidden

    def _overrunning_ids(self, marker: bytes, reply: ReplyState) -> set[int]:
        """Tokens that complete the marker and continue with text that does not fit."""
        completing: BannedStrings = self._completing_marker(marker)
        tail = completing.tail(reply.token_ids)
        ids = set()
        for token_id in completing.banned_ids(reply.token_ids).tolist():
            text = tail + self._index.vocabulary[token_id]
            if not self._fits_after_thought(text[text.index(marker) + len(marker) :]):
                ids.add(token_id)
        return ids

    def _can_follow_thought(self, text: bytes) -> bool:
        grammar = self._grammars[self._held.later]
        ids = grammar.tokenize(text)
        return bool(grammar.matcher().try_consume_tokens(ids) == len(ids))
