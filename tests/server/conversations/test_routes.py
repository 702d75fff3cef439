"""The routes as other programs use them: ownership, keys, files, blobs, the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.server.settings import ServerSettings
from tests import media_files
from tests.chat.scripted_service import Stage, open_stage
from tests.client.live import TOKEN, served
from tests.store.exports import CLAUDE, archive

USER = {"role": "user", "parts": [{"type": "text", "text": "Wave!"}]}
PICTURE = media_files.picture()


@dataclass
class TwoUsers:
    """A server with API keys, and two users."""

    stage: Stage
    ann: httpx.AsyncClient
    bob: httpx.AsyncClient
    nobody: httpx.AsyncClient


@asynccontextmanager
async def http_client(url: str, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as http:
        yield http


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[TwoUsers]:
    async with open_stage(tmp_path) as stage:
        store = stage.service.store
        keys = [store.keys.add(store.users.ensure(name).id)[1] for name in ("ann", "bob")]
        await stage.chat.wait_until_ready()
        async with (
            served(stage.service, ServerSettings(host="0.0.0.0")) as url,
            http_client(url, keys[0]) as ann,
            http_client(url, keys[1]) as bob,
            http_client(url) as nobody,
        ):
            yield TwoUsers(stage, ann, bob, nobody)


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with open_stage(tmp_path) as stage, served(stage.service) as url, http_client(url, TOKEN) as http:
        await stage.chat.wait_until_ready()
        yield http


async def wait_ended(http: httpx.AsyncClient, turn: str) -> None:
    assert (await http.get(f"/api/turns/{turn}/events")).status_code == 200


async def test_what_is_anothers_is_not_found(two: TwoUsers) -> None:
    talk = (await two.ann.post("/api/conversations", json={"title": "Ann's", "tags": ["hers"]})).json()["id"]
    sent = (await two.ann.post(f"/api/conversations/{talk}/say", json={"parent": None, "message": USER})).json()
    message, turn = sent["message"]["id"], sent["reply"]["id"]
    await wait_ended(two.ann, turn)
    digest = (await two.ann.post("/api/blobs", content=PICTURE, headers=OCTETS)).json()["digest"]
    requests: list[tuple[str, str, Any]] = [
        ("GET", f"/api/conversations/{talk}", None),
        ("PATCH", f"/api/conversations/{talk}", {"title": "Bob's"}),
        ("DELETE", f"/api/conversations/{talk}", None),
        ("POST", f"/api/conversations/{talk}/undelete", None),
        ("GET", f"/api/conversations/{talk}/nodes", None),
        ("GET", f"/api/conversations/{talk}/previews", None),
        ("GET", f"/api/conversations/{talk}/newest-leaf", None),
        ("POST", f"/api/conversations/{talk}/gauge", {"leaf": None}),
        ("GET", f"/api/conversations/{talk}/export", None),
        ("GET", f"/api/conversations/{talk}/cursor?client=c", None),
        ("PUT", f"/api/conversations/{talk}/cursor", {"client": "c", "to": None}),
        ("POST", f"/api/conversations/{talk}/cursor/undo", {"client": "c"}),
        ("POST", f"/api/conversations/{talk}/cursor/redo", {"client": "c"}),
        ("POST", f"/api/conversations/{talk}/messages", {"parent": None, "message": USER}),
        ("POST", f"/api/conversations/{talk}/say", {"parent": None, "message": USER}),
        ("POST", f"/api/conversations/{talk}/replies", {"parent": message}),
        ("GET", f"/api/messages/{message}", None),
        ("GET", f"/api/messages/{message}/path", None),
        ("GET", f"/api/messages/{message}/siblings", None),
        ("POST", f"/api/messages/{message}/edit", {"parts": USER["parts"]}),
        ("POST", f"/api/turns/{turn}/continue", None),
        ("POST", f"/api/turns/{turn}/fork", {"tokens": 1}),
        ("POST", f"/api/turns/{turn}/stop", None),
        ("POST", f"/api/turns/{turn}/answer-now", None),
        ("GET", f"/api/turns/{turn}/tokens", None),
        ("GET", f"/api/turns/{turn}/raw", None),
        ("GET", f"/api/turns/{turn}/events", None),
        ("GET", f"/api/blobs/{digest}", None),
        ("GET", f"/api/conversations?before={talk}", None),
    ]
    for method, path, body in requests:
        answer = await two.bob.request(method, path, json=body)
        assert answer.status_code == 404, f"{method} {path}: {answer.status_code}"
        assert answer.json()["error"]["name"] == "not_found"
        assert (await two.nobody.request(method, path, json=body)).status_code == 401
    assert (await two.bob.get("/api/conversations")).json() == []
    assert (await two.bob.get("/api/tags")).json() == []
    assert (await two.bob.get("/api/search", params={"query": "wave"})).json() == []
    stream = (await two.bob.get("/api/events", params={"turns": turn})).text
    assert '"refused"' in stream
    assert "Wave" not in stream
    mine = (await two.bob.post("/api/conversations", json={})).json()["id"]
    for path, body in (
        (f"/api/conversations/{mine}/say", {"parent": message, "message": USER}),
        (f"/api/conversations/{mine}/messages", {"parent": message, "message": USER}),
        (f"/api/conversations/{mine}/replies", {"parent": message}),
        (f"/api/conversations/{mine}/gauge", {"leaf": message}),
        (f"/api/conversations/{mine}/say", {"parent": None, "message": picture_message(digest)}),
    ):
        assert (await two.bob.post(path, json=body)).status_code == 404, path
    assert (
        await two.bob.put(f"/api/conversations/{mine}/cursor", json={"client": "c", "to": message})
    ).status_code == 404
    assert (await two.bob.get(f"/api/conversations/{mine}/newest-leaf", params={"start": message})).status_code == 404
    assert (await two.bob.get(f"/api/conversations/{mine}/export", params={"leaf": message})).status_code == 404
    assert len((await two.ann.get(f"/api/conversations/{talk}/nodes")).json()) == 2
    assert (await two.ann.get(f"/api/conversations/{talk}")).json()["title"] == "Ann's"


async def test_changes_are_told_to_their_owner_alone(two: TwoUsers) -> None:
    async with two.bob.stream("GET", "/api/events", params={"changes": "true"}) as answer:
        pieces = answer.aiter_bytes()
        assert b"opened" in await anext(pieces)
        await two.ann.post("/api/conversations", json={"title": "Ann's"})
        his = (await two.bob.post("/api/conversations", json={"title": "Bob's"})).json()["id"]
        assert json.loads((await anext(pieces)).removeprefix(b"data: "))["change"]["conversation_id"] == his


async def test_only_an_administrator_changes_the_model(two: TwoUsers) -> None:
    for path, body in (("load", {"name": "scripted"}), ("unload", None)):
        assert (await two.bob.post(f"/api/model/{path}", json=body)).status_code == 403
    assert (await two.bob.get("/api/model")).json()["state"] == "ready"


async def test_a_model_is_not_a_path(http: httpx.AsyncClient) -> None:
    for name in ("../../etc", "/etc/passwd", "no such", "..", "a/../b", ""):
        assert (await http.post("/api/model/load", json={"name": name})).status_code == 400, name
    assert (await http.get("/api/model")).json()["state"] == "ready"


async def test_a_key_in_the_header_or_in_the_body_makes_a_write_happen_once(http: httpx.AsyncClient) -> None:
    header = {"idempotency-key": "k1"}
    talk = (await http.post("/api/conversations", json={}, headers=header)).json()["id"]
    assert (await http.post("/api/conversations", json={"key": "k1"})).json()["id"] == talk
    body = {"parent": None, "message": USER}
    first = (await http.post(f"/api/conversations/{talk}/say", json=body, headers={"idempotency-key": "k2"})).json()
    again = (await http.post(f"/api/conversations/{talk}/say", json={**body, "key": "k2"})).json()
    assert (first["message"]["id"], first["reply"]["id"]) == (again["message"]["id"], again["reply"]["id"])
    await wait_ended(http, first["reply"]["id"])
    retry = {"parent": first["message"]["id"], "key": "k3"}
    replies = [(await http.post(f"/api/conversations/{talk}/replies", json=retry)).json()["id"] for _ in range(2)]
    assert replies[0] == replies[1]
    edit = {"parts": USER["parts"], "key": "k4"}
    edits = [
        (await http.post(f"/api/messages/{first['message']['id']}/edit", json=edit)).json()["id"] for _ in range(2)
    ]
    assert edits[0] == edits[1]
    both = await http.post("/api/conversations", json={"key": "a"}, headers={"idempotency-key": "b"})
    assert both.status_code == 400
    other = {**body, "key": "k2", "message": {"role": "user", "parts": [{"type": "text", "text": "Other"}]}}
    assert (await http.post(f"/api/conversations/{talk}/say", json=other)).status_code == 409


async def test_a_stale_tab_makes_a_branch_and_overwrites_nothing(http: httpx.AsyncClient) -> None:
    talk = (await http.post("/api/conversations", json={})).json()["id"]
    path = f"/api/conversations/{talk}/messages"
    root = (await http.post(path, json={"parent": None, "message": USER})).json()["id"]
    both = [(await http.post(path, json={"parent": root, "message": USER})).json() for _ in range(2)]
    assert [one["parent_id"] for one in both] == [root, root]
    assert len((await http.get(f"/api/messages/{both[0]['id']}/siblings")).json()) == 2


async def test_files_are_downloads_of_their_kind(http: httpx.AsyncClient) -> None:
    talk = (await http.post("/api/conversations", json={"title": 'A "trip"\u2028 été/..'})).json()["id"]
    await http.post(f"/api/conversations/{talk}/messages", json={"parent": None, "message": USER})
    kinds = {
        "jsonl": "application/jsonl",
        "branches": "application/jsonl",
        "tree": "application/json",
        "markdown": "text/markdown",
        "sharegpt": "application/jsonl",
    }
    for form, kind in kinds.items():
        answer = await http.get(f"/api/conversations/{talk}/export", params={"form": form})
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        named = answer.headers["content-disposition"]
        assert named.startswith('attachment; filename="A _trip_ _t_')
        assert "\n" not in named
        assert answer.headers["x-content-type-options"] == "nosniff"
    tree = await http.get(f"/api/conversations/{talk}/export", params={"form": "tree"})
    text = {"content-type": "text/plain"}
    made = await http.post("/api/import", content=tree.content, headers=text)
    assert made.status_code == 201
    (copy,) = made.json()
    assert copy["id"] != talk
    assert (await http.post("/api/import", content=tree.content, headers=text)).json()[0]["id"] == copy["id"]
    assert (await http.post("/api/import", content=b"\xff\xfe", headers=text)).status_code == 400
    binary = {"content-type": "application/octet-stream"}
    zipped = await http.post("/api/import", content=archive(CLAUDE), headers=binary, params={"report": True})
    assert zipped.status_code == 201, zipped.text
    assert [one["title"] for one in zipped.json()["conversations"]] == ["Sums"]
    assert len(zipped.json()["skipped"]) == int(zipped.headers["palaver-skipped"]) == 3
    assert (await http.post("/api/import", content=archive(CLAUDE)[:-30], headers=binary)).status_code == 400
    assert (await http.post("/api/import", content=b"no conversation", headers=text)).status_code == 400
    assert (await http.get(f"/api/conversations/{talk}/export", params={"form": "pdf"})).status_code == 400


OCTETS = {"content-type": "application/octet-stream"}


def picture_message(digest: str) -> dict[str, Any]:
    about = {"name": "", "width": 8, "height": 6, "seconds": 0.0}
    blob = {"type": "blob", "kind": "image", "media_type": "image/png", "digest": digest, "size": len(PICTURE), **about}
    return {"role": "user", "parts": [blob]}


async def test_blobs_can_be_shown_but_never_run(http: httpx.AsyncClient) -> None:
    digest = (await http.post("/api/blobs", content=PICTURE, headers=OCTETS)).json()["digest"]
    for kind in ("application/octet-stream", "image/png"):
        answer = await http.get(f"/api/blobs/{digest}", params={"type": kind})
        assert answer.content == PICTURE
        assert answer.headers["content-type"] == kind
        assert answer.headers["content-disposition"].startswith("attachment;")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    for kind in ("text/html", "image/svg+xml", "application/javascript", "image/png\r\nx: y", ""):
        assert (await http.get(f"/api/blobs/{digest}", params={"type": kind})).status_code == 400
    for name in ("0" * 64, "..%2f..%2fpalaver.db", "x", digest.upper()):
        assert (await http.get(f"/api/blobs/{name}")).status_code == 404


async def test_media_come_by_value_or_by_name(http: httpx.AsyncClient) -> None:
    talk = (await http.post("/api/conversations", json={})).json()["id"]
    path = f"/api/conversations/{talk}/messages"
    digest = (await http.post("/api/blobs", content=PICTURE, headers=OCTETS)).json()["digest"]
    inline = {"type": "image", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()}
    by_value = await http.post(path, json={"parent": None, "message": {"role": "user", "parts": [inline]}})
    by_name = await http.post(path, json={"parent": None, "message": picture_message(digest)})
    assert by_value.json()["parts"] == by_name.json()["parts"] == picture_message(digest)["parts"]
    wrong = {**inline, "data": "%%%"}
    refused = await http.post(path, json={"parent": None, "message": {"role": "user", "parts": [wrong]}})
    assert refused.status_code == 400


WRONG: list[Any] = [
    {"parent": None, "message": USER, "unknown": 1},
    {"parent": None, "message": {"role": "king", "parts": []}},
    {"parent": None, "message": {"role": "user", "parts": [{"type": "text"}]}},
    {"parent": None, "message": {"role": "user", "parts": []}},
    {"parent": 3, "message": USER},
    {"message": USER},
    {"parent": None, "message": USER, "parameters": {"temperature": -1}},
    {"parent": None, "message": USER, "parameters": {"n": 10**6}},
    {"parent": None, "message": USER, "parameters": []},
    {"parent": None, "message": USER, "key": ""},
    [],
]


async def test_what_is_wrong_is_refused_and_nothing_is_written(http: httpx.AsyncClient) -> None:
    talk = (await http.post("/api/conversations", json={})).json()["id"]
    for body in WRONG:
        answer = await http.post(f"/api/conversations/{talk}/say", json=body)
        assert answer.status_code == 400, f"{body}: {answer.text}"
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await http.get(f"/api/conversations/{talk}/nodes")).json() == []


async def test_texts_come_back_to_the_letter(http: httpx.AsyncClient) -> None:
    for text in ("\x00", "a\u2028b", "\U0001f44b\u200d", "</think><|im_end|>"):
        talk = (await http.post("/api/conversations", json={"system": text})).json()
        assert talk["system"] == text
        sent = {"role": "user", "parts": [{"type": "text", "text": text}]}
        path = f"/api/conversations/{talk['id']}/messages"
        put = (await http.post(path, json={"parent": None, "message": sent})).json()
        assert (await http.get(f"/api/messages/{put['id']}")).json()["parts"] == sent["parts"]


async def test_waiting_for_the_model_has_a_limit(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage, served(stage.service) as url, http_client(url, TOKEN) as http:
        await stage.chat.wait_until_ready()
        stuck = asyncio.Event()

        async def load(name: str, report: Any) -> Any:
            report(0.25, "reading")
            await stuck.wait()

        stage.service.models._load = load
        stage.service.models.load("another")
        card = (await http.get("/api/model/ready", params={"wait": 0.05})).json()
        assert (card["state"], card["progress"], card["note"]) == ("loading", 0.25, "reading")
        assert (await http.post("/api/model/unload")).json()["state"] == "none"
        assert (await http.get("/api/model/ready")).status_code == 503


async def test_the_document_is_complete(http: httpx.AsyncClient) -> None:
    """The page's types are made from it: every event and every value is in it, under its own name."""
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for name in (
        *("Conversation", "Stored", "StoredReply", "Settings", "Sampling", "Node", "Hit", "Cursor", "Said", "Gauge"),
        *("Token", "Change", "ModelCard", "Switch", "Entry", "TurnEvent", "Changed", "Refused", "Opened", "Closing"),
        *("Waiting", "Started", "Snapshot", "PhaseOpened", "ThinkingDelta", "AnswerDelta", "ToolCallOpened"),
        *(
            "ToolCallDelta",
            "DraftBlock",
            "Notice",
            "Finished",
            "Failed",
            "Usage",
            "Message",
            "Text",
            "Thinking",
            "ToolCall",
        ),
        *("ToolResult", "Media", "Blob", "Say", "Follow", "ErrorBody"),
    ):
        assert name in schemas, name
    assert not [name for name in schemas if "-Input" in name or "__" in name]
    mapping = schemas["Entry"]["properties"]["event"]["discriminator"]["mapping"]
    assert len(mapping) == 12
    for path, methods in document["paths"].items():
        if path.startswith("/api/"):
            for method, operation in methods.items():
                good = next(status for status in operation["responses"] if status.startswith("2"))
                content = operation["responses"][good].get("content")
                assert good == "204" or all("schema" in one for one in content.values()), f"{method} {path}"


async def test_the_whole_of_a_turn_by_http_alone(two: TwoUsers) -> None:
    talk = (await two.ann.post("/api/conversations", json={})).json()["id"]
    body = {"parent": None, "message": USER}
    sent = (await two.ann.post(f"/api/conversations/{talk}/say", json=body)).json()
    turn = sent["reply"]["id"]
    await wait_ended(two.ann, turn)
    done = (await two.ann.get(f"/api/messages/{turn}")).json()
    assert [part["type"] for part in done["parts"]] == ["thinking", "text"]
    assert done["reply"]["status"] == "done"
    tokens = (await two.ann.get(f"/api/turns/{turn}/tokens")).json()
    assert (tokens[0]["text"], tokens[0]["logprob"]) == ("<think>", 0.0)
    assert (await two.ann.get(f"/api/turns/{turn}/raw")).json()["text"].startswith("<think>\nthink")
