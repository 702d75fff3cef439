"""What the server counts, in the text form that Prometheus reads."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    def __init__(self, name: str, meaning: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def note(self, value: float) -> None:
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


class Metrics:
    """Counts of one server since its start."""

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

    def request(self, status: int) -> None:
        self.requests[status] = self.requests.get(status, 0) + 1

    def finished(self, reason: str) -> None:
        self.finishes[reason] = self.finishes.get(reason, 0) + 1

    def text(self, running: int, turns: int, ready: bool) -> str:
        return (
            "\n".join([*self._lines(running, turns, ready), *self.first_token.lines(), *self.between_tokens.lines()])
            + "\n"
        )

    def _lines(self, running: int, turns: int, ready: bool) -> Iterator[str]:
        yield from _family("palaver_requests_total", "counter", "Requests by status.", "status", self.requests)
        yield from _family("palaver_replies_total", "counter", "Replies by how they ended.", "finish", self.finishes)
        for name, kind, meaning, value in (
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("cached_tokens_total", "counter", "Tokens of prompts that had been computed before.", self.cached_tokens),
            ("reply_tokens_total", "counter", "Tokens of replies.", self.reply_tokens),
            ("thinking_tokens_total", "counter", "Those of them that were thought.", self.thinking_tokens),
            ("replies_running", "gauge", "Replies in the making or waiting.", running),
            ("replies_waiting", "gauge", "Those of them that wait in the queue.", self.waiting),
            ("turns_running", "gauge", "Turns of conversations that run.", turns),
            ("model_ready", "gauge", "Whether a model can be talked to.", int(ready)),
        ):
            yield f"# HELP palaver_{name} {meaning}"
            yield f"# TYPE palaver_{name} {kind}"
            yield f"palaver_{name} {value}"


class Pace:
    """The time of one reply's tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last = time.perf_counter()
        self._begun = False
        self._waits = False

    def waits(self) -> None:
        if not self._waits:
            self._waits = True
            self._metrics.waiting += 1

    def no_longer_waits(self) -> None:
        if self._waits:
            self._waits = False
            self._metrics.waiting -= 1

    def tokens(self, count: int) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._begun:
            self._metrics.between_tokens.note(seconds / count)
        else:
            self._begun = True
            self._metrics.first_token.note(seconds)


def _family(name: str, kind: str, meaning: str, label: str, values: dict[int, int] | dict[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for value, count in sorted(values.items()):
        yield f'{name}{{{label}="{value}"}} {count}'
