"""Hostile and invalid requests to the conversations API: always a 4xx, never a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.messages import user
from palaver.store import Conversation, StoredMessage
from tests.chat.scripted_service import Stage, open_stage, read_entries
from tests.client.live import served

HUGE = 2**63
IDS = ["x", "%2e%2e", "%00", "%ff", "a%2fb", "é", "' OR 1=1 --", "x" * 5000, "%F0%9F%91%8B", "\u202e"]


class HostileFixture:
    stage: Stage
    http: httpx.AsyncClient
    talk: Conversation
    message: StoredMessage
    turn: StoredMessage


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[HostileFixture]:
    async with (
        open_stage(tmp_path) as stage,
        served(stage.service) as url,
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
    ):
        it = HostileFixture()
        it.stage, it.http, it.talk = stage, http, await stage.chat.create_conversation()
        sent = await stage.chat.send_message(it.talk.id, None, user("Wave!"))
        it.message, it.turn = sent.message, sent.reply
        await read_entries(stage.chat, sent.reply.id)
        yield it
        assert (await http.get(f"/api/conversations/{it.talk.id}/nodes")).status_code == 200


def assert_refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, f"{answer.request.method} {answer.request.url}: {answer.text[:300]}"
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]


async def test_ids_that_are_none(target: HostileFixture) -> None:
    for id in IDS:
        for path in (
            f"/api/conversations/{id}",
            f"/api/conversations/{id}/nodes",
            f"/api/conversations/{id}/export",
            f"/api/conversations/{id}/cursor?client=x",
            f"/api/messages/{id}",
            f"/api/messages/{id}/path",
            f"/api/turns/{id}/events",
            f"/api/turns/{id}/tokens",
            f"/api/blobs/{id}",
        ):
            assert_refused(await target.http.get(path))
        for path in ("stop", "continue", "answer-now"):
            assert_refused(await target.http.post(f"/api/turns/{id}/{path}"))


QUERIES = [
    "conversations?limit=0",
    "conversations?limit=-1",
    f"conversations?limit={HUGE}",
    "conversations?limit=NaN",
    "conversations?before=%00",
    "conversations?deleted=maybe",
    "search",
    "search?query=x&limit=100000",
    "model/ready?wait=nan",
    "model/ready?wait=inf",
    "model/ready?wait=-1",
    "model/ready?wait=1e400",
    "events?changes=perhaps",
    "events?turns=a:b",
    f"events?turns=a:{HUGE}",
]


async def test_queries_out_of_bounds(target: HostileFixture) -> None:
    for query in QUERIES:
        assert_refused(await target.http.get(f"/api/{query}"))


SEARCHES = ['"', '"""', "*", "a AND", "NEAR(", "\x00", "' --", "(", ":", "-", "é" * 2000, "😀"]


async def test_searches_that_are_no_words(target: HostileFixture) -> None:
    for query in SEARCHES:
        answer = await target.http.get("/api/search", params={"query": query})
        assert answer.status_code in (200, 400), answer.text


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": HUGE},
    {"max_tokens": -1},
    {"max_tokens": HUGE},
    {"top_k": 1.5},
    {"seed": HUGE},
    {"seed": -1},
    {"seed": True},
    {"stop": ["x"] * 10_000},
    {"banned_strings": ["x"] * 10_000},
    {"stop": "x" * 10 + "\x00", "n": 2},
    {"choice": "x"},
    {"choice": HUGE},
    {"choice": -1},
    {"tools": "x"},
    {"tools": 3},
    {"logit_bias": 3},
    {"tools": [1]},
    {"tools": [{"name": "x", "parameters": "y"}]},
    {"thinking": "x"},
    {"effort": 3},
    {"budget": "x"},
    {"budget": -5},
    {"variables": []},
    {"variables": {"no_such": 1}},
    {"variables": {"enable_thinking": "x"}},
    {"calls": "x"},
    {"response_prefix": 3},
    {"json_answer": "x"},
    {"healing": "x"},
    {"must_call": 3},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"1": "x"}},
    {"logit_bias": {str(place): 1 for place in range(5000)}},
    {"logit_bias": [[HUGE, 1]]},
    {"banned_ids": [HUGE]},
    {"banned_ids": [-1]},
    {"stop_ids": [True]},
    {"constraint": {"grammar": "no", "text": ""}},
    {"constraint": 3},
    {"overflow": "x"},
    {"unsplit": True},
    {"now": "2020"},
]


async def test_parameters_out_of_bounds(target: HostileFixture) -> None:
    message = {"role": "user", "parts": [{"type": "text", "text": "Wave!"}]}
    path = f"/api/conversations/{target.talk.id}"
    for parameters in PARAMETERS:
        body = {"parent": None, "message": message, "parameters": parameters}
        assert_refused(await target.http.post(f"{path}/say", json=body))
    assert len(await target.stage.chat.nodes(target.talk.id)) == 2


BODIES: list[tuple[str, Any]] = [
    ("turns/{turn}/fork", {"tokens": -1}),
    ("turns/{turn}/fork", {"tokens": HUGE}),
    ("turns/{turn}/fork", {"tokens": True}),
    ("turns/{turn}/fork", {"tokens": 1, "instead": -1}),
    ("turns/{turn}/fork", {"tokens": 1, "instead": 10**6}),
    ("turns/{message}/fork", {"tokens": 1}),
    ("turns/{message}/continue", None),
    ("turns/{turn}/continue", None),
    ("conversations", {"tags": ["x" * 500]}),
    ("conversations", {"tags": [""]}),
    ("conversations", {"tags": ["a\nb"]}),
    ("conversations", {"key": "x" * 500}),
    ("conversations", {"parameters": {"x": 1}}),
    ("conversations/{talk}/cursor/undo", {"client": ""}),
    ("conversations/{talk}/cursor/undo", {"client": "x" * 500}),
    ("conversations/{talk}/messages", {"parent": "x", "message": {"role": "user", "parts": []}}),
    ("messages/{message}/edit", {"parts": []}),
    ("events", {"turns": [{"turn": "x", "after": -1}]}),
    ("events", {"turns": [{"turn": "x"}] * 1000}),
    ("model/load", {"name": "../../x"}),
    ("model/load", {}),
]


async def test_bodies_that_are_wrong(target: HostileFixture) -> None:
    for path, body in BODIES:
        filled = path.format(turn=target.turn.id, message=target.message.id, talk=target.talk.id)
        assert_refused(await target.http.post(f"/api/{filled}", json=body))


async def test_bodies_that_are_no_conversation(target: HostileFixture) -> None:
    json = {"content-type": "application/json"}
    wrong = (b"", b"null", b"3", b"\xff", b'{"title": "\\ud800"}', b"[" * 10_000, b'{"title": NaN}', b'{"title": 3}')
    for body in wrong:
        assert_refused(await target.http.post("/api/conversations", content=body, headers=json))
