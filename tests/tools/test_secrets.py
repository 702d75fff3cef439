"""The secrets of tool servers are in no log and in no export."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from palaver.store.tool_rounds import RoundState
from palaver.tools.config import ServerConfig
from palaver.tools.servers import ToolServers, ToolServerState
from palaver.tools.transports import ToolLimits
from palaver.transcripts import TranscriptFormat
from tests.chat.tool_service import ANSWER, approve, misbehaving, next_reply, open_tools, send, wait_for_round
from tests.tools.demo_server import free_port, serve_misbehaving

IN_HEADER, IN_ENVIRONMENT, IN_ADDRESS = "secret-of-the-header", "secret-of-the-environment", "secret-of-the-address"
SECRETS = (IN_HEADER, IN_ENVIRONMENT, IN_ADDRESS)


def web(name: str, url: str) -> ServerConfig:
    return ServerConfig(name, url=f"{url}?key={IN_ADDRESS}", headers={"Authorization": f"Bearer {IN_HEADER}"})


def found(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if any(secret in text for secret in SECRETS)]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    formatter = logging.Formatter("%(message)s")  # with tracebacks
    return [formatter.format(record) for record in caplog.records]


async def test_secrets_are_in_no_log_and_no_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bad = replace(misbehaving(tmp_path / "record"), env={"TOKEN": IN_ENVIRONMENT})
    with serve_misbehaving(tmp_path / "web_record") as url:
        async with open_tools(tmp_path, bad, web("web", url)) as service:
            chat = service.chat(service.store.users.ensure().id)
            reply = await send(chat, ["bad__unchanged", "web__unchanged"], tool_servers=["bad", "web"])
            round = await wait_for_round(chat, reply.id)
            await chat.decide_calls(reply.id, approve(round))
            assert (await next_reply(chat, round)).text == ANSWER
            done = await wait_for_round(chat, reply.id, RoundState.DONE)
            assert [call.result for call in done.calls] == ["as always", "as always"]
            exports = [await chat.export_conversation(reply.conversation_id, form) for form in TranscriptFormat]
            cards = await chat.tool_servers()
    assert all("as always" in text for text in exports)
    assert found([*exports, repr(cards), repr(bad), repr(web("web", url))]) == []
    assert any(record.name.startswith("httpx2") for record in caplog.records)
    assert found(logged(caplog)) == []


class Refusing(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        self.send_error(403)

    def log_message(self, *args: object) -> None:
        pass


async def test_secrets_are_in_no_log_of_a_connection_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as site:
        Thread(target=site.serve_forever, daemon=True).start()
        configs = [
            ServerConfig("ends", sys.executable, ("-c", "raise SystemExit(3)"), {"TOKEN": IN_ENVIRONMENT}),
            ServerConfig("gone", "no-such-command", (), {"TOKEN": IN_ENVIRONMENT}),
            web("refuses", f"http://127.0.0.1:{site.server_port}/mcp"),
            web("dead", f"http://127.0.0.1:{free_port()}/mcp"),
        ]
        servers = ToolServers(configs, ToolLimits(connect_seconds=20.0))
        cards = await servers.connect()
        await servers.close()
        site.shutdown()
    assert {card.state for card in cards} == {ToolServerState.FAILED}
    assert Refusing.asked[0] == (f"/mcp?key={IN_ADDRESS}", f"Bearer {IN_HEADER}")
    assert found([repr(cards), *logged(caplog)]) == []
