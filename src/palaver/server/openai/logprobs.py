"""Log-probabilities of the answer's tokens, as OpenAI's clients read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from palaver.chat.reply_stream import ReplyStream
from palaver.generation import Step
from palaver.phases import Entered, Happening, Phase, Said, Stopped, Tracker, Vocabulary


class AnswerLogprobs:
    """Follows a reply beside its reader: only tokens whose text is answer count, no thought and no marker."""

    def __init__(self, utterance: ReplyStream, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._states = utterance.prompt.phases.states
        self._tracker = Tracker(utterance.prompt.phases, vocabulary, utterance.request.sampling.stop)
        self._count = utterance.request.sampling.logprobs
        self._pending: deque[tuple[Step | None, int]] = deque()
        """Tokens whose bytes are not all accounted for, and how many are left of each."""
        self._answers = False
        for token_id in utterance.prompt.reply_ids:
            self._feed(None, token_id)

    def take(self, steps: Sequence[Step], is_last: bool) -> tuple[dict[str, Any], ...]:
        found = [step for one in steps for step in self._feed(one, one.token_id)]
        if is_last:
            found += self._account(self._tracker.flush())
        return tuple(self._entry(step) for step in found)

    def _feed(self, step: Step | None, token_id: int) -> list[Step]:
        self._pending.append((step, len(self._bytes(token_id))))
        found = self._account(self._tracker.feed(token_id))
        while self._pending and self._pending[0][1] == 0:  # a token of no text
            self._pending.popleft()
        return found

    def _account(self, happenings: Sequence[Happening]) -> list[Step]:
        found: list[Step] = []
        for happening in happenings:
            match happening:
                case Said(state, data):
                    answer = self._states[state].phase is Phase.ANSWER
                    counts = answer and (self._answers or bool(data.strip()))
                    self._answers = self._answers or counts
                    found += self._spend(len(data), counts)
                case Entered(_, marker):
                    self._spend(len(marker), False)
                case Stopped():
                    self._pending.clear()
        return found

    def _spend(self, size: int, counts: bool) -> list[Step]:
        """The tokens that these bytes are of; one that gave some to the answer counts once."""
        found: list[Step] = []
        while size > 0 and self._pending:
            step, left = self._pending.popleft()
            if counts and step is not None:
                found.append(step)
                step = None
            if left > size:
                self._pending.appendleft((step, left - size))
            size -= left
        return found

    def _bytes(self, token_id: int) -> bytes:
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""

    def _entry(self, step: Step) -> dict[str, Any]:
        likeliest = [self._one(one.token_id, one.logprob) for one in step.alternatives[: self._count]]
        return {**self._one(step.token_id, step.logprob), "top_logprobs": likeliest}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        shown = max(logprob, -9999.0)
        return {"token": data.decode("utf-8", "replace"), "logprob": shown, "bytes": list(data)}
