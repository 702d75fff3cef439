"""The loop of tool calls over HTTP: the same as in-process, for the owner alone, and for no page of another origin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from palaver.address_guard import AddressGuard
from palaver.chat.interface import Chat, Remember
from palaver.client.http_chat import HttpChat
from palaver.errors import BadParameter
from palaver.store.tool_rounds import CallState, RoundState
from palaver.store.tool_rules import Rule, ToolRule
from palaver.tools.config import BadToolServer, ServerConfig
from palaver.tools.oauth import DONE
from palaver.tools.servers import ToolServerFailed, ToolServerState
from tests.chat.tool_service import ANSWER, approve, next_reply, open_tools, send, wait_for_round
from tests.client.live import served
from tests.tools import misbehaving_server
from tests.tools.oauth_server import serve_oauth


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with open_tools(tmp_path) as service, served(service) as address:
        yield address


@pytest.fixture
async def chat(url: str) -> AsyncIterator[Chat]:
    async with HttpChat(url) as opened:
        yield opened


async def test_a_loop_over_http(chat: Chat) -> None:
    (server,) = await chat.tool_servers()
    assert (server.name, server.state) == ("bad", ToolServerState.READY)
    assert await chat.tool_resources("bad") == ()
    with pytest.raises(ToolServerFailed, match="has no resources"):
        await chat.read_tool_resource("bad", "notes://all")
    reply = await send(chat, ["bad__unchanged"], ["bad__slow"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round, remember=Remember.SERVER))
    second = await next_reply(chat, round)
    async with chat.changes() as changes:
        await wait_for_round(chat, second.id, RoundState.OPEN)
        await chat.stop_reply(second.id)
        async with asyncio.timeout(20):
            while (await anext(changes)).what != "tools":
                pass
    stopped = await wait_for_round(chat, second.id, RoundState.STOPPED)
    assert stopped.calls[0].state in (CallState.INTERRUPTED, CallState.WAITING)
    await chat.decide_calls(second.id, approve(stopped, allowed=False))
    assert (await next_reply(chat, stopped)).text == ANSWER


async def test_remembered_decisions_are_listed_and_taken_back(chat: Chat) -> None:
    reply = await send(chat, ["bad__unchanged", "bad__injection"])
    round = await wait_for_round(chat, reply.id)
    first, second = approve(round)
    decisions = [replace(first, remember=Remember.SERVER), replace(second, allowed=False, remember=Remember.TOOL)]
    await chat.decide_calls(reply.id, decisions)
    await next_reply(chat, round)
    server = ToolRule("bad", Rule.ALWAYS)
    assert await chat.tool_rules() == (server, ToolRule("bad__injection", Rule.NEVER, reply.conversation_id))
    assert await chat.forget_tool_rules("bad__injection", reply.conversation_id) == 1
    assert await chat.tool_rules() == (server,)
    assert await chat.forget_tool_rules("nothing") == 0
    assert await chat.forget_tool_rules() == 1
    assert await chat.tool_rules() == ()
    again = await send(chat, ["bad__unchanged"])
    assert (await wait_for_round(chat, again.id)).calls[0].state is CallState.WAITING


async def test_a_sign_in_over_http_comes_back_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misbehaving_server, "RECORD", os.devnull)
    with serve_oauth() as authorization:
        async with open_tools(tmp_path) as service, served(service) as address:
            service.loop.toolbox.guard = AddressGuard(is_allowed=lambda one: True)
            async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as client:
                added = await client.post("/api/tools", json={"name": "web", "url": authorization.url})
                assert (added.status_code, added.json()["needs_sign_in"]) == (201, True)
                begun = await client.post("/api/tools/sign-in", json={"server": "web"})
                back = authorization.authorize(begun.json()["url"])
                assert back.startswith(f"{address}/api/tools/callback?")
                first = await client.get(back)
                assert "http-equiv" in first.text
                assert not authorization.tokens  # not before the navigation that sends the cookie
                assert DONE in (await client.get(f"{back}&again=true")).text
                assert (await client.get(f"{back}&again=true")).status_code == 400
                (card,) = [one for one in (await client.get("/api/tools")).json() if one["name"] == "web"]
                assert (card["state"], card["needs_sign_in"]) == ("ready", False)
                foreign = {"server": "web", "redirect_uri": "https://evil.example/"}
                assert (await client.post("/api/tools/sign-in", json=foreign)).status_code == 400


async def test_only_urls_of_public_addresses_can_be_added(chat: Chat, url: str) -> None:
    with pytest.raises(BadToolServer, match="only its operator"):
        await chat.add_tool_server(ServerConfig("shell", "sh"))
    with pytest.raises(BadToolServer, match="not a plain http or https URL"):
        await chat.add_tool_server(ServerConfig("odd", url="file:///etc/passwd"))
    card = await chat.add_tool_server(ServerConfig("inside", url=f"{url}/mcp"))
    assert (card.state, card.is_own) == (ToolServerState.FAILED, True)
    assert "not public" in card.error
    await chat.remove_tool_server("inside")
    with pytest.raises(BadToolServer, match="no tool server 'bad' of yours"):
        await chat.remove_tool_server("bad")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        added = await client.post("/api/tools", json={"name": "x", "url": "https://x.example", "command": "sh"})
        assert added.status_code == 400


ROUTES: dict[tuple[str, str], object] = {
    ("GET", "/api/tools"): None,
    ("POST", "/api/tools"): {"name": "x", "url": "https://tools.example/mcp"},
    ("POST", "/api/tools/remove"): {"name": "mine"},
    ("GET", "/api/tools/resources"): None,
    ("POST", "/api/tools/resources/read"): {"server": "mine", "name": "notes://all"},
    ("GET", "/api/turns/{id}/tools"): None,
    ("GET", "/api/tools/rules"): None,
    ("DELETE", "/api/tools/rules"): None,
    ("POST", "/api/tools/sign-in"): {"server": "mine"},
    ("POST", "/api/tools/sign-in/finish"): {"state": "x", "code": "y"},
    ("POST", "/api/turns/{id}/tools"): {"decisions": [{"position": 0, "allowed": True}]},
}
"""All routes of tools, with a body that each accepts."""
OF_TURNS = {("POST", f"/api/turns/{{id}}/{what}"): None for what in ("stop", "continue")}


async def test_no_other_user_and_no_other_origin_reaches_the_calls(tmp_path: Path) -> None:
    async with open_tools(tmp_path) as service, served(service) as url:
        owner, other = service.store.users.ensure().id, service.store.users.ensure("stranger").id
        toolbox = service.loop.toolbox
        toolbox.operator = replace(toolbox.operator, only_for=owner)
        toolbox.guard = AddressGuard(resolve=lambda host, port: ())
        toolbox.add(owner, ServerConfig("mine", url="https://tools.example/mcp", headers={"Authorization": "secret"}))
        lent = await toolbox.lend(owner, ServerConfig("lent", url="https://lent.example/mcp"))
        key = service.store.keys.add(other)[1]
        stranger = {"Authorization": f"Bearer {key}"}
        async with (
            HttpChat(url) as chat,
            HttpChat(url, key) as other_chat,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            paths = (await client.get("/openapi.json")).json()["paths"]
            found = {(method.upper(), path) for path, methods in paths.items() for method in methods if "tools" in path}
            assert found == set(ROUTES)
            reply = await send(chat, ["bad__unchanged"])
            round = await wait_for_round(chat, reply.id)
            with pytest.raises(BadParameter, match="position"):
                await chat.decide_calls(reply.id, [approve(round)[0].__class__(-1, True)])
            for (method, path), body in (ROUTES | OF_TURNS).items():
                path = path.format(id=reply.id) + ("?server=mine" if path.endswith("resources") else "")
                foreign = await client.request(method, path, json=body, headers={"Origin": "https://evil.example"})
                assert foreign.status_code == 403, path
                assert "access-control-allow-origin" not in foreign.headers
                answer = await client.request(method, path, json=body, headers=stranger)
                if "resources" in path:
                    assert "no tool server" in answer.text
                    continue
                if "turns" in path:
                    assert answer.status_code == 404, path
                assert "mine" not in answer.text.replace("'mine' of yours", "")
                assert "secret" not in answer.text
            for name in ("bad", "mine", lent):
                with pytest.raises(BadToolServer, match="no tool server"):
                    await send(other_chat, ["bad__unchanged"], tool_servers=[name])
                body = {"input": "[]", "tools": [{"type": "mcp", "server_label": name}], "model": "calling"}
                refused = await client.post("/v1/responses", json=body, headers=stranger)
                assert "no tool server" in refused.text
        assert service.store.tool_rounds.get(reply.id) == round
        assert toolbox.names(owner) == ("bad", "mine")
        assert toolbox.names(other) == ("x",)
