"""Metrics and logs of a replica. Ray exports the metrics of all processes of a node at the node's metrics port."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ray import serve
from ray.util.metrics import Counter, Gauge, Histogram

from palaver.engines.host.frames import OutputFrame
from palaver.generation import Prefilled, Step
from palaver.tracing import trace_span

_log = logging.getLogger("palaver.replica")
_TAGS = ("model", "replica")
_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
FIGURES = {
    "running": "Sequences in the engine's running batch.",
    "waiting": "Requests in the engine's queue.",
    "limit_bytes": "Limit of the KV cache.",
    "used_bytes": "Used part of the KV cache.",
    "kept_bytes": "Part of the used KV cache that may be evicted.",
    "evictions": "Evictions from the prefix cache since the start.",
}
"""The engine's own figures that are exported, as gauges."""


@dataclass
class ObservedRequest:
    """What one request has got so far."""

    begun: float
    first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0

    def count(self, outputs: Sequence[OutputFrame]) -> None:
        for output in outputs:
            if isinstance(output, Step):
                self.tokens += 1
                if self.first_token is None:
                    self.first_token = time.perf_counter() - self.begun
            elif isinstance(output, Prefilled):
                self.prompt_tokens, self.cached_tokens = output.prompt_tokens, output.cached_tokens


class ReplicaTelemetry:
    def __init__(self, model: str) -> None:
        self._model = model
        self.replica = serve.get_replica_context().replica_id.unique_id
        tags = {"model": model, "replica": self.replica}

        def counter(name: str, help: str) -> Counter:
            return Counter(f"palaver_replica_{name}", help, _TAGS).set_default_tags(tags)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"palaver_replica_{name}", help, _TAGS).set_default_tags(tags)

        self._requests = counter("requests", "Requests, also those that came from another replica.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens from the prefix cache.")
        self._tokens = counter("reply_tokens", "Generated tokens.")
        self._first = Histogram("palaver_replica_first_token_seconds", "To the first token.", _SECONDS, _TAGS)
        self._first.set_default_tags(tags)
        self._open = gauge("open", "Requests that run or wait.")
        self._figures = {name: gauge(name, help) for name, help in FIGURES.items()}

    @contextmanager
    def request(self, turn: str) -> Iterator[ObservedRequest]:
        """Observes a request from its start to its end, however it ends."""
        observed = ObservedRequest(time.perf_counter())
        self._requests.inc()
        try:
            with trace_span("engine", turn, model=self._model, replica=self.replica) as attributes:
                try:
                    yield observed
                finally:
                    attributes |= {"tokens": observed.tokens, "cached_tokens": observed.cached_tokens}
        finally:
            for metric, value in (
                (self._prompt_tokens, observed.prompt_tokens),
                (self._cached_tokens, observed.cached_tokens),
                (self._tokens, observed.tokens),
            ):
                if value:
                    metric.inc(value)
            if observed.first_token is not None:
                self._first.observe(observed.first_token)
            _log.info(
                "request ended turn=%s model=%s replica=%s prompt_tokens=%d cached_tokens=%d tokens=%d seconds=%.3f",
                turn or "-",
                self._model,
                self.replica,
                observed.prompt_tokens,
                observed.cached_tokens,
                observed.tokens,
                time.perf_counter() - observed.begun,
            )

    def set_figures(self, figures: Mapping[str, float], open_requests: int) -> None:
        self._open.set(open_requests)
        for name, gauge in self._figures.items():
            if name in figures:
                gauge.set(figures[name])
