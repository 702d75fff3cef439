"""OpenTelemetry traces (the extra `otel`): one trace for each turn, with spans of the front, of the submissions to
replicas and of the replicas.

The ids of a trace come from the id of its turn, so that every process knows them: nothing is passed along. Nothing is
traced unless $OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) names a collector."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from typing import Any

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE = "palaver"


class Tracer:
    """Writes spans to an exporter of OpenTelemetry."""

    def __init__(self, exporter: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": SERVICE, "process.pid": os.getpid()})
        self._ids = _TurnIds()
        self.provider = TracerProvider(resource=resource, id_generator=self._ids)
        self.provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1_000))
        self._tracer = self.provider.get_tracer(SERVICE)

    def record(self, name: str, turn: str, begun_ns: int, attributes: dict[str, Any], is_root: bool) -> None:
        """A span from `begun_ns` to now. The root of the trace is the turn itself."""
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        trace_id, span_id = trace_ids(turn)
        context = None
        if is_root:
            self._ids.next = (trace_id, span_id)
        else:
            parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(parent))
        span = self._tracer.start_span(name, context, start_time=begun_ns, attributes={**attributes, "turn": turn})
        span.end()


class _TurnIds:
    """An id generator whose next ids can be set. Spans are recorded in one thread."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        self._random = RandomIdGenerator()
        self.next: tuple[int, int] | None = None

    def generate_span_id(self) -> int:
        found, self.next = self.next, None
        return self._random.generate_span_id() if found is None else found[1]

    def generate_trace_id(self) -> int:
        return self._random.generate_trace_id() if self.next is None else self.next[0]

    def is_trace_id_random(self) -> bool:
        return False


def trace_ids(turn: str) -> tuple[int, int]:
    """The ids of a turn's trace and of its root."""
    digest = blake2b(turn.encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")


@cache
def default_tracer() -> Tracer | None:
    """None if no collector is named. Raises ImportError if one is and the extra is missing."""
    if not any(os.environ.get(name) for name in VARIABLES):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracer(OTLPSpanExporter())


@contextmanager
def trace_span(name: str, turn: str, *, is_root: bool = False, **attributes: Any) -> Iterator[dict[str, Any]]:
    """A span of a turn around a block, which may add attributes. Does nothing without a turn or a collector."""
    tracer = default_tracer() if turn else None
    begun, found = time.time_ns(), dict(attributes)
    try:
        yield found
    except BaseException as error:
        found["error"] = type(error).__name__
        raise
    finally:
        if tracer is not None:
            tracer.record(name, turn, begun, found, is_root)
