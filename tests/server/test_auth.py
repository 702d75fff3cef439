from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from palaver.server.auth import KEY_CACHE_SECONDS
from palaver.server.settings import ServerLimits, ServerSettings
from tests.server.chat_client import CHAT, SUM, get, options, post
from tests.server.live_server import ADMIN, TOKEN, LiveServer


@dataclass
class Keyed:
    """A server that asks for keys, and three of them."""

    live: LiveServer
    ann: str
    bob: str
    admin: str

    def get(self, path: str, key: str | None = None, **headers: str) -> httpx.Response:
        given = {"authorization": f"Bearer {key}"} if key else {}
        return get(self.live.url + path, headers={**given, **headers})


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    # the settings say that others can reach it, which makes it ask for keys; the test listens on loopback all the same
    with LiveServer(tmp_path_factory.mktemp("keyed"), ServerSettings(host="0.0.0.0"), None) as live:
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
            elif path == "/ready":
                assert set(answer.json()) == {"ready"}
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
    assert keyed.get("/v1/models", TOKEN).status_code == 200
    answer = keyed.get("/v1/models", "nonsense")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_only_an_administrator_may_change_the_model(keyed: Keyed) -> None:
    for path in ("/v1/model/load", "/v1/model/unload"):
        url, body = keyed.live.url + path, {"model": "nothing"}
        assert post(url, json=body, headers={"x-api-key": keyed.ann}).status_code == 403
        assert post(url, json=body, headers={"x-api-key": keyed.admin}).status_code in (200, 400, 404)


def test_hostile_20_what_is_another_s_is_not_there(keyed: Keyed) -> None:
    url = f"{keyed.live.url}/api/conversations"
    made = post(url, json={"title": "mine"}, headers={"x-api-key": keyed.ann}).json()
    assert get(f"{url}/{made['id']}", headers={"x-api-key": keyed.ann}).status_code == 200
    assert get(f"{url}/{made['id']}", headers={"x-api-key": keyed.admin}).status_code == 200, "the same user"
    assert get(f"{url}/{made['id']}", headers={"x-api-key": keyed.bob}).status_code == 404
    assert get(url, headers={"x-api-key": keyed.bob}).json() != get(url, headers={"x-api-key": keyed.ann}).json()


def test_a_revoked_key_is_shut_out(keyed: Keyed) -> None:
    store = keyed.live.service.store
    key, text = store.keys.add(store.users.ensure("carl").id)
    assert keyed.get("/v1/models", text).status_code == 200
    store.keys.revoke(key.id)
    time.sleep(KEY_CACHE_SECONDS)
    assert keyed.get("/v1/models", text).status_code == 401
    assert KEY_CACHE_SECONDS <= 5


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server on loopback, which is also called by a name, as behind a proxy on the same machine."""
    with LiveServer(tmp_path_factory.mktemp("local"), ServerSettings(hosts=("chat.example",)), None) as live:
        yield live


PATHS = ("/v1/models", "/api/conversations", "/metrics")


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key", "cookie"])
def test_hostile_32_a_key_that_is_not_valid_is_a_401_on_loopback(local: LiveServer, header: str) -> None:
    store = local.service.store
    revoked, text = store.keys.add(store.users.ensure("dora").id, admin=True)
    store.keys.revoke(revoked.id)
    for key in (text, text + "x", "pal-00000000-unknown", "sk-something"):
        value = {"authorization": f"Bearer {key}", "cookie": f"palaver_8080={key}"}.get(header, key)
        for path in PATHS:
            answer = get(local.url + path, headers={header: value})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), (path, key)
    assert get(f"{local.url}/v1/models", headers={"x-api-key": TOKEN}).status_code == 200


@pytest.mark.parametrize("placeholder", ["none", "EMPTY", "sk-no-key-required"])
def test_a_placeholder_where_a_library_insists_on_a_key_is_no_key(
    local: LiveServer, keyed: Keyed, placeholder: str
) -> None:
    assert get(f"{local.url}/v1/models", headers={"authorization": f"Bearer {placeholder}"}).status_code == 200
    assert keyed.get("/v1/models", placeholder).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/model/load", {"model": "x"}), ("/api/model/load", {"name": "x"}), ("/v1/model/unload", None)],
)
def test_hostile_32_administration_takes_a_key_or_the_token(
    local: LiveServer, path: str, body: dict[str, str] | None
) -> None:
    store = local.service.store
    users_key = {"x-api-key": store.keys.add(store.users.ensure("emil").id)[1]}
    admins_key = {"x-api-key": store.keys.add(store.users.ensure("emil").id, admin=True)[1]}
    for headers in ({}, users_key):
        assert post(local.url + path, json=body, headers=headers).status_code == 403
    for headers in (ADMIN, admins_key):
        assert post(local.url + path, json=body, headers=headers).status_code in (200, 400)


PROXIED = [
    {"host": "chat.example"},
    {"x-forwarded-for": "203.0.113.9"},
    {"x-forwarded-proto": "https"},
    {"forwarded": "for=203.0.113.9"},
    {"x-real-ip": "203.0.113.9"},
    {"via": "1.1 proxy"},
]


@pytest.mark.parametrize("proxied", PROXIED, ids=lambda headers: next(iter(headers)))
def test_hostile_32_through_a_proxy_nobody_is_the_local_user(local: LiveServer, proxied: dict[str, str]) -> None:
    for path in PATHS:
        assert get(local.url + path, headers=proxied).status_code == 401
    assert post(f"{local.url}/v1/model/unload", headers=proxied).status_code == 401
    assert get(f"{local.url}/api/conversations", headers={**proxied, **ADMIN}).status_code == 200
    session = get(f"{local.url}/api/session", headers=proxied).json()
    assert (session["needs_key"], session["signed_in"]) == (True, False), "the page asks for a key"
    assert set(get(f"{local.url}/health", headers=proxied).json()) == {"status", "instance"}


def test_the_printed_address_makes_the_page_an_administrator(tmp_path: Path) -> None:
    with (
        LiveServer(tmp_path, ServerSettings(login_code="printed"), None) as live,
        httpx.Client(base_url=live.url) as page,
    ):
        assert not page.get("/api/session").json()["admin"]
        wrong = page.get("/", params={"login": "guessed"})
        assert (wrong.status_code, wrong.headers.get("set-cookie")) == (303, None)
        right = page.get("/", params={"login": "printed"})
        assert (right.status_code, right.headers["location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=strict"} <= set(right.headers["set-cookie"].split("; "))
        assert page.get("/api/session").json()["admin"]
        assert page.post("/v1/model/unload").status_code == 200


def test_keys_are_kept_as_digests_alone(keyed: Keyed) -> None:
    raw = b"".join(path.read_bytes() for path in keyed.live.service.store.folder.rglob("*") if path.is_file())
    for text in (keyed.ann, keyed.bob, keyed.admin):
        assert text.encode() not in raw
        assert text.split("-", 2)[2].encode() not in raw


def test_requests_of_a_key_are_limited(tmp_path: Path) -> None:
    settings = ServerSettings(limits=ServerLimits(requests_per_minute=3))
    with LiveServer(tmp_path, settings, None) as live:
        statuses = [get(f"{live.url}/v1/models").status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        late = get(f"{live.url}/v1/models")
        assert int(late.headers["retry-after"]) >= 1
        assert late.json()["error"]["type"] == "rate_limit_error"


def test_a_prefix_behind_a_proxy(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ServerSettings(prefix="/palaver"), None) as live:
        for path in ("/palaver/v1/models", "/v1/models"):
            assert get(live.url + path).status_code == 200
        assert get(f"{live.url}/palaverous/v1/models").status_code == 404


def test_pages_that_the_operator_named_may_call(tmp_path: Path) -> None:
    page = "https://chat.example"
    with LiveServer(tmp_path, ServerSettings(origins=(page,), hosts=("models.example",)), None) as live:
        asking = {"origin": page, "access-control-request-method": "POST", "host": "models.example"}
        preflight = options(live.url + CHAT, headers=asking)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = get(f"{live.url}/v1/models", headers={"origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        assert get(f"{live.url}/v1/models", headers={"origin": "https://other.example"}).status_code == 403


def test_messages_and_tools_are_limited(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ServerSettings(limits=ServerLimits(messages=2, tools=1))) as live:
        function = {"type": "function", "function": {"name": "f"}}
        other = {"type": "function", "function": {"name": "g"}}
        for body in ({"messages": SUM * 3}, {"messages": SUM, "tools": [function, other]}):
            assert post(live.url + CHAT, json=body).status_code == 400
