"""How the page's files are served, built or not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from palaver.server.auth import cookie_key
from palaver.server.errors import install_error_handlers
from palaver.server.page import routes
from palaver.server.page.routes import is_public
from palaver.server.settings import ServerSettings
from tests.web.conftest import ROOT


class _State:
    settings = ServerSettings()


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "dist"
    monkeypatch.setattr(routes, "DIST", folder)
    return folder


@pytest.fixture
def client(dist: Path) -> TestClient:
    app = FastAPI()
    app.state.palaver = _State()
    install_error_handlers(app)
    for router in routes.routers():
        app.include_router(router)
    return TestClient(app)


def test_a_page_that_was_not_built_says_how(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "npm run build" in answer.text
    assert answer.headers["content-security-policy"] == routes.POLICY


def test_files_come_packed_and_with_their_kinds(client: TestClient, dist: Path) -> None:
    (dist / "assets").mkdir(parents=True)
    (dist / "index.html").write_text("<p>page")
    (dist / "assets" / "a-1.js").write_text("let a")
    (dist / "assets" / "a-1.js.gz").write_bytes(b"packed")
    (dist / "secret.txt").write_text("no")
    assert client.get("/").text == "<p>page"
    plain = client.get("/assets/a-1.js", headers={"accept-encoding": "identity"})
    assert plain.text == "let a"
    assert "immutable" in plain.headers["cache-control"]
    assert plain.headers["content-type"].startswith("text/javascript")
    with client.stream("GET", "/assets/a-1.js", headers={"accept-encoding": "gzip"}) as packed:
        assert packed.headers["content-encoding"] == "gzip"
        assert b"".join(packed.iter_raw()) == b"packed"
    for name in ("secret.txt", "assets/..%2Findex.html", "assets/nothing.js", "..%2f..%2froutes.py", "a%00.js"):
        assert client.get(f"/{name}").status_code == 404


def test_what_is_open_to_those_without_a_key() -> None:
    assert all(map(is_public, ("/", "/sw.js", "/assets/index.js", "/icon-192.png", "/api/session")))
    assert not any(map(is_public, ("/api/model", "/api/conversations", "/v1/models", "/assets", "/metrics")))


def test_a_cookie_counts_on_its_own_port_alone() -> None:
    headers = {b"cookie": b"other=1; palaver_8080=pal-key; palaver_9=x"}
    assert cookie_key(headers, 8080) == "pal-key"
    assert cookie_key(headers, 8081) is None
    assert cookie_key({b"cookie": b"\xff=;;"}, 8080) is None
    assert cookie_key({}, 8080) is None


def test_the_types_of_the_page_are_those_of_the_server() -> None:
    writing = runpy.run_path(str(ROOT / "web" / "wire_types.py"))
    assert writing["TARGET"].read_text() == writing["source"](writing["document"]()), (
        "web/src/transport/types.ts is behind: python web/wire_types.py"
    )


def test_the_lock_names_no_registry() -> None:
    assert '"resolved"' not in (ROOT / "web" / "package-lock.json").read_text()
