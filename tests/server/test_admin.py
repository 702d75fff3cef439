from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.client.discovery import sign_nonce
from palaver.engines.torch import TorchEngine
from palaver.server.settings import ServerSettings
from tests.server.chat_client import CHAT, SUM, chunks, complete, post
from tests.server.live_server import ADMIN, TOKEN, LiveServer


def test_health_says_which_model_is_ready(http: httpx.Client) -> None:
    answer = http.get("/health")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ready"
    assert answer.json()["model"] == "sprout"
    assert http.get("/ready").json() == {"ready": True}


def test_health_proves_that_it_is_of_the_data_folder(http: httpx.Client) -> None:
    answer = http.get("/health").json()
    assert "proof" not in answer
    proven = http.get("/health", params={"nonce": "random"}).json()
    assert proven == {**answer, "proof": sign_nonce(TOKEN, answer["instance"], "random")}
    proxied = http.get("/health", params={"nonce": "random"}, headers={"via": "1.1 proxy"}).json()
    assert proxied == {name: proven[name] for name in ("status", "instance", "proof")}
    assert http.get("/health", params={"nonce": "x" * 65}).status_code == 400


def ready(http: httpx.Client) -> tuple[int, str, float]:
    """The status of /health, what it says, and the metric."""
    answer = http.get("/health")
    metric = re.search(r"^palaver_model_ready (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert metric is not None
    return answer.status_code, answer.json()["status"], float(metric[1])


def test_health_is_of_the_engine(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        assert ready(http) == (200, "ready", 1)
        engine = live.service.models.engine()
        assert isinstance(engine, TorchEngine)
        engine._scheduler.step = fail  # type: ignore[method-assign]
        assert http.post(CHAT, json={"messages": SUM}).status_code == 503
        assert ready(http) == (503, "failed", 0)
        assert "the device is gone" in http.get("/health").json()["note"]


def test_health_is_of_the_database(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with LiveServer(folder) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        assert ready(http) == (200, "ready", 1)
        live.service.store.database.engine.dispose()
        folder.rename(tmp_path / "away")
        assert ready(http) == (503, "failed", 0)
        (tmp_path / "away").rename(folder)
        assert ready(http) == (200, "ready", 1)


def test_models_are_listed(http: httpx.Client) -> None:
    first = http.get("/v1/models").json()["data"][0]
    assert first["id"] == "sprout"
    assert first["context_length"] == 8192
    assert http.get("/v1/models/sprout").json() == first
    assert http.get("/v1/models/nope").status_code == 404


def test_metrics_count(http: httpx.Client) -> None:
    def value(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    before = value("palaver_reply_tokens_total"), value("palaver_first_token_seconds_count")
    used = complete(http)["usage"]["completion_tokens"]
    assert value("palaver_reply_tokens_total") == before[0] + used
    assert value("palaver_first_token_seconds_count") == before[1] + 1
    assert value("palaver_replies_running") == 0
    assert value("palaver_model_ready") == 1
    assert value('palaver_requests_total{status="200"}') > 0


def test_every_answer_has_the_id_of_its_request(http: httpx.Client) -> None:
    ids = {http.get("/v1/models").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert http.get("/nope", headers={"x-request-id": "my-own.1"}).headers["x-request-id"] == "my-own.1"
    assert http.get("/nope", headers={"x-request-id": "a b\tc"}).headers["x-request-id"].startswith("req_")


def test_embeddings_are_refused_clearly(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "x", "model": "sprout"})
    assert answer.status_code == 400
    assert "not supported" in answer.json()["error"]["message"]


def test_a_model_is_unloaded_and_loaded_with_progress(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        assert http.post("/v1/model/unload", headers=ADMIN).json()["status"] == "none"
        assert http.get("/health").status_code == 503
        without = http.post(CHAT, json={"messages": SUM})
        assert (without.status_code, without.json()["error"]["code"]) == (503, "no_model")
        events = http.post("/v1/model/load", json={"model": "sprout", "stream": True}, headers=ADMIN).text
        assert "event: progress" in events
        assert "event: ready" in events
        assert "42" in complete(http)["choices"][0]["message"]["content"]


def test_defaults_and_forced_values_of_the_operator(tmp_path: Path) -> None:
    settings = ServerSettings(
        defaults={"temperature": 0.0, "thinking": False}, forced={"max_tokens": 3}, aliases=("gpt-4o",)
    )
    with LiveServer(tmp_path, settings) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        answer = http.post(CHAT, json={"model": "gpt-4o", "messages": SUM, "max_tokens": 100}).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["message"]["content"].startswith("1")
        thinks = http.post(CHAT, json={"messages": SUM, "enable_thinking": True}).json()
        assert thinks["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_what_is_said_is_logged_only_when_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer(tmp_path, ServerSettings(debug=True), None) as live, caplog.at_level(logging.DEBUG):
        post(live.url + CHAT, json={"messages": [{"role": "user", "content": "Xylophone"}]})
        tool = {"type": "mcp", "server_label": "a", "server_url": "https://a.example/?hush", "headers": {"X": "hush"}}
        post(f"{live.url}/v1/responses", json={"input": "Trumpet", "tools": [{**tool, "authorization": "hush"}]})
        post(f"{live.url}/api/tools", json={"name": "", "url": "https://a.example", "headers": {"X": "hush"}})
    assert "Xylophone" in caplog.text
    assert "Trumpet" in caplog.text
    assert "hush" not in caplog.text


def test_the_server_ends_without_cutting_a_stream_short_of_words(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live:
        body = {"messages": SUM, "stream": True, "min_tokens": 4000}
        with httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "reasoning" in line)
            closing = asyncio.run_coroutine_threadsafe(live.server.close(0.0), live.loop)
            rest = "\n\n".join(lines)
        closing.result(30)
        assert [event["error"]["code"] for event in chunks(rest) if "error" in event] == ["shutting_down"]
        late = post(live.url + CHAT, json={"messages": SUM})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")


def test_a_reply_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live:
        body = {"messages": SUM, "stream": True, "temperature": 0, "max_tokens": 30}
        with httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            closing = asyncio.run_coroutine_threadsafe(live.server.close(60.0), live.loop)
            events = chunks("\n\n".join(lines))
        closing.result(30)
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_the_schema_names_every_route(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path in (CHAT, "/v1/completions", "/v1/models", "/v1/tokenize", "/v1/apply-template", "/health", "/metrics"):
        assert path in document["paths"]
    assert '"422"' not in json.dumps(document)


def say(http: httpx.Client, **parameters: object) -> tuple[str, str]:
    """A conversation and the turn that was begun in it."""
    conversation = http.post("/api/conversations", json={}).json()["id"]
    message = {"role": "user", "parts": [{"type": "text", "text": "What is 12 + 30?"}]}
    body = {"parent": None, "message": message, "parameters": parameters}
    said = http.post(f"/api/conversations/{conversation}/say", json=body).json()
    return conversation, said["reply"]["id"]


def entries(text: str) -> list[dict[str, Any]]:
    """The data of a turn's stream."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_a_turn_finishes_within_the_grace_and_nothing_new_is_begun(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        conversation, turn = say(http, temperature=0, max_tokens=30, min_tokens=30)
        closing = asyncio.run_coroutine_threadsafe(live.server.close(60.0), live.loop)
        late = http.post(f"/api/conversations/{conversation}/replies", json={"parent": turn})
        events = entries(http.get(f"/api/turns/{turn}/events").text)
        closing.result(60)
        assert late.status_code in (409, 503)  # still running, or over and the server ends
        assert (events[-1]["event"]["type"], events[-1]["event"]["finish"]) == ("finished", "length")
        assert http.get(f"/api/messages/{turn}").json()["reply"]["status"] == "length"
        refused = http.post(f"/api/turns/{turn}/continue")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        said = {"parent": None, "message": {"role": "user", "parts": [{"type": "text", "text": "Hi"}]}}
        refused = http.post(f"/api/conversations/{conversation}/say", json=said)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert len(http.get(f"/api/conversations/{conversation}/nodes").json()) == 2, "nothing half written"


def test_a_turn_that_takes_longer_than_the_grace_is_put_aside_and_its_readers_are_told(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        _, turn = say(http, min_tokens=4000)
        with http.stream("GET", f"/api/turns/{turn}/events") as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "thinking_delta" in line)
            closing = asyncio.run_coroutine_threadsafe(live.server.close(0.0), live.loop)
            events = entries("\n".join(lines))
        closing.result(60)
        assert events[-1]["event"]["type"] == "failed"
        assert "can be continued" in events[-1]["event"]["error"]
        assert http.get(f"/api/messages/{turn}").json()["reply"]["status"] == "interrupted"


def test_a_chat_in_a_conversation_is_told_that_the_server_ends(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live:
        body = {"messages": SUM, "stream": True, "min_tokens": 4000, "metadata": {"conversation": "new"}}
        with httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "reasoning" in line)
            closing = asyncio.run_coroutine_threadsafe(live.server.close(0.0), live.loop)
            rest = "\n\n".join(lines)
        closing.result(30)
        assert [event["error"]["code"] for event in chunks(rest) if "error" in event] == ["shutting_down"]


def test_metrics_count_turns_of_conversations_and_what_the_engine_says_of_itself(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        for _ in range(2):
            _, turn = say(http, temperature=0)
            usage = entries(http.get(f"/api/turns/{turn}/events").text)[-1]["event"]["usage"]
        text = http.get("/metrics").text
        found = re.findall(r"^(palaver_[a-z_]+) (\S+)$", text, re.MULTILINE)
        values = {name: float(value) for name, value in found}
        assert values["palaver_reply_tokens_total"] == 2 * usage["reply_tokens"]
        assert values["palaver_thinking_tokens_total"] == 2 * usage["thinking_tokens"] > 0
        assert values["palaver_cached_tokens_total"] == values["palaver_cache_hit_tokens_total"] > 0
        assert values["palaver_prompt_tokens_total"] == values["palaver_cache_prompt_tokens_total"]
        assert values["palaver_first_token_seconds_count"] == 2
        assert 'palaver_replies_total{finish="end"} 2.0' in text
        assert (values["palaver_replies_waiting"], values["palaver_turns_running"]) == (0, 0)
        assert values["palaver_cache_limit_bytes"] > values["palaver_cache_used_bytes"] > 0
