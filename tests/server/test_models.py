"""Several models behind one server: a request's `model` names one, by every API."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import NotFoundError, OpenAI

from palaver.models.catalog import Catalog
from tests.server.live_server import ADMIN, LiveServer

DIFFUSION = "sprout-diffusion"
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    catalog = Catalog(("sprout", DIFFUSION), aliases={"gpt-4o": DIFFUSION})
    with LiveServer(tmp_path_factory.mktemp("data"), catalog=catalog) as live:
        yield live


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=120) as http:
        yield http


def test_the_openai_sdk_asks_for_a_model_by_an_alias(live: LiveServer) -> None:
    with OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=8)  # type: ignore[arg-type]
        assert answer.model == DIFFUSION
        assert {one.id for one in client.models.list()} == {"sprout", DIFFUSION, "gpt-4o"}
        with pytest.raises(NotFoundError, match="There are: sprout, sprout-diffusion, gpt-4o") as unknown:
            client.chat.completions.create(model="gpt-5", messages=HELLO)  # type: ignore[arg-type]
        assert unknown.value.code == "model_not_found"


def test_every_api_takes_the_name(http: httpx.Client) -> None:
    named = {"model": "gpt-4o"}
    asked = {"messages": HELLO, "max_tokens": 4}
    stored = {**named, **asked, "metadata": {"conversation": "new"}}
    for path, body in (
        ("/v1/chat/completions", {**named, **asked}),
        ("/v1/chat/completions", stored),
        ("/v1/completions", {**named, "prompt": "One", "max_tokens": 4}),
        ("/v1/fill", {**named, "text": "17 + [MASK:2] = 42."}),
        ("/v1/messages", {**named, **asked}),
        ("/v1/messages", stored),
        ("/v1/responses", {**named, "input": "Hello!", "max_output_tokens": 16}),
        ("/v1/responses", {**named, "input": "Hello!", "max_output_tokens": 16, "store": False}),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json().get("model")) == (200, DIFFUSION), (path, answer.text)
        refused = http.post(path, json={**body, "model": "nope"})
        assert refused.status_code == 404, path
        assert "There are: sprout" in refused.text
    counts = [
        http.post("/v1/tokenize", json={"model": name, "messages": HELLO}).status_code for name in ("sprout", "x")
    ]
    assert counts == [200, 404]
    assert http.post("/v1/chat/completions", json=asked).json()["model"] == "sprout", "without a name, the one in use"


def test_a_conversation_has_a_model_of_its_own(http: httpx.Client) -> None:
    talk = http.post("/api/conversations", json={"parameters": {"model": "gpt-4o"}}).json()["id"]
    message = {"role": "user", "parts": [{"type": "text", "text": "Hello!"}]}
    body = {"parent": None, "message": message, "parameters": {"max_tokens": 4}}
    said = http.post(f"/api/conversations/{talk}/say", json=body).json()["reply"]
    assert said["reply"]["settings"]["model"] == DIFFUSION
    assert http.get(f"/api/turns/{said['id']}/events").status_code == 200
    again = {"messages": HELLO, "metadata": {"conversation": talk}, "max_tokens": 4}
    assert http.post("/v1/chat/completions", json=again).json()["model"] == DIFFUSION
    refused = http.post("/api/conversations", json={"parameters": {"model": "nope"}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_the_list_says_what_each_takes(http: httpx.Client) -> None:
    found = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
    assert found["gpt-4o"]["alias_of"] == DIFFUSION
    assert found["sprout"]["context_length"] == 8192
    assert http.get("/api/model", params={"name": "gpt-4o"}).json()["name"] == DIFFUSION
    cards = http.get("/api/models/cards").json()
    assert [card["name"] for card in cards] == ["sprout", DIFFUSION]
    assert http.get("/v1/models/nope").status_code == 404
    unloaded = http.post("/v1/model/unload", json={"model": DIFFUSION}, headers=ADMIN)
    assert unloaded.json()["model"] == "sprout", "the model in use stays"
    assert http.get("/api/model", params={"name": DIFFUSION}).json()["state"] == "available"
