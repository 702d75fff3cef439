"""Holds the answer of one reply to its constraint: which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from palaver.constraints import Constraint
from palaver.engines.grammars import CompiledGrammar, check_matcher
from palaver.engines.reply import Reply
from palaver.engines.torch.banned import Spelling
from palaver.phases import Phase, Phases, Trigger
from palaver.sampling import Sampling


class Guide:
    """Follows a reply token by token. Thinking and calls are never constrained."""

    def __init__(self, phases: Phases, grammar: CompiledGrammar, spelling: Spelling) -> None:
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

    def take(self, token_id: int, reply: Reply, forced: bool) -> None:
        """The reply has taken this token; it is in its new state already."""
        self._thought = self._thought or (self._thinks(self._state) and not self._thinks(reply.state))
        before, self._state = self._state, reply.state
        if self._answers(before) != self._answers(reply.state):
            self._move(reply)
        elif self._answers(reply.state) and token_id not in self._control:
            self._follow(token_id, forced)

    def forbid(self, scores: Tensor, reply: Reply) -> None:
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

    def _ways_out(self, reply: Reply) -> set[int]:
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

    def _move(self, reply: Reply) -> None:
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


def _blanks(phases: Phases, spelling: Spelling) -> frozenset[int]:
    closing = {token_id for state in phases.states for token_id in state.closing}
    return frozenset(i for i in closing if i < len(spelling.vocabulary) and not spelling.vocabulary[i].strip())


def _texts(triggers: Iterable[Trigger]) -> list[bytes]:
    return [trigger.marker for trigger in triggers if isinstance(trigger.marker, bytes)]
