"""The state of one reply: what was said so far and what follows from it.

All of it is a function of the prompt, the sampling and the tokens taken, so a reply that was stopped is restored by
taking its tokens again."""

from __future__ import annotations

from palaver.generation import Ended, Finish, Prompt
from palaver.phases import Entered, Happening, Phase, Phases, Said, Stopped, Tracker, Vocabulary
from palaver.sampling import Sampling


class ReplyState:
    """Takes the tokens of one reply and knows when it has ended and what it is forced to say next."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        vocabulary: Vocabulary,
        end_ids: frozenset[int] = frozenset(),
        context_length: int | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.ended: Ended | None = None
        self._phases = prompt.phases
        self._sampling = sampling
        self._limit = _limit(sampling, context_length, len(prompt.context_ids))
        self._ends = prompt.phases.ends | end_ids
        self._stop_ids = frozenset(sampling.stop_ids)
        self._tracked = bool(sampling.stop) or any(s.triggers or s.other is not None for s in prompt.phases.states)
        self._tracker = Tracker(prompt.phases, vocabulary, sampling.stop)
        self._closers: dict[int, frozenset[int]] = {}
        self._forced: tuple[int, ...] = ()
        self._answer_at = prompt.answer_at
        self._thoughts = 0
        self.said_since_entering = b""
        """What the last token said in the state that it led to."""
        self._check_limits()
        for token_id in prompt.reply_ids:
            self.take(token_id)

    @property
    def state(self) -> int:
        return self._tracker.state

    @property
    def phase(self) -> Phase:
        return self._tracker.phase

    @property
    def held(self) -> bytes:
        """The beginning of what may become a marker."""
        return self._tracker.held

    @property
    def forced(self) -> int | None:
        """The token that must come next, whatever the model would say."""
        return self._forced[0] if self._forced else None

    @property
    def closers(self) -> frozenset[int]:
        """Token ids that would end the reply if they came next."""
        state = self._tracker.state
        if state not in self._closers:
            self._closers[state] = self._stop_ids | _closing_ids(self._phases, state, self._ends)
        return self._closers[state]

    def answer_now(self, position: int | None = None) -> int:
        """Closes an open thought, from the next token on, or from `position` on. Gives the position that counts: the
        first that was asked for."""
        if self._answer_at is None:
            self._answer_at = len(self.ids) if position is None else position
        self._force()
        return self._answer_at

    def take(self, token_id: int) -> None:
        """The token was said. After the end nothing changes any more."""
        if self.ended is not None:
            return
        self.ids.append(token_id)
        ends = token_id in self.closers
        if self._tracked or ends:
            self._thoughts += self.phase is Phase.THINKING
            self._track(token_id, ends)
        elif self.phase is Phase.THINKING:
            self._thoughts += 1
        self._follow_forced(token_id)
        if self.ended is None:
            self._check_limits()

    def _track(self, token_id: int, ends: bool) -> None:
        happenings = self._tracker.feed(token_id)
        if ends:
            happenings += self._tracker.flush()
        self.said_since_entering = _said_last(happenings)
        stop = next((happening.stop for happening in happenings if isinstance(happening, Stopped)), None)
        if stop is not None:
            self.ended = Ended(Finish.STOP_STRING, stop)
        elif ends or self._tracker.ended:
            self.ended = Ended(Finish.END)

    def _follow_forced(self, token_id: int) -> None:
        if self._forced and self._forced[0] == token_id:
            self._forced = self._forced[1:]
        else:
            self._forced = ()
        if not self._forced:
            self._force()

    def _force(self) -> None:
        budget = self._sampling.thinking_budget
        asked = self._answer_at is not None and len(self.ids) >= self._answer_at
        spent = asked or (budget is not None and self._thoughts >= budget)
        if spent and not self._forced and self.phase is Phase.THINKING:
            closing = self._phases.states[self._tracker.state].closing
            self._forced = closing[self._begun(closing) if asked else 0 :]

    def _begun(self, closing: tuple[int, ...]) -> int:
        """How much of the closing the reply ends with already: it may have been stopped in the midst of one."""
        ends = (count for count in range(len(closing) - 1, 0, -1) if tuple(self.ids[-count:]) == closing[:count])
        return next(ends, 0)

    def _check_limits(self) -> None:
        if self._limit is not None and len(self.ids) >= self._limit:
            self.ended = Ended(Finish.LENGTH)
        elif not self.ids:
            self._force()


def _said_last(happenings: list[Happening]) -> bytes:
    said = b""
    for happening in happenings:
        match happening:
            case Entered():
                said = b""
            case Said(_, data):
                said += data
    return said


def _limit(sampling: Sampling, context_length: int | None, context: int) -> int | None:
    limits = [sampling.max_tokens, None if context_length is None else max(0, context_length - context)]
    return min((limit for limit in limits if limit is not None), default=None)


def _closing_ids(phases: Phases, state: int, ends: frozenset[int]) -> frozenset[int]:
    """What ends the turn in this state. A trigger of the state goes before the ends of the whole turn."""
    triggers = {t.marker: t for t in phases.states[state].triggers if isinstance(t.marker, int)}
    to_end = {marker for marker, t in triggers.items() if phases.states[t.to].phase is Phase.END}
    return frozenset(to_end | (ends - triggers.keys()))
