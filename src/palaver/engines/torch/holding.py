"""Holds a whole reply to what it must say beside its thoughts, such as a call that was asked for: markers and all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from palaver.constraints import Constraint, Marked
from palaver.engines.grammars import CompiledGrammar, check_matcher
from palaver.engines.reply import Reply
from palaver.engines.torch.banned import BannedText, Spelling
from palaver.engines.torch.guide import control_ids
from palaver.phases import Phase, Phases


class Holding:
    """Follows a reply token by token. Thoughts are free, but they lead to what must be said and nowhere else."""

    def __init__(self, phases: Phases, grammars: Mapping[Constraint, CompiledGrammar], spelling: Spelling) -> None:
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
        self._closing = cache(lambda marker: BannedText([marker.decode()], spelling, self._control))

    def take(self, token_id: int, reply: Reply, forced: bool) -> None:
        """The reply has taken this token; it is in its new state already."""
        thought, self._state = self._thinks(self._state), reply.state
        if self._thinks(reply.state):
            return
        if thought:
            self._begin(self._held.later)
            self._consume(self._grammars[self._constraint].tokenize(reply.said_since_entering))
        else:
            self._consume([token_id])

    def forbid(self, scores: Tensor, reply: Reply) -> None:
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

    def _astray(self, reply: Reply) -> set[int]:
        """What must not be said in a thought: the end of the turn, markers of calls, and whatever would leave the
        thought with something behind it that can't come there."""
        triggers = self._phases.states[reply.state].triggers
        markers = {trigger.marker for trigger in triggers if isinstance(trigger.marker, int)}
        found = (set(reply.closers) | set(self._held.later.ids)) - markers
        for trigger in triggers:
            if isinstance(trigger.marker, bytes) and not self._thinks(trigger.to):
                found |= self._crossing(trigger.marker, reply)
        return found

    def _crossing(self, marker: bytes, reply: Reply) -> set[int]:
        """Tokens that complete the marker and go on with text that does not fit."""
        closing: BannedText = self._closing(marker)
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
