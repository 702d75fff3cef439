"""Turns of conversations in the figures of the server, whichever door they came through."""

from __future__ import annotations

from palaver.chat.turns import Turn
from palaver.events import Event, Failed, Finished, Started, Usage, Waiting
from palaver.server.metrics import Metrics, Pace


class TurnCounts:
    """Hears of every event of every turn."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._running: dict[str, _Counted] = {}

    def hear(self, turn: Turn, event: Event) -> None:
        counted = self._running.get(turn.id)
        if counted is None:
            counted = self._running[turn.id] = _Counted(turn, self._metrics)
        counted.hear(event)
        if isinstance(event, Finished | Failed):
            del self._running[turn.id]


class _Counted:
    """One run of a turn: what it had said before is not counted again."""

    def __init__(self, turn: Turn, metrics: Metrics) -> None:
        self._turn = turn
        self._metrics = metrics
        self._pace = Pace(metrics)
        self._tokens = 0
        self._thought = 0
        self._started = Started(0, 0)

    def hear(self, event: Event) -> None:
        match event:
            case Waiting():
                self._pace.waits()
            case Started():
                self._pace.no_longer_waits()
                self._started = event
                self._thought = self._turn.utterance.usage.thinking_tokens
            case Finished(finish):
                self._end(finish.value)
            case Failed():
                self._end("parked" if self._turn.parked else "failed")
            case _:
                self._take_tokens()

    def _take_tokens(self) -> None:
        fresh = len(self._turn.utterance.steps) - self._tokens
        if fresh:
            self._tokens += fresh
            self._pace.tokens(fresh)

    def _end(self, reason: str) -> None:
        self._pace.no_longer_waits()
        self._take_tokens()
        thought = self._turn.utterance.usage.thinking_tokens - self._thought
        usage = Usage(self._started.prompt_tokens, self._started.cached_tokens, self._tokens, thought)
        self._metrics.replied(usage, reason)
