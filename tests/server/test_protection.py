from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from palaver.server.callers import REMEMBERED_SECONDS
from palaver.server.settings import Limits, ServerSettings
from tests.server.asking import CHAT, SUM, get, options, post
from tests.server.live import Live


@dataclass
class Keyed:
    """A server that asks for keys, and three of them."""

    live: Live
    ann: str
    bob: str
    admin: str

    def get(self, path: str, key: str | None = None, **headers: str) -> httpx.Response:
        given = {"authorization": f"Bearer {key}"} if key else {}
        return get(self.live.url + path, headers={**given, **headers})


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    # the settings say that others can reach it, which makes it ask for keys; the test listens on loopback all the same
    with Live(tmp_path_factory.mktemp("keyed"), ServerSettings(host="0.0.0.0", secret="run's own"), None) as live:
        store = live.service.store
        ann, bob = (store.users.ensure(name).id for name in ("ann", "bob"))
        made = [store.keys.add(ann)[1], store.keys.add(bob)[1], store.keys.add(ann, admin=True)[1]]
        yield Keyed(live, *made)


def test_hostile_19_every_route_asks_for_a_key(keyed: Keyed) -> None:
    routes = keyed.live.server.routes.openapi()["paths"]
    assert len(routes) > 20
    for path, methods in routes.items():
        for method in methods:
            url = keyed.live.url + path.replace("{", "").replace("}", "")
            answer = httpx.request(method, url, timeout=60)
            if path == "/health":
                assert set(answer.json()) == {"status", "instance"}
            elif path == "/api/session":  # where a page gives its key: it tells nobody of anything
                assert method != "get" or (answer.json()["signed_in"], answer.json()["name"]) == (False, "")
            else:
                assert answer.status_code == 401, (method, path)
    assert keyed.get("/openapi.json").status_code == 401
    assert keyed.get("/nothing/here").status_code == 401


def test_hostile_19_a_key_in_every_header_has_the_same_rights(keyed: Keyed) -> None:
    for headers in ({"authorization": f"Bearer {keyed.ann}"}, {"x-api-key": keyed.ann}, {"api-key": keyed.ann}):
        assert keyed.get("/v1/models", **headers).status_code == 200
    assert keyed.get("/v1/models", keyed.ann + "x").status_code == 401
    assert keyed.get("/v1/models", keyed.ann[:-1]).status_code == 401
    assert keyed.get("/v1/models", "pal-").status_code == 401
    assert keyed.get("/v1/models", "run's own").status_code == 200
    answer = keyed.get("/v1/models", "nonsense")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_only_an_administrator_may_change_the_model(keyed: Keyed) -> None:
    for path in ("/v1/model/load", "/v1/model/unload"):
        url, body = keyed.live.url + path, {"model": "nothing"}
        assert post(url, json=body, headers={"x-api-key": keyed.ann}).status_code == 403
        assert post(url, json=body, headers={"x-api-key": keyed.admin}).status_code in (200, 400)


def test_hostile_20_what_is_another_s_is_not_there(keyed: Keyed) -> None:
    url = f"{keyed.live.url}/api/conversations"
    made = post(url, json={"title": "mine"}, headers={"x-api-key": keyed.ann}).json()
    assert get(f"{url}/{made['id']}", headers={"x-api-key": keyed.ann}).status_code == 200
    assert get(f"{url}/{made['id']}", headers={"x-api-key": keyed.admin}).status_code == 200, "the same user"
    assert get(f"{url}/{made['id']}", headers={"x-api-key": keyed.bob}).status_code == 404
    assert get(url, headers={"x-api-key": keyed.bob}).json() != get(url, headers={"x-api-key": keyed.ann}).json()


def test_a_revoked_key_is_shut_out(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    store = keyed.live.service.store
    key, text = store.keys.add(store.users.ensure("carl").id)
    assert keyed.get("/v1/models", text).status_code == 200
    store.keys.revoke(key.id)
    monkeypatch.setattr("palaver.server.callers.REMEMBERED_SECONDS", 0.0)
    assert keyed.get("/v1/models", text).status_code == 401
    assert REMEMBERED_SECONDS <= 5


def test_keys_are_kept_as_digests_alone(keyed: Keyed) -> None:
    raw = b"".join(path.read_bytes() for path in keyed.live.service.store.folder.rglob("*") if path.is_file())
    for text in (keyed.ann, keyed.bob, keyed.admin):
        assert text.encode() not in raw
        assert text.split("-", 2)[2].encode() not in raw


def test_requests_of_a_key_are_limited(tmp_path: Path) -> None:
    settings = ServerSettings(limits=Limits(requests_per_minute=3))
    with Live(tmp_path, settings, None) as live:
        statuses = [get(f"{live.url}/v1/models").status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        late = get(f"{live.url}/v1/models")
        assert int(late.headers["retry-after"]) >= 1
        assert late.json()["error"]["type"] == "rate_limit_error"


def test_a_prefix_behind_a_proxy(tmp_path: Path) -> None:
    with Live(tmp_path, ServerSettings(prefix="/palaver"), None) as live:
        for path in ("/palaver/v1/models", "/v1/models"):
            assert get(live.url + path).status_code == 200
        assert get(f"{live.url}/palaverous/v1/models").status_code == 404


def test_pages_that_the_operator_named_may_call(tmp_path: Path) -> None:
    page = "https://chat.example"
    with Live(tmp_path, ServerSettings(origins=(page,), hosts=("models.example",)), None) as live:
        asking = {"origin": page, "access-control-request-method": "POST", "host": "models.example"}
        preflight = options(live.url + CHAT, headers=asking)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == page
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = get(f"{live.url}/v1/models", headers={"origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        assert get(f"{live.url}/v1/models", headers={"origin": "https://other.example"}).status_code == 403


def test_messages_and_tools_are_limited(tmp_path: Path) -> None:
    with Live(tmp_path, ServerSettings(limits=Limits(messages=2, tools=1))) as live:
        function = {"type": "function", "function": {"name": "f"}}
        other = {"type": "function", "function": {"name": "g"}}
        for body in ({"messages": SUM * 3}, {"messages": SUM, "tools": [function, other]}):
            assert post(live.url + CHAT, json=body).status_code == 400
