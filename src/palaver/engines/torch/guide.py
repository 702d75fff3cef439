"""Holds one reply to its constraints: which tokens may come next, in the phase the constraint belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from palaver.constraints import Constraint
from palaver.engines.reply import Reply
from palaver.engines.torch.banned import Spelling
from palaver.engines.torch.grammars import Grammars
from palaver.phases import Phase, Phases, Trigger
from palaver.sampling import Sampling


class Guide:
    """Follows a reply token by token. Thinking is never constrained."""

    def __init__(self, phases: Phases, sampling: Sampling, grammars: Grammars, spelling: Spelling) -> None:
        self._phases = phases
        self._answer = sampling.constraint
        self._grammars = grammars
        self._spelling = spelling
        self._control = control_ids(phases)
        self._matchers: dict[Constraint, Any] = {}
        self._begun: set[Constraint] = set()
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
        before, after = self._constraint(self._state), self._constraint(reply.state)
        if reply.state != self._state and before is not after:
            self._move(reply.state, reply.said_since_entering)
        elif token_id not in self._control:
            self._state = reply.state
            self._follow(token_id, forced)

    def forbid(self, scores: Tensor, reply: Reply) -> None:
        """Leaves only tokens that the constraint, or a way out of it, allows."""
        constraint = self._constraint(reply.state)
        if constraint is None:
            if self._owes_an_answer(reply.state):
                scores[[i for i in reply.closers if i < scores.shape[0]]] = -torch.inf
            return
        allowed = torch.zeros(scores.shape[0], dtype=torch.bool)
        if self._leaving is None:
            self._allow_by_grammar(allowed, self._matcher(constraint))
        if self._may_leave(constraint):
            ways_out = self._ways_out(reply)
            allowed[[i for i in ways_out if i < scores.shape[0]]] = True
        scores.masked_fill_(~allowed.to(scores.device), -torch.inf)

    def _thinks(self, state: int) -> bool:
        return self._phases.states[state].phase is Phase.THINKING

    def _owes_an_answer(self, state: int) -> bool:
        """Whether a thought leads to something that must be said: then the turn can't end in the thought."""
        if not self._thinks(state):
            return False
        ahead = (self._constraint(trigger.to) for trigger in self._phases.states[state].triggers)
        return any(c is not None and (c not in self._begun or not self._matcher(c).is_accepting()) for c in ahead)

    def _constraint(self, state: int) -> Constraint | None:
        here = self._phases.states[state]
        if here.phase is Phase.THINKING:
            return None
        return here.constraint or (self._answer if here.phase is Phase.ANSWER else None)

    def _matcher(self, constraint: Constraint) -> Any:
        if constraint not in self._matchers:
            self._matchers[constraint] = self._grammars.matcher(constraint)
        return self._matchers[constraint]

    def _allow_by_grammar(self, allowed: Tensor, matcher: Any) -> None:
        bias = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        size = min(len(allowed), len(bias) - 1)  # the last one is the grammar's own end
        allowed[:size] = bias[:size] > 0
        allowed[[i for i in self._control if i < len(allowed)]] = False

    def _may_leave(self, constraint: Constraint) -> bool:
        """Instead of the answer the model may still think, or call; whatever was begun must be whole."""
        fresh = constraint is self._answer and constraint not in self._begun
        return self._leaving is not None or fresh or bool(self._matcher(constraint).is_accepting())

    def _ways_out(self, reply: Reply) -> set[int]:
        """Markers of the state that lead out of it; after one thought the answer is due, not another. The end of the
        turn only where something was said, and no marker must come first."""
        triggers = [t for t in self._phases.states[reply.state].triggers if self._leads_out(reply.state, t)]
        found = {t.marker for t in triggers if isinstance(t.marker, int)}
        constraint = self._constraint(reply.state)
        if constraint in self._begun and (constraint is self._answer or not triggers):
            found |= reply.closers
        elif constraint is self._answer and constraint not in self._begun:
            found |= self._blanks
        for marker in _texts(triggers):
            found |= self._continuing(marker)
        return found

    def _leads_out(self, state: int, trigger: Trigger) -> bool:
        if self._thinks(trigger.to):
            return not self._thought
        answers = Phase.ANSWER
        return self._phases.states[state].phase is not answers or self._phases.states[trigger.to].phase is not answers

    def _continuing(self, marker: bytes) -> set[int]:
        """Tokens that go on spelling this marker."""
        said = self._leaving or b""
        if not marker.startswith(said) or marker == said:
            return set()
        rest = marker[len(said) :]
        shorter = {i for size in range(1, len(rest)) for i in self._spelling.spelling_exactly(rest[:size])}
        return (shorter | set(self._spelling.beginning_with(rest))) - self._control

    def _follow(self, token_id: int, forced: bool) -> None:
        constraint = self._constraint(self._state)
        if constraint is None:
            return
        text = self._spelling.vocabulary[token_id] if token_id < len(self._spelling.vocabulary) else b""
        if self._leaving is not None:
            self._leaving += text
        elif self._matcher(constraint).try_consume_tokens([token_id]) == 1:
            self._begun.add(constraint)
        elif not forced and (constraint in self._begun or text.strip()):
            self._leaving = text
        else:
            self._blanks = frozenset()

    def _move(self, state: int, said: bytes) -> None:
        """A constraint of a state begins anew whenever the state is entered; that of the answer goes on."""
        self._leaving = None
        before, self._state = self._phases.states[self._state].constraint, state
        constraint = self._constraint(state)
        if constraint is None:
            return
        if constraint is not self._answer and constraint != before:
            self._matchers.pop(constraint, None)
            self._begun.discard(constraint)
        matcher = self._matcher(constraint)
        if said.strip() and matcher.try_consume_tokens(self._grammars.tokens(said)) > 0:
            self._begun.add(constraint)


def constraints_of(phases: Phases, sampling: Sampling) -> list[Constraint]:
    """All that may come to hold in a reply."""
    found = [sampling.constraint, *(state.constraint for state in phases.states)]
    return [constraint for constraint in found if constraint is not None]


def control_ids(phases: Phases) -> frozenset[int]:
    """Tokens that are no text."""
    markers = {t.marker for state in phases.states for t in state.triggers if isinstance(t.marker, int)}
    return phases.ends | phases.hidden | markers


def _blanks(phases: Phases, spelling: Spelling) -> frozenset[int]:
    closing = {token_id for state in phases.states for token_id in state.closing}
    return frozenset(i for i in closing if i < len(spelling.vocabulary) and not spelling.vocabulary[i].strip())


def _texts(triggers: Iterable[Trigger]) -> list[bytes]:
    return [trigger.marker for trigger in triggers if isinstance(trigger.marker, bytes)]
