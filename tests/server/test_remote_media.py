"""Downloads for clients: only of public addresses, pinned, without redirects, within limits."""

from __future__ import annotations

import gzip
import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from palaver.address_guard import Address, AddressGuard, is_public
from palaver.media import BadMedia
from palaver.server import app
from palaver.server.remote_media import RemoteMedia
from palaver.server.settings import ServerSettings
from tests import media_files
from tests.server.live_server import LiveServer

PICTURE = media_files.picture(size=(64, 64))
LOOPBACK = ipaddress.ip_address("127.0.0.1")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/picture.png")
            self.end_headers()
            return
        if self.path == "/compressed":
            self.server.codings.append(self.headers["Accept-Encoding"])  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip, gzip")
            self.end_headers()
            self.wfile.write(gzip.compress(gzip.compress(bytes(1 << 20))))
            return
        if self.path == "/trickle":
            self.trickle()
            return
        if self.path == "/notes.txt":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"It rains.")
            return
        self.send_response(200 if self.path in ("/picture.png", "/@me/picture.png?by=@me") else 404)
        self.end_headers()
        self.wfile.write(PICTURE)

    def trickle(self) -> None:
        """Sends headers without end, each well before a read times out."""
        self.send_response(200)
        with suppress(OSError):
            while not self.server.closing.wait(0.05):  # type: ignore[attr-defined]
                self.send_header("X", "y")
                self.flush_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hosts, server.codings = [], []  # type: ignore[attr-defined]
    server.closing = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.closing.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def to_loopback(host: str, port: int) -> Sequence[Address]:
    assert host == "pictures.example"
    return [LOOPBACK]


OPEN = RemoteMedia(AddressGuard(to_loopback, lambda address: True))


def test_downloads_from_the_address_that_was_checked(site: ThreadingHTTPServer) -> None:
    url = f"http://pictures.example:{site.server_port}/picture.png"
    assert OPEN.fetch(url) == PICTURE
    assert site.hosts == [f"pictures.example:{site.server_port}"]  # type: ignore[attr-defined]


def test_downloads_from_a_path_with_an_at_sign(site: ThreadingHTTPServer) -> None:
    assert OPEN.fetch(f"http://pictures.example:{site.server_port}/@me/picture.png?by=@me#@") == PICTURE
    assert site.hosts == [f"pictures.example:{site.server_port}"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_allowed", [True, False])
def test_chat_completions_download_where_the_operator_allows_it(
    is_allowed: bool, site: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "RemoteMedia", lambda: OPEN)
    url = f"http://pictures.example:{site.server_port}/picture.png"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour is it?"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    with LiveServer(tmp_path, ServerSettings(remote_media=is_allowed), model="sprout-omni") as live:
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=120)
    if is_allowed:
        assert "red" in answer.json()["choices"][0]["message"]["content"]
        assert site.hosts == [f"pictures.example:{site.server_port}"]  # type: ignore[attr-defined]
    else:
        assert answer.status_code == 400
        assert "which this server does not download: send it as a data URL" in answer.json()["error"]["message"]
        assert site.hosts == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_allowed", [True, False])
def test_responses_download_files_where_the_operator_allows_it(
    is_allowed: bool, site: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "RemoteMedia", lambda: OPEN)
    url = f"http://pictures.example:{site.server_port}/notes.txt"
    content = [{"type": "input_file", "file_url": url}, {"type": "input_text", "text": "What does it say?"}]
    with (
        LiveServer(tmp_path, ServerSettings(remote_media=is_allowed)) as live,
        httpx.Client(base_url=live.url, timeout=60) as http,
    ):
        answer = http.post("/v1/responses", json={"input": [{"role": "user", "content": content}]})
        if is_allowed:
            items = http.get(f"/v1/responses/{answer.json()['id']}/input_items").json()["data"]
            assert items[0]["content"][0]["text"] == "\n\nFile notes.txt:\n\nIt rains.\n\n"
        else:
            assert answer.status_code == 400
            assert "which this server does not download" in answer.json()["error"]["message"]
            assert site.hosts == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["moved", "missing"])
def test_follows_no_redirect(site: ThreadingHTTPServer, path: str) -> None:
    with pytest.raises(BadMedia, match=r"its server answered (302|404)"):
        OPEN.fetch(f"http://pictures.example:{site.server_port}/{path}")


def test_ends_at_the_limit(site: ThreadingHTTPServer) -> None:
    with pytest.raises(BadMedia, match="is larger than"):
        replace(OPEN, max_bytes=10).fetch(f"http://pictures.example:{site.server_port}/picture.png")


def test_refuses_a_compressed_body(site: ThreadingHTTPServer) -> None:
    with pytest.raises(BadMedia, match="its server compresses it"):
        OPEN.fetch(f"http://pictures.example:{site.server_port}/compressed")
    assert site.codings == ["identity"]  # type: ignore[attr-defined]


def test_the_time_limit_includes_the_headers(site: ThreadingHTTPServer) -> None:
    with pytest.raises(BadMedia, match=r"could not be downloaded within 0\.3 s"):
        replace(OPEN, total_seconds=0.3).fetch(f"http://pictures.example:{site.server_port}/trickle")


def test_refuses_if_one_address_is_private(site: ThreadingHTTPServer) -> None:
    addresses = [ipaddress.ip_address("93.184.216.34"), LOOPBACK]
    with pytest.raises(BadMedia, match="is at an address that is not public"):
        RemoteMedia(AddressGuard(lambda host, port: addresses)).fetch(
            f"http://pictures.example:{site.server_port}/picture.png"
        )
    assert site.hosts == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x.png",
        "http://127.1/x.png",
        "http://2130706433/x.png",
        "http://0x7f.1/x.png",
        "http://[::1]/x.png",
        "http://[::ffff:10.0.0.1]/x.png",
        "http://localhost/x.png",
        "http://169.254.169.254/latest/meta-data",
        "http://0.0.0.0/x.png",
    ],
)
def test_refuses_private_addresses_however_they_are_written(url: str) -> None:
    with pytest.raises(BadMedia, match=r"not public|not known|not a plain"):
        RemoteMedia().fetch(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http:\\\\evil",
        "http://good.example\\@127.0.0.1/",
        "http://user@127.0.0.1/",
        "http://@127.0.0.1/",
        "http://user:word@127.0.0.1/@me",
        "http://good.example%40127.0.0.1/",
        "http://good.example%5C@127.0.0.1/",
        "http://good.example%2F@127.0.0.1/",
        "http://good.example\uff20127.0.0.1/",
        "http://good.example/\\@127.0.0.1/",
        "ftp://a.example/x",
        "http://a.example:65536/",
        "http://",
        "http:///x",
        "gopher://a",
        "http://a b/",
        "http://a.example/" + "x" * 5000,
    ],
)
def test_refuses_everything_but_plain_urls(url: str) -> None:
    with pytest.raises(BadMedia, match="not a plain http or https URL"):
        OPEN.fetch(url)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        *[(address, False) for address in ("10.1.2.3", "192.168.0.1", "172.16.0.1", "100.64.0.1", "127.0.0.1")],
        *[(address, False) for address in ("224.0.0.1", "0.0.0.0", "255.255.255.255", "169.254.1.1")],
        *[(address, False) for address in ("::1", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "::")],
        *[(address, False) for address in ("2002:7f00:1::", "ff02::1", "fec0::1", "64:ff9b:1::7f00:1")],
        *[(address, False) for address in ("::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8")],
        *[(address, True) for address in ("::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::")],
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public
