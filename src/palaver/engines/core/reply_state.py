"""The state of one reply: stop strings, limits, the thinking budget and forced tokens.

It is a function of prompt, sampling and tokens, so a stopped reply is restored by appending its tokens again."""

from __future__ import annotations

from palaver.generation import Ended, Finish, Prompt
from palaver.phases import Phase, Phases, StateEntered, StateText, StopMatched, Tracker, TrackerEvent, Vocabulary
from palaver.sampling import Sampling


class ReplyState:
    """Follows the tokens of one reply: stop conditions, limits, thinking budget and forced tokens."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        vocabulary: Vocabulary,
        end_ids: frozenset[int] = frozenset(),
        context_length: int | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.ended: Ended | None = None
        self._phases = prompt.phases
        self._sampling = sampling
        self._max_tokens = _max_tokens(sampling, context_length, len(prompt.context_ids))
        self._end_ids = prompt.phases.ends | end_ids
        self._stop_ids = frozenset(sampling.stop_ids)
        self._tracked = bool(sampling.stop) or any(s.triggers or s.other is not None for s in prompt.phases.states)
        self._tracker = Tracker(prompt.phases, vocabulary, sampling.stop)
        self._stop_ids_cache: dict[int, frozenset[int]] = {}
        self._forced_ids: tuple[int, ...] = ()
        self._answer_at = prompt.answer_at
        self._thinking_tokens = 0
        self.text_since_transition = b""
        """The text of the last token that belongs to the state it led to."""
        self._check_limits()
        for token_id in prompt.reply_ids:
            self.append_token(token_id)

    @property
    def state(self) -> int:
        return self._tracker.state

    @property
    def phase(self) -> Phase:
        return self._tracker.phase

    @property
    def buffered(self) -> bytes:
        """Text that is held back because it may become a marker."""
        return self._tracker.buffered

    @property
    def tokens_left(self) -> int | None:
        """How many more tokens the limits allow."""
        return None if self._max_tokens is None else self._max_tokens - len(self.token_ids)

    @property
    def at_limit(self) -> bool:
        """Whether the next token is the last one, whatever it is."""
        return self.tokens_left is not None and self.tokens_left <= 1

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, whatever the logits are; None if the model is free."""
        return self._forced_ids[0] if self._forced_ids else None

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """All tokens that must come next."""
        return self._forced_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Token ids that would end the reply now."""
        state = self._tracker.state
        if state not in self._stop_ids_cache:
            self._stop_ids_cache[state] = self._stop_ids | _ending_ids(self._phases, state, self._end_ids)
        return self._stop_ids_cache[state]

    @property
    def always_stop_ids(self) -> frozenset[int]:
        """Token ids that end the reply in every state."""
        markers = {trigger.marker for state in self._phases.states for trigger in state.triggers}
        return self._stop_ids | (self._end_ids - markers)

    def answer_now(self, position: int | None = None) -> int:
        """Closes an open thought from the next token on, or from `position` on. Returns the position that holds: the
        first one that was requested."""
        if self._answer_at is None:
            self._answer_at = len(self.token_ids) if position is None else position
        self._force_closing()
        return self._answer_at

    def append_token(self, token_id: int) -> None:
        """Appends a generated token. Does nothing after the reply has ended."""
        if self.ended is not None:
            return
        self.token_ids.append(token_id)
        self._thinking_tokens += self.phase is Phase.THINKING
        ends = token_id in self.stop_token_ids
        text = None if ends or not self._tracked else self._tracker.plain_text(token_id)
        if text is not None:
            self.text_since_transition = text
        elif self._tracked or ends:
            self._track(token_id, ends)
        if self._forced_ids or self._answer_at is not None or self._sampling.thinking_budget is not None:
            self._advance_forced(token_id)
        if self.ended is None:
            self._check_limits()

    def _track(self, token_id: int, ends: bool) -> None:
        events = self._tracker.feed(token_id)
        if ends:
            events += self._tracker.flush()
        self.text_since_transition = _text_since_transition(events)
        stop = next((event.stop for event in events if isinstance(event, StopMatched)), None)
        if stop is not None:
            self.ended = Ended(Finish.STOP_STRING, stop)
        elif ends or self._tracker.ended:
            self.ended = Ended(Finish.END)

    def _advance_forced(self, token_id: int) -> None:
        if self._forced_ids and self._forced_ids[0] == token_id:
            self._forced_ids = self._forced_ids[1:]
        else:
            self._forced_ids = ()
        if not self._forced_ids:
            self._force_closing()

    def _force_closing(self) -> None:
        """Forces the closing of a thought whose budget is spent, or whose answer was requested."""
        budget = self._sampling.thinking_budget
        requested = self._answer_at is not None and len(self.token_ids) >= self._answer_at
        spent = requested or (budget is not None and self._thinking_tokens >= budget)
        if spent and not self._forced_ids and self.phase is Phase.THINKING:
            closing = self._phases.states[self._tracker.state].closing
            self._forced_ids = closing[self._closing_tokens_written(closing) if requested else 0 :]

    def _closing_tokens_written(self, closing: tuple[int, ...]) -> int:
        """How many tokens of the closing the reply ends with: it may have been stopped inside of one."""
        sizes = range(len(closing) - 1, 0, -1)
        return next((size for size in sizes if tuple(self.token_ids[-size:]) == closing[:size]), 0)

    def _check_limits(self) -> None:
        if self._max_tokens is not None and len(self.token_ids) >= self._max_tokens:
            self.ended = Ended(Finish.LENGTH)
        elif not self.token_ids:
            self._force_closing()


def _text_since_transition(events: list[TrackerEvent]) -> bytes:
    text = b""
    for event in events:
        match event:
            case StateEntered():
                text = b""
            case StateText(_, data):
                text += data
    return text


def _max_tokens(sampling: Sampling, context_length: int | None, context: int) -> int | None:
    limits = [sampling.max_tokens, None if context_length is None else max(0, context_length - context)]
    return min((limit for limit in limits if limit is not None), default=None)


def _ending_ids(phases: Phases, state: int, ends: frozenset[int]) -> frozenset[int]:
    """Token ids that end the turn in this state. A trigger of the state takes precedence over the turn's end ids."""
    triggers = {t.marker: t for t in phases.states[state].triggers if isinstance(t.marker, int)}
    to_end = {marker for marker, t in triggers.items() if phases.states[t.to].phase is Phase.END}
    return frozenset(to_end | (ends - triggers.keys()))
