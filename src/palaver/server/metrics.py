"""The metrics of the server, in the text format of Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from palaver.chat.turns import Turn
from palaver.events import Event, Failed, Finished, Started, Usage, Waiting

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    def __init__(self, name: str, meaning: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self._name} {self._meaning}"
        yield f"# TYPE {self._name} histogram"
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum:.6f}"
        yield f"{self._name}_count {total}"


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The gauges at the time of a scrape."""

    replies: int
    turns: int
    ready: bool
    engine: Mapping[str, float]
    """The engine's statistics; empty if it does not answer."""


class Metrics:
    """Counters of one server since its start."""

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}
        """By status."""
        self.finishes: dict[str, int] = {}
        """Replies by how they ended."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.reply_tokens = 0
        self.thinking_tokens = 0
        self.waiting = 0
        self.first_token = Histogram("palaver_first_token_seconds", "From the request to its first token.")
        self.between_tokens = Histogram("palaver_inter_token_seconds", "From one token to the next.")

    def count_request(self, status: int) -> None:
        self.requests[status] = self.requests.get(status, 0) + 1

    def count_finish(self, reason: str) -> None:
        self.finishes[reason] = self.finishes.get(reason, 0) + 1

    def count_reply(self, usage: Usage, reason: str) -> None:
        """Counts a reply that has ended, complete or not."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.reply_tokens += usage.reply_tokens
        self.thinking_tokens += usage.thinking_tokens
        self.count_finish(reason)

    def text(self, status: ServerStatus) -> str:
        histograms = (*self.first_token.lines(), *self.between_tokens.lines())
        return "\n".join([*self._lines(status), *_engine_lines(status.engine), *histograms]) + "\n"

    def _lines(self, status: ServerStatus) -> Iterator[str]:
        yield from _family("palaver_requests_total", "counter", "Requests by status.", "status", self.requests)
        yield from _family("palaver_replies_total", "counter", "Replies by how they ended.", "finish", self.finishes)
        waiting = int(status.engine.get("waiting", self.waiting))
        for name, kind, meaning, value in (
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("cached_tokens_total", "counter", "Tokens of prompts that had been computed before.", self.cached_tokens),
            ("reply_tokens_total", "counter", "Tokens of replies.", self.reply_tokens),
            ("thinking_tokens_total", "counter", "Those of them that were thought.", self.thinking_tokens),
            ("replies_running", "gauge", "Replies of requests in the making or waiting.", status.replies),
            ("turns_running", "gauge", "Turns of conversations in the making or waiting.", status.turns),
            ("replies_waiting", "gauge", "All that wait in the queue.", waiting),
            ("model_ready", "gauge", "Whether a reply can be made now.", int(status.ready)),
        ):
            yield from _single(name, kind, meaning, value)


_ENGINE_METRICS = {
    "running": ("engine_running", "gauge", "Sequences that the engine computes just now."),
    "limit_bytes": ("cache_limit_bytes", "gauge", "What the cache may hold."),
    "used_bytes": ("cache_used_bytes", "gauge", "What it holds."),
    "kept_bytes": ("cache_kept_bytes", "gauge", "What of it is kept for later and may be evicted."),
    "prompt_tokens": ("cache_prompt_tokens_total", "counter", "Tokens of prompts since the model was loaded."),
    "hit_tokens": ("cache_hit_tokens_total", "counter", "Those of them that were not computed again."),
    "evictions": ("cache_evictions_total", "counter", "Pieces that had to go."),
}
"""The metrics of the engine, by their names in its statistics."""


def _engine_lines(statistics: Mapping[str, float]) -> Iterator[str]:
    for name, (shown, kind, meaning) in _ENGINE_METRICS.items():
        if name in statistics:
            yield from _single(shown, kind, meaning, int(statistics[name]))


def _single(name: str, kind: str, meaning: str, value: int) -> Iterator[str]:
    yield f"# HELP palaver_{name} {meaning}"
    yield f"# TYPE palaver_{name} {kind}"
    yield f"palaver_{name} {value}"


class TokenPace:
    """Observes the time to the first token of one reply, and the time between its tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last = time.perf_counter()
        self._has_first = False
        self._waiting = False

    def start_waiting(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._metrics.waiting += 1

    def stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._metrics.waiting -= 1

    def observe(self, count: int) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._has_first:
            self._metrics.between_tokens.observe(seconds / count)
        else:
            self._has_first = True
            self._metrics.first_token.observe(seconds)


def _family(name: str, kind: str, meaning: str, label: str, values: dict[int, int] | dict[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for value, count in sorted(values.items()):
        yield f'{name}{{{label}="{value}"}} {count}'


class TurnMetrics:
    """Counts the turns of conversations from their events."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._running: dict[str, _TurnRun] = {}

    def on_event(self, turn: Turn, event: Event) -> None:
        run = self._running.get(turn.id)
        if run is None:
            run = self._running[turn.id] = _TurnRun(turn, self._metrics)
        run.on_event(event)
        if isinstance(event, Finished | Failed):
            del self._running[turn.id]


class _TurnRun:
    """One run of a turn: tokens of earlier runs are not counted again."""

    def __init__(self, turn: Turn, metrics: Metrics) -> None:
        self._turn = turn
        self._metrics = metrics
        self._pace = TokenPace(metrics)
        self._tokens = 0
        self._earlier_thinking = 0
        self._started = Started(0, 0)

    def on_event(self, event: Event) -> None:
        match event:
            case Waiting():
                self._pace.start_waiting()
            case Started():
                self._pace.stop_waiting()
                self._started = event
                self._earlier_thinking = self._turn.reply_stream.usage.thinking_tokens
            case Finished(finish):
                self._end(finish.value)
            case Failed():
                self._end("parked" if self._turn.parked else "failed")
            case _:
                self._observe_tokens()

    def _observe_tokens(self) -> None:
        new = len(self._turn.reply_stream.steps) - self._tokens
        if new:
            self._tokens += new
            self._pace.observe(new)

    def _end(self, reason: str) -> None:
        self._pace.stop_waiting()
        self._observe_tokens()
        thinking = self._turn.reply_stream.usage.thinking_tokens - self._earlier_thinking
        usage = Usage(self._started.prompt_tokens, self._started.cached_tokens, self._tokens, thinking)
        self._metrics.count_reply(usage, reason)
