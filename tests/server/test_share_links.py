"""Share links: who may make them, what their pages show, and what they never do."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from palaver.server.page.shared_page import POLICY
from palaver.server.settings import ServerSettings
from palaver.store.schema import shares
from palaver.store.share_links import MAX_SHARES
from tests.server.live_server import LiveServer

SECRET = "the operator's words"
ATTACK = (
    "<script>alert(1)</script> **bold** [x](javascript:alert(2)) [ok](https://example.org) "
    '![p](https://attacker.example/p.png) <img src=x onerror="alert(3)">\n\n| a | b |\n| -: | - |\n| 1 | 2 |'
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("shared"), ServerSettings(host="0.0.0.0", share=True), None) as live:
        yield live


@pytest.fixture(scope="module")
def users(live: LiveServer) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """The API as Ann and as Bob see it."""
    store = live.service.store
    keys = [store.keys.add(store.users.ensure(name).id)[1] for name in ("ann", "bob")]
    headers = [{"authorization": f"Bearer {key}"} for key in keys]
    base = f"{live.url}/api/"
    with (
        httpx.Client(base_url=base, headers=headers[0], timeout=60) as ann,
        httpx.Client(base_url=base, headers=headers[1], timeout=60) as bob,
    ):
        yield ann, bob


@pytest.fixture
def talk(users: tuple[httpx.Client, httpx.Client]) -> tuple[str, str]:
    """A conversation and its last message: everything that a link may show or must not."""
    api, _ = users
    id = api.post("conversations", json={"title": "<b>Trip</b>", "system": SECRET}).json()["id"]
    parent = None
    text = {"type": "text", "text": "Where <i>to</i>?"}
    file = {"type": "text", "text": "\n\nFile notes.txt:\n\nprivate words"}
    call = {"type": "tool_call", "id": "1", "name": "find", "arguments": '{"q": "arguments"}', "in_thought": False}
    result = {"type": "tool_result", "call_id": "1", "content": "found it", "name": "find"}
    for role, parts in (
        ("user", [text, file]),
        ("assistant", [{"type": "thinking", "text": "a thought"}, call]),
        ("tool", [result]),
        ("assistant", [{"type": "text", "text": ATTACK}]),
    ):
        body = {"parent": parent, "message": {"role": role, "parts": parts}}
        parent = api.post(f"conversations/{id}/messages", json=body).json()["id"]
    assert parent is not None
    return id, parent


def share(users: tuple[httpx.Client, httpx.Client], talk: tuple[str, str], **asked: Any) -> dict[str, Any]:
    answer = users[0].post(f"conversations/{talk[0]}/shares", json={"leaf": talk[1], **asked})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_a_link_shows_the_branch_without_a_key_and_without_what_is_private(
    live: LiveServer, users: tuple[httpx.Client, httpx.Client], talk: tuple[str, str]
) -> None:
    made = share(users, talk)
    page = httpx.get(f"{live.url}/{made['path']}")
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "noindex" in page.headers["x-robots-tag"]
    assert "set-cookie" not in page.headers
    assert "&lt;b&gt;Trip&lt;/b&gt;" in page.text
    assert "Where &lt;i&gt;to&lt;/i&gt;?" in page.text
    assert "notes.txt" in page.text
    for hidden in (SECRET, "a thought", "arguments", "found it", "private words"):
        assert hidden not in page.text, hidden
    assert "<strong>bold</strong>" in page.text
    assert '<th class="right">a</th>' in page.text
    for active in ("<script", "<img", "<iframe", 'href="javascript', "style="):
        assert active not in page.text, active
    assert '<a href="https://example.org" rel="noopener noreferrer nofollow" target="_blank">ok</a>' in page.text


def test_thoughts_and_tool_results_are_shown_where_it_was_asked_for(
    live: LiveServer, users: tuple[httpx.Client, httpx.Client], talk: tuple[str, str]
) -> None:
    page = httpx.get(f"{live.url}/{share(users, talk, thoughts=True, tools=True)['path']}").text
    assert "a thought" in page
    assert "arguments" in page
    assert "found it" in page
    assert SECRET not in page


def test_a_link_can_be_revoked_expires_and_ends_with_its_conversation(
    live: LiveServer, users: tuple[httpx.Client, httpx.Client], talk: tuple[str, str]
) -> None:
    api, _ = users
    revoked, expired, deleted = (share(users, talk) for _ in range(3))
    listed = api.get(f"conversations/{talk[0]}/shares").json()
    assert [one["id"] for one in listed] == [one["share"]["id"] for one in (revoked, expired, deleted)]
    assert not any(one["path"].removeprefix("share/") in json.dumps(listed) for one in (revoked, expired, deleted))
    assert api.delete(f"shares/{revoked['share']['id']}").status_code == 204
    with live.service.store.database.write_transaction() as connection:
        connection.execute(update(shares).where(shares.c.id == expired["share"]["id"]).values(expires_at=1))
    unknown = httpx.get(f"{live.url}/share/unknown")
    assert unknown.status_code == 404
    for one in (revoked, expired):
        assert httpx.get(f"{live.url}/{one['path']}").text == unknown.text
    assert httpx.get(f"{live.url}/{deleted['path']}").status_code == 200
    api.delete(f"conversations/{talk[0]}")
    assert httpx.get(f"{live.url}/{deleted['path']}").status_code == 404


def test_hostile_20_another_user_can_neither_share_nor_see_nor_revoke(
    live: LiveServer, users: tuple[httpx.Client, httpx.Client], talk: tuple[str, str]
) -> None:
    made = share(users, talk)
    mine, other = users
    assert other.post(f"conversations/{talk[0]}/shares", json={"leaf": talk[1]}).status_code == 404
    assert other.get(f"conversations/{talk[0]}/shares").status_code == 404
    assert other.delete(f"shares/{made['share']['id']}").status_code == 404
    assert httpx.get(f"{live.url}/{made['path']}").status_code == 200
    elsewhere = mine.post("conversations", json={}).json()["id"]
    assert mine.post(f"conversations/{elsewhere}/shares", json={"leaf": talk[1]}).status_code == 404
    for bad in ({"days": 0}, {"days": 366}, {"days": 1.5}, {"leaf": "x" * 200}):
        assert mine.post(f"conversations/{talk[0]}/shares", json={"leaf": talk[1], **bad}).status_code in (400, 422)


def test_the_secret_of_a_link_is_neither_stored_nor_logged(
    live: LiveServer, users: tuple[httpx.Client, httpx.Client], talk: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    made = share(users, talk)
    token = made["path"].removeprefix("share/")
    assert len(token) >= 43
    with caplog.at_level(logging.INFO, "palaver.access"):
        httpx.get(f"{live.url}/{made['path']}")
    assert token not in caplog.text
    for file in live.service.store.folder.glob("palaver.db*"):
        assert token.encode() not in file.read_bytes()


def test_links_of_a_conversation_are_limited(live: LiveServer, talk: tuple[str, str]) -> None:
    store = live.service.store.shares
    for _ in range(MAX_SHARES):
        store.create(*talk, 60)
    with pytest.raises(Exception, match="revoke one first"):
        store.create(*talk, 60)


def test_nothing_is_shared_unless_the_operator_allows_it(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "data", None, None) as live, httpx.Client(base_url=f"{live.url}/api/") as api:
        assert api.get("session").json()["shares"] is False
        id = api.post("conversations", json={}).json()["id"]
        message = {"role": "user", "parts": [{"type": "text", "text": "Hello"}]}
        leaf = api.post(f"conversations/{id}/messages", json={"parent": None, "message": message}).json()["id"]
        refused = api.post(f"conversations/{id}/shares", json={"leaf": leaf})
        assert refused.status_code == 403
        assert "--share" in refused.json()["error"]["message"]
        _, token = live.service.store.shares.create(id, leaf, 60)
        assert httpx.get(f"{live.url}/share/{token}").status_code == 404


def test_defaults_are_a_users_own(users: tuple[httpx.Client, httpx.Client]) -> None:
    ann, bob = users
    assert ann.get("defaults").json() == {"system": "", "parameters": {}}
    wanted = {"system": "Be brief.", "parameters": {"temperature": 0.5}}
    assert ann.put("defaults", json=wanted).json() == wanted
    assert ann.get("defaults").json() == wanted
    assert bob.get("defaults").json() == {"system": "", "parameters": {}}
    assert ann.put("defaults", json={"parameters": {"temperature": -1}}).status_code == 400
