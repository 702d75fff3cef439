"""A server of one's own on this machine is found; dead, foreign and indiscreet ones are not."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from palaver.client import discovery
from palaver.client.discovery import Announcement, announce_server, find_server, local_token, sign_nonce
from palaver.client.errors import NoServer
from palaver.client.http_chat import HttpChat
from palaver.client.proof import prove_server

SECRET = "a secret"


@asynccontextmanager
async def healthy(received: dict[str, str], secret: str = SECRET) -> AsyncIterator[str]:
    """Something that answers every request with the same JSON, and with the proof that it knows the secret, if any."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with suppress(asyncio.IncompleteReadError):  # closed before a request
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            nonce = seen[-1].split()[1].decode().partition("?nonce=")[2]
            proof = {"proof": sign_nonce(secret, received.get("instance", ""), nonce)} if secret else {}
            body = json.dumps({**proof, **received})
            writer.write(f"HTTP/1.1 503 Loading\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
        writer.close()

    seen: list[bytes] = []
    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for connection in connections:
        await connection.wait_closed()
    assert all(b"secret" not in request for request in seen)
    assert all(request.startswith((b"GET /health?nonce=", b"GET /chat/health?nonce=")) for request in seen)
    assert len({request.split()[1] for request in seen}) == len(seen), "a proof is of one request"


async def test_a_server_is_found_while_it_is_there(tmp_path: Path) -> None:
    received: dict[str, str] = {}
    async with healthy(received) as url:
        assert await find_server(tmp_path) is None
        with announce_server(tmp_path, f"{url}/", SECRET) as announcement:
            received["instance"] = announcement.instance
            assert await find_server(tmp_path) == announcement
            assert (announcement.url, announcement.secret, announcement.pid) == (url, SECRET, os.getpid())
        assert await find_server(tmp_path) is None
        with announce_server(tmp_path, f"{url}/chat", SECRET) as announcement:
            received["instance"] = announcement.instance
            assert await find_server(tmp_path) == announcement


async def test_the_file_is_private(tmp_path: Path) -> None:
    received: dict[str, str] = {}
    async with healthy(received) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = announcement.instance
            (path,) = (tmp_path / "servers").iterdir()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            path.chmod(0o644)
            assert await find_server(tmp_path) is None


async def test_another_server_on_the_same_port_is_not_found(tmp_path: Path) -> None:
    async with healthy({"instance": "another"}) as url:
        with announce_server(tmp_path, url, SECRET):
            assert await find_server(tmp_path) is None


@pytest.mark.parametrize("secret", ["", "guessed"])
async def test_a_server_that_does_not_know_the_secret_is_not_found(tmp_path: Path, secret: str) -> None:
    """Another user's process on the port of a dead server: `/health` told everyone the instance."""
    received: dict[str, str] = {}
    async with healthy(received, secret) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = announcement.instance
            assert await find_server(tmp_path) is None


async def test_the_proof_of_another_server_does_not_count(tmp_path: Path) -> None:
    """All servers of a data folder have the same secret: the answer of one could be passed on for another."""
    received: dict[str, str] = {}
    async with healthy(received) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = announcement.instance
            received["proof"] = sign_nonce(SECRET, "the instance of a living server", "a nonce")
            assert await find_server(tmp_path) is None


async def test_a_program_that_takes_the_port_of_a_server_gets_nothing(tmp_path: Path) -> None:
    """The terminal was attached to the server before that ended; `healthy` checks that no secret came."""
    received: dict[str, str] = {}
    async with healthy(received, "guessed") as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = announcement.instance
            async with HttpChat(url, SECRET, prove=prove_server(tmp_path, "", url)) as chat:
                with pytest.raises(NoServer, match="no server of this data folder"):
                    await chat.model_cards()


async def test_each_new_connection_is_proven_once(tmp_path: Path) -> None:
    proofs: list[str] = []
    connections: list[list[bytes]] = []
    closed: list[bool] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append([])
        for count in range(2):  # then it is closed
            connections[-1].append(await reader.readuntil(b"\r\n\r\n"))
            keep = b"keep-alive" if count == 0 else b"close"
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: " + keep + b"\r\ncontent-length: 2\r\n\r\n[]")
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        closed.append(True)

    async def prove() -> None:
        proofs.append("" if not connections else "connected")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, HttpChat(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", SECRET, prove=prove) as chat:
        for _ in range(4):
            assert await chat.model_cards() == ()
        while len(closed) < 2:
            await asyncio.sleep(0)
    assert len(proofs) == len(connections) == 2
    assert all(b"secret" in request for requests in connections for request in requests)


@pytest.mark.skipif(sys.platform == "win32", reason="process ids are reused at once")
async def test_the_file_of_a_dead_process_is_removed_unasked(tmp_path: Path) -> None:
    received: dict[str, str] = {}
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    async with healthy(received) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = "dead"
            dead = write_announcement(tmp_path, announcement, instance="dead", pid=ended.pid)
            elsewhere = {"instance": "elsewhere", "processes": "another machine", "url": "http://127.0.0.1:1"}
            other = write_announcement(tmp_path, announcement, pid=ended.pid, host="another machine", **elsewhere)
            assert await find_server(tmp_path) is None
            assert not dead.exists()
            assert other.exists()


async def test_a_server_of_another_store_is_not_found(tmp_path: Path) -> None:
    received: dict[str, str] = {}
    async with healthy(received) as url:
        with announce_server(tmp_path / "one", url, SECRET, store="postgresql://me:word@here/a") as announcement:
            received["instance"] = announcement.instance
            assert "word" not in announcement.store
            assert await find_server(tmp_path / "two", "postgresql://me:word@here/a") is None
            assert await find_server(tmp_path / "one") is None
            assert await find_server(tmp_path / "one", "postgresql://me@there/a") is None
            assert await find_server(tmp_path / "one", "postgresql://me:***@here/a") == announcement


def write_announcement(folder: Path, announcement: Announcement, **changes: object) -> Path:
    path = folder / "servers" / f"{changes['instance']}.json"
    path.write_text(json.dumps({**asdict(announcement), **changes}))
    path.chmod(0o600)
    return path


async def test_files_of_dead_servers_are_removed(tmp_path: Path) -> None:
    received: dict[str, str] = {}
    async with healthy(received) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = announcement.instance
            closed = write_announcement(tmp_path, announcement, instance="closed", url="http://localhost:1")
            taken_over = write_announcement(tmp_path, announcement, instance="another")
            assert await find_server(tmp_path) == announcement
            assert not closed.exists()
            assert not taken_over.exists()


@pytest.mark.parametrize("changes", [{"url": "http://127.0.0.1:1"}, {}])
async def test_files_of_other_hosts_stay(tmp_path: Path, changes: dict[str, str]) -> None:
    async with healthy({"instance": "another"}) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            path = write_announcement(tmp_path, announcement, instance="it", host="a container", **changes)
            assert await find_server(tmp_path) is None
            assert path.exists()


async def test_an_overloaded_server_stays(tmp_path: Path) -> None:
    async with healthy({"error": "too many requests"}) as url:
        with announce_server(tmp_path, url, SECRET):
            assert await find_server(tmp_path) is None
            assert list((tmp_path / "servers").iterdir())


async def test_servers_with_the_same_process_id_have_files_of_their_own(tmp_path: Path) -> None:
    """As in two containers on one data folder."""
    received: dict[str, str] = {}
    async with healthy(received) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = announcement.instance
            with announce_server(tmp_path, "http://127.0.0.1:1", SECRET):
                assert len(list((tmp_path / "servers").iterdir())) == 2
            assert await find_server(tmp_path) == announcement


async def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    async with healthy({"instance": "it"}) as url:
        (tmp_path / "servers").mkdir()
        path = tmp_path / "servers" / "123.json"
        path.write_text(json.dumps({"url": url, "pid": 123, "instance": "it", "secret": SECRET, "store": ""}))
        path.chmod(0o600)
        assert await find_server(tmp_path) == Announcement(url, 123, "it", SECRET)


async def test_a_file_of_a_later_version_is_read(tmp_path: Path) -> None:
    received: dict[str, str] = {}
    async with healthy(received) as url:
        with announce_server(tmp_path, url, SECRET) as announcement:
            received["instance"] = announcement.instance
            write_announcement(tmp_path, announcement, instance=announcement.instance, later="a name of tomorrow")
            assert await find_server(tmp_path) == announcement


NO_SECRET = '{"url": "http://127.0.0.1:9", "pid": 1, "instance": "it", "secret": ""}'
NO_PID = '{"url": "http://127.0.0.1:9", "pid": "1", "instance": "it", "secret": "s"}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 3}', '{"unknown": 1}', NO_SECRET, NO_PID])
async def test_other_files_are_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "servers").mkdir()
    path = tmp_path / "servers" / "1.json"
    path.write_text(text)
    path.chmod(0o600)
    assert await find_server(tmp_path) is None
    with announce_server(tmp_path, "http://127.0.0.1:9", SECRET):
        assert await find_server(tmp_path) is None


@pytest.fixture(params=[True, False], ids=["hard links", "no hard links"])
def hard_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError

    if not request.param:
        monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("hard_links")
def test_the_token_is_private_and_stays(tmp_path: Path) -> None:
    token = local_token(tmp_path)
    assert token
    assert local_token(tmp_path) == token
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.usefixtures("hard_links")
def test_starts_at_once_get_the_same_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, others = secrets.token_urlsafe, []

    def start_another(length: int) -> str:
        monkeypatch.setattr(secrets, "token_urlsafe", draw)
        others.append(local_token(tmp_path))
        return draw(length)

    monkeypatch.setattr(secrets, "token_urlsafe", start_another)
    assert [local_token(tmp_path)] == others
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_token_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "WRITE_TIMEOUT_S", 0)
    (tmp_path / "token").touch()
    assert local_token(tmp_path)
