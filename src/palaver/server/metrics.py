"""The metrics of the server, in the text format of Prometheus.

Counts are plain numbers that a collector reads at a scrape. There is an observation for every token, and the histograms
of prometheus_client take a lock for each. Every app has its own metrics: nothing uses the global registry."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from palaver.chat.turns import Turn
from palaver.events import Event, Failed, Finished, Started, Usage, Waiting
from palaver.tracing import default_tracer

_log = logging.getLogger(__name__)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    def __init__(self, name: str, help: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        bounds = (*map(str, self._bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._help, buckets, self._sum)


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
        """The metrics in Prometheus's text format 0.0.4."""
        registry = CollectorRegistry()
        registry.register(_Scrape(self, status))
        return generate_latest(registry).decode()

    def families(self, status: ServerStatus) -> Iterator[Metric]:
        yield _labelled("palaver_requests", "Requests by HTTP status.", "status", self.requests)
        yield _labelled("palaver_replies", "Replies by finish reason.", "finish", self.finishes)
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        waiting = status.engine.get("waiting", self.waiting)
        yield counter("palaver_prompt_tokens", "Prompt tokens.", self.prompt_tokens)
        yield counter("palaver_cached_tokens", "Prompt tokens from the prefix cache.", self.cached_tokens)
        yield counter("palaver_reply_tokens", "Generated tokens, thinking included.", self.reply_tokens)
        yield counter("palaver_thinking_tokens", "Generated thinking tokens.", self.thinking_tokens)
        yield gauge("palaver_replies_running", "Stateless replies that run or wait.", status.replies)
        yield gauge("palaver_turns_running", "Turns of conversations that run or wait.", status.turns)
        yield gauge("palaver_replies_waiting", "Requests in the engine's queue.", waiting)
        yield gauge("palaver_model_ready", "Whether the server can generate replies now.", status.ready)
        for name, (family, metric, help) in _ENGINE_METRICS.items():
            if name in status.engine:
                yield family(f"palaver_{metric}", help, status.engine[name])
        yield self.first_token.family()
        yield self.between_tokens.family()


_ENGINE_METRICS: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str]] = {
    "running": (GaugeMetricFamily, "engine_running", "Sequences in the engine's running batch."),
    "limit_bytes": (GaugeMetricFamily, "cache_limit_bytes", "Limit of the KV cache."),
    "used_bytes": (GaugeMetricFamily, "cache_used_bytes", "Used part of the KV cache."),
    "kept_bytes": (GaugeMetricFamily, "cache_kept_bytes", "Part of the used KV cache that may be evicted."),
    "prompt_tokens": (CounterMetricFamily, "cache_prompt_tokens", "Prompt tokens since the model was loaded."),
    "hit_tokens": (CounterMetricFamily, "cache_hit_tokens", "Prompt tokens found in the prefix cache."),
    "evictions": (CounterMetricFamily, "cache_evictions", "Evictions from the prefix cache."),
    "draft_tokens": (CounterMetricFamily, "draft_tokens", "Tokens drafted from the text so far."),
    "accepted_tokens": (CounterMetricFamily, "accepted_draft_tokens", "Drafted tokens that were accepted."),
}
"""The metrics of the engine, by their names in its statistics. Counters are shown with `_total`."""


class _Scrape(Collector):
    def __init__(self, metrics: Metrics, status: ServerStatus) -> None:
        self._metrics = metrics
        self._status = status

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families(self._status)


def _labelled(name: str, help: str, label: str, values: Mapping[int, int] | Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, help, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([str(value)], count)
    return family


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
        self._begun = time.time_ns()

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
        self._report(usage, reason)

    def _report(self, usage: Usage, reason: str) -> None:
        """The turn's id is in the logs and traces of replicas, too."""
        prompt, cached, tokens = usage.prompt_tokens, usage.cached_tokens, usage.reply_tokens
        _log.info(
            "turn ended turn=%s finish=%s prompt_tokens=%d cached_tokens=%d tokens=%d seconds=%.3f",
            self._turn.id, reason, prompt, cached, tokens, (time.time_ns() - self._begun) / 1e9,
        )  # fmt: skip
        if (tracer := default_tracer()) is not None:
            figures = {"finish": reason, "prompt_tokens": prompt, "cached_tokens": cached, "tokens": tokens}
            tracer.record("turn", self._turn.id, self._begun, figures, is_root=True)
