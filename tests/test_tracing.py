"""Traces of turns: ids that every process knows, and spans under one root."""

from __future__ import annotations

import pytest

from palaver import tracing
from palaver.tracing import trace_ids, trace_span


def test_ids_depend_on_the_turn_alone() -> None:
    assert trace_ids("a") == trace_ids("a")
    assert trace_ids("a") != trace_ids("b")
    trace, span = trace_ids("a")
    assert 0 < trace < 2**128
    assert 0 < span < 2**64


def test_nothing_is_traced_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    tracing.default_tracer.cache_clear()
    with trace_span("engine", "turn") as attributes:
        attributes["tokens"] = 3
    assert tracing.default_tracer() is None


def test_spans_of_all_processes_are_under_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter",
        reason="SPANS ARE NOT SHOWN: no extra otel",
    )
    exporter = memory.InMemorySpanExporter()
    front, replica = tracing.Tracer(exporter), tracing.Tracer(exporter)
    monkeypatch.setattr(tracing, "default_tracer", lambda: replica)
    with pytest.raises(RuntimeError), trace_span("engine", "some turn", model="sprout"):
        raise RuntimeError
    with trace_span("engine", "some turn") as attributes:
        attributes["tokens"] = 7
    front.record("turn", "some turn", 1, {}, is_root=True)
    front.provider.force_flush()
    replica.provider.force_flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    trace, root = trace_ids("some turn")
    assert {span.context.trace_id for span in exporter.get_finished_spans()} == {trace}
    assert spans["turn"].context.span_id == root
    assert spans["turn"].parent is None
    assert spans["engine"].parent.span_id == root
    assert spans["engine"].attributes["tokens"] == 7
    assert {span.attributes.get("error") for span in exporter.get_finished_spans()} == {"RuntimeError", None}
    front.provider.shutdown()
    replica.provider.shutdown()
