"""Holds the answer of one reply to its constraint: which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from palaver.constraints import Constraint, Marked
from palaver.engines.core.logits_processors import BannedStrings, VocabularyIndex
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.grammars import CompiledGrammar, check_matcher
from palaver.phases import Phase, Phases, Trigger
from palaver.sampling import Sampling


class AnswerGrammar:
    """Follows a reply token by token. Thinking and calls are never constrained."""

    def __init__(self, phases: Phases, grammar: CompiledGrammar, spelling: VocabularyIndex) -> None:
        self._phases = phases
        self._grammar = grammar
        self._spelling = spelling
        self._control = control_ids(phases)
        self._matcher: Any = grammar.matcher()
        self._begun = False
        self._state = phases.start
        self._leaving: bytes | None = None
        """What was said of a marker that leads out of the state."""
        self._thought = False
        """Whether a thought was had and closed."""
        self._blanks = _blanks(phases, spelling)
        """The white space that the model is used to between a thought and its answer; said once."""

    def take(self, token_id: int, reply: ReplyState, forced: bool) -> None:
        """The reply has taken this token; it is in its new state already."""
        self._thought = self._thought or (self._thinks(self._state) and not self._thinks(reply.state))
        before, self._state = self._state, reply.state
        if self._answers(before) != self._answers(reply.state):
            self._move(reply)
        elif self._answers(reply.state) and token_id not in self._control:
            self._follow(token_id, forced)

    def forbid(self, scores: Tensor, reply: ReplyState) -> None:
        """Leaves only tokens that the constraint, or a way out of it, allows. Raises RequestError where the grammar
        exceeds its limits at this token."""
        if not self._answers(reply.state):
            if self._owes_an_answer(reply.state):
                scores[[i for i in reply.closers if i < scores.shape[0]]] = -torch.inf
            return
        allowed = torch.zeros(scores.shape[0], dtype=torch.bool)
        if self._leaving is None:
            self._allow_by_grammar(allowed)
        check_matcher(self._matcher)
        if self._may_leave():
            ways_out = self._ways_out(reply)
            allowed[[i for i in ways_out if i < scores.shape[0]]] = True
        scores.masked_fill_(~allowed.to(scores.device), -torch.inf)

    def _answers(self, state: int) -> bool:
        return self._phases.states[state].phase is Phase.ANSWER

    def _thinks(self, state: int) -> bool:
        return self._phases.states[state].phase is Phase.THINKING

    def _owes_an_answer(self, state: int) -> bool:
        """Whether a thought leads to something that must be said: then the turn can't end in the thought."""
        if not self._thinks(state):
            return False
        leads = any(self._answers(trigger.to) for trigger in self._phases.states[state].triggers)
        return leads and not (self._begun and self._matcher.is_accepting())

    def _allow_by_grammar(self, allowed: Tensor) -> None:
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        size = min(len(allowed), len(bias) - 1)  # the last one is the grammar's own end
        allowed[:size] = bias[:size] > 0
        allowed[[i for i in self._control if i < len(allowed)]] = False

    def _may_leave(self) -> bool:
        """Instead of the answer the model may still think, or call; whatever was begun must be whole."""
        return self._leaving is not None or not self._begun or bool(self._matcher.is_accepting())

    def _ways_out(self, reply: ReplyState) -> set[int]:
        """Markers of the state that lead out of it; after one thought the answer is due, not another. The end of the
        turn only where something was said."""
        triggers = [t for t in self._phases.states[reply.state].triggers if self._leads_out(t)]
        found = {t.marker for t in triggers if isinstance(t.marker, int)}
        found |= reply.closers if self._begun else self._blanks
        for marker in _texts(triggers):
            found |= self._continuing(marker)
        return found

    def _leads_out(self, trigger: Trigger) -> bool:
        return not self._thought if self._thinks(trigger.to) else not self._answers(trigger.to)

    def _continuing(self, marker: bytes) -> set[int]:
        """Tokens that go on spelling this marker."""
        said = self._leaving or b""
        if not marker.startswith(said) or marker == said:
            return set()
        rest = marker[len(said) :]
        shorter = {i for size in range(1, len(rest)) for i in self._spelling.spelling_exactly(rest[:size])}
        return (shorter | set(self._spelling.beginning_with(rest))) - self._control

    def _follow(self, token_id: int, forced: bool) -> None:
        text = self._spelling.vocabulary[token_id] if token_id < len(self._spelling.vocabulary) else b""
        if self._leaving is not None:
            self._leaving += text
        elif self._matcher.try_consume_tokens([token_id]) == 1:
            self._begun = True
        elif not forced and (self._begun or text.strip()):
            self._leaving = text
        else:
            self._blanks = frozenset()

    def _move(self, reply: ReplyState) -> None:
        """Into the answer or out of it; one that was begun goes on."""
        self._leaving = None
        said = reply.said_since_entering
        if not self._answers(reply.state) or not said.strip():
            return
        if self._matcher.try_consume_tokens(self._grammar.tokenize(said)) > 0:
            self._begun = True


def constraints_of(phases: Phases, sampling: Sampling) -> list[Constraint]:
    """All that may come to hold in a reply."""
    if phases.held is not None:  # nothing is answered then
        return [phases.held.first, phases.held.later]
    return [sampling.constraint] if sampling.constraint is not None else []


def control_ids(phases: Phases) -> frozenset[int]:
    """Tokens that are no text."""
    markers = {t.marker for state in phases.states for t in state.triggers if isinstance(t.marker, int)}
    return phases.ends | phases.hidden | phases.markers | markers


def _blanks(phases: Phases, spelling: VocabularyIndex) -> frozenset[int]:
    closing = {token_id for state in phases.states for token_id in state.closing}
    return frozenset(i for i in closing if i < len(spelling.vocabulary) and not spelling.vocabulary[i].strip())


def _texts(triggers: Iterable[Trigger]) -> list[bytes]:
    return [trigger.marker for trigger in triggers if isinstance(trigger.marker, bytes)]


class ReplyGrammar:
    """Follows a reply token by token. Thoughts are free, but they lead to what must be said and nowhere else."""

    def __init__(
        self, phases: Phases, grammars: Mapping[Constraint, CompiledGrammar], spelling: VocabularyIndex
    ) -> None:
        assert phases.held is not None
        self._phases = phases
        self._held = phases.held
        self._grammars = grammars
        self._spelling = spelling
        self._control = control_ids(phases)
        self._state = phases.start
        self._constraint = self._held.first
        self._matcher: Any = grammars[self._constraint].matcher()
        self._fits = cache(self._fits_behind_a_thought)
        self._closing = cache(lambda marker: BannedStrings([marker.decode()], spelling, self._control))

    def take(self, token_id: int, reply: ReplyState, forced: bool) -> None:
        """The reply has taken this token; it is in its new state already."""
        thought, self._state = self._thinks(self._state), reply.state
        if self._thinks(reply.state):
            return
        if thought:
            self._begin(self._held.later)
            self._consume(self._grammars[self._constraint].tokenize(reply.said_since_entering))
        else:
            self._consume([token_id])

    def forbid(self, scores: Tensor, reply: ReplyState) -> None:
        """Leaves only tokens that lead on to what must be said; once it is, the turn may end. Raises RequestError
        where the grammar exceeds its limits at this token."""
        size = scores.shape[0]
        if self._thinks(reply.state):
            scores[[i for i in self._astray(reply) if i < size]] = -torch.inf
            return
        allowed = self._allowed(size)
        check_matcher(self._matcher)
        if self._matcher.is_accepting():
            allowed[[i for i in reply.closers if i < size]] = True
        if allowed.any():  # else nothing is left to say, and nothing would end it
            scores.masked_fill_(~allowed.to(scores.device), -torch.inf)

    def _allowed(self, size: int) -> Tensor:
        """By the grammar. Control tokens that it does not name are no text, whatever they spell."""
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        allowed = torch.zeros(size, dtype=torch.bool)
        known = min(size, len(bias) - 1)  # the last one is the grammar's own end
        allowed[:known] = bias[:known] > 0
        allowed[[i for i in self._control - set(self._constraint.ids) if i < size]] = False
        return allowed

    def _begin(self, constraint: Marked) -> None:
        self._constraint, self._matcher = constraint, self._grammars[constraint].matcher()

    def _consume(self, ids: list[int]) -> None:
        """What was begun by somebody else and does not fit is let be: what must be said comes behind it."""
        if self._matcher.try_consume_tokens(ids) < len(ids) and not self._matcher.is_error():
            self._begin(self._held.later)

    def _thinks(self, state: int) -> bool:
        """Inside of a thought, or of a marker that may still turn out to be a part of it."""
        here = self._phases.states[state]
        if here.phase is Phase.CONTROL and here.other is not None:
            return self._phases.states[here.other].phase is Phase.THINKING
        return here.phase is Phase.THINKING

    def _astray(self, reply: ReplyState) -> set[int]:
        """What must not be said in a thought: the end of the turn, markers of calls, and whatever would leave the
        thought with something behind it that can't come there."""
        triggers = self._phases.states[reply.state].triggers
        markers = {trigger.marker for trigger in triggers if isinstance(trigger.marker, int)}
        found = (set(reply.closers) | set(self._held.later.ids)) - markers
        for trigger in triggers:
            if isinstance(trigger.marker, bytes) and not self._thinks(trigger.to):
                found |= self._crossing(trigger.marker, reply)
        return found

    def _crossing(self, marker: bytes, reply: ReplyState) -> set[int]:
        """Tokens that complete the marker and go on with text that does not fit."""
        closing: BannedStrings = self._closing(marker)
        tail = closing.tail(reply.ids)
        found = set()
        for token_id in closing.ids(reply.ids).tolist():
            said = tail + self._spelling.vocabulary[token_id]
            if not self._fits(said[said.index(marker) + len(marker) :]):
                found.add(token_id)
        return found

    def _fits_behind_a_thought(self, text: bytes) -> bool:
        later = self._grammars[self._held.later]
        ids = later.tokenize(text)
        return bool(later.matcher().try_consume_tokens(ids) == len(ids))
