"""The names, labels and buckets of the metrics: dashboards and alerts of operators depend on them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from palaver.events import Usage
from palaver.server.metrics import Metrics, ServerStatus

BUCKETS = "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0 30.0 60.0 +Inf".split()
ENGINE = {
    "waiting": 2.0,
    "running": 1.0,
    "limit_bytes": 1e12,
    "used_bytes": 7.0,
    "kept_bytes": 3.0,
    "prompt_tokens": 5.0,
    "hit_tokens": 2.0,
    "evictions": 1.0,
    "draft_tokens": 30.0,
    "accepted_tokens": 20.0,
}
FAMILIES = {
    "palaver_requests": "counter",
    "palaver_replies": "counter",
    "palaver_prompt_tokens": "counter",
    "palaver_cached_tokens": "counter",
    "palaver_reply_tokens": "counter",
    "palaver_thinking_tokens": "counter",
    "palaver_replies_running": "gauge",
    "palaver_turns_running": "gauge",
    "palaver_replies_waiting": "gauge",
    "palaver_model_ready": "gauge",
    "palaver_engine_running": "gauge",
    "palaver_cache_limit_bytes": "gauge",
    "palaver_cache_used_bytes": "gauge",
    "palaver_cache_kept_bytes": "gauge",
    "palaver_cache_prompt_tokens": "counter",
    "palaver_cache_hit_tokens": "counter",
    "palaver_cache_evictions": "counter",
    "palaver_draft_tokens": "counter",
    "palaver_accepted_draft_tokens": "counter",
    "palaver_first_token_seconds": "histogram",
    "palaver_inter_token_seconds": "histogram",
}


def filled() -> Metrics:
    metrics = Metrics()
    metrics.count_request(200)
    metrics.count_request(404)
    metrics.count_reply(Usage(10, 4, 6, 1), "end")
    for seconds in (0.001, 0.002, 61.0):
        metrics.first_token.observe(seconds)
    return metrics


def samples(metrics: Metrics, engine: dict[str, float]) -> dict[tuple[str, str], float]:
    """The value of each sample, by its name and the value of its only label."""
    families = text_string_to_metric_families(metrics.text(ServerStatus(1, 2, True, engine)))
    return {
        (sample.name, "".join(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def test_families_keep_their_names_and_types() -> None:
    text = filled().text(ServerStatus(1, 2, True, ENGINE))
    assert {family.name: family.type for family in text_string_to_metric_families(text)} == FAMILIES
    assert "# TYPE palaver_requests_total counter" in text
    assert 'palaver_requests_total{status="404"} 1.0' in text
    assert 'palaver_replies_total{finish="end"} 1.0' in text


def test_buckets_are_cumulative() -> None:
    found = samples(filled(), {})
    counts = [found["palaver_first_token_seconds_bucket", bound] for bound in BUCKETS]
    assert counts == [1, *[2] * (len(BUCKETS) - 2), 3]
    assert found["palaver_first_token_seconds_count", ""] == 3
    assert found["palaver_first_token_seconds_sum", ""] == 61.003


def test_without_an_engine_its_metrics_are_left_out() -> None:
    metrics = filled()
    metrics.waiting = 4
    assert samples(metrics, {})["palaver_replies_waiting", ""] == 4
    assert samples(metrics, ENGINE)["palaver_replies_waiting", ""] == 2
    assert ("palaver_cache_limit_bytes", "") not in samples(metrics, {})
    assert samples(metrics, ENGINE)["palaver_cache_limit_bytes", ""] == 1e12


def test_each_app_has_its_own_metrics() -> None:
    filled()
    assert samples(Metrics(), {})["palaver_reply_tokens_total", ""] == 0
