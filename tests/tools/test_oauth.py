"""Signing in to tool servers with OAuth: tokens by owner, state bound to the user, and every request by the guard."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from palaver.address_guard import Address, AddressGuard
from palaver.tools.config import BadToolServer, ServerConfig
from palaver.tools.oauth import listen_for_code
from palaver.tools.servers import NEEDS_SIGN_IN, ToolServerFailed, ToolServerState
from palaver.tools.toolbox import OperatorServers, Toolbox
from tests.tools import misbehaving_server
from tests.tools.oauth_server import AuthorizationServer, serve_oauth

CALLBACK = "http://127.0.0.1:1/callback"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AuthorizationServer]:
    monkeypatch.setattr(misbehaving_server, "RECORD", os.devnull)
    with serve_oauth() as opened:
        yield opened


def returned(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


async def test_a_sign_in_is_of_its_user_and_its_tokens_stay(server: AuthorizationServer, tmp_path: Path) -> None:
    resolved: set[str] = set()

    def resolve(host: str, port: int) -> list[Address]:
        resolved.add(f"{host}:{port}")
        return [ipaddress.ip_address("127.0.0.1")]

    guard = AddressGuard(resolve, lambda address: True)
    toolbox = Toolbox(folder=tmp_path, guard=guard)
    toolbox.add("ada", ServerConfig("web", url=server.url))
    (card,) = await toolbox.connect("ada")
    assert (card.state, card.error, card.needs_sign_in) == (ToolServerState.FAILED, NEEDS_SIGN_IN, True)
    assert not server.registered  # nothing begins by itself
    with pytest.raises(BadToolServer, match="of yours"):
        await toolbox.start_sign_in("grace", "web", CALLBACK)
    back = returned(server.authorize(await toolbox.start_sign_in("ada", "web", CALLBACK)))
    with pytest.raises(BadToolServer, match="no such sign-in of yours"):
        await toolbox.finish_sign_in("grace", back["state"], back["code"])
    with pytest.raises(BadToolServer, match="no such sign-in of yours"):
        await toolbox.finish_sign_in("ada", "another state", back["code"])
    card = await toolbox.finish_sign_in("ada", back["state"], back["code"])
    assert (card.state, card.needs_sign_in) == (ToolServerState.READY, False)
    assert (await toolbox.call("ada", "web__unchanged", {})).text == "as always"
    (file,) = (tmp_path / "tokens" / "ada").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert resolved == {urlsplit(server.url).netloc}  # metadata, registration and tokens, too
    await toolbox.close()
    later = Toolbox(folder=tmp_path, guard=guard)  # the next process
    assert (await later.call("ada", "web__unchanged", {})).text == "as always"
    await later.remove("ada", "web")
    assert not file.exists()
    await later.close()


async def test_the_guard_holds_for_a_sign_in(server: AuthorizationServer, tmp_path: Path) -> None:
    toolbox = Toolbox(folder=tmp_path)
    toolbox.add("ada", ServerConfig("web", url=server.url))
    with pytest.raises(ToolServerFailed, match="not public"):
        await toolbox.start_sign_in("ada", "web", CALLBACK)
    assert not server.registered
    await toolbox.close()


async def test_a_wrong_code_gives_no_tokens(server: AuthorizationServer, tmp_path: Path) -> None:
    toolbox = Toolbox(OperatorServers((ServerConfig("web", url=server.url),), only_for="ada"), tmp_path)
    state = returned(await toolbox.start_sign_in("ada", "web", CALLBACK))["state"]
    with pytest.raises(ToolServerFailed, match="could not be signed in to"):
        await toolbox.finish_sign_in("ada", state, "wrong")
    with pytest.raises(BadToolServer, match="begin it again"):
        await toolbox.finish_sign_in("ada", state, "wrong")
    await toolbox.close()


async def test_the_loopback_address_takes_the_code() -> None:
    async with listen_for_code() as callback, httpx.AsyncClient(trust_env=False) as browser:
        waiting = asyncio.create_task(callback.wait())
        assert (await browser.get(callback.redirect_uri.replace("callback", "other?state=1"))).status_code == 404
        assert (await browser.get(f"{callback.redirect_uri}?state=abc&code=def")).status_code == 200
        assert await waiting == {"state": "abc", "code": "def"}
