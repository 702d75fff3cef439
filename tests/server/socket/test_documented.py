"""Every example in `docs/ws-chat.md` works as it is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.live_server import LiveServer
from tests.server.socket.client import SocketClient, connect_client

DOCUMENT = Path(__file__).parents[3] / "docs" / "ws-chat.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
EXCHANGES = [text.splitlines() for kind, text in BLOCKS if not kind]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
VARYING = ("conversation", "reply", "turn_id", "cached_tokens", "audio_data")
"""Fields that differ from run to run, or with earlier requests."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("documented")) as server:
        yield server


class ExchangeReplay:
    """Replays one documented exchange."""

    def __init__(self, client: SocketClient) -> None:
        self.client = client
        self.last: dict[str, Any] = {}
        self.turn = ""
        self.stopped = False

    async def send(self, text: str) -> None:
        if '"turn_id"' in text:
            text = re.sub(r'"turn_id": "[^"]*"', f'"turn_id": "{self.turn}"', text)
        self.stopped = self.stopped or '"stop"' in text
        await self.client.socket.send(text)

    async def read(self, shown: dict[str, Any], skips: bool) -> None:
        self.last = await self.client.receive()
        while skips and (self.last["type"], set(self.last)) != (shown["type"], set(shown)):
            self.last = await self.client.receive()
        self.turn = self.last.get("turn_id", self.turn)
        assert list(self.last) == list(shown), (self.last, shown)
        for name, value in shown.items():
            self.compare(name, value)

    def compare(self, name: str, value: Any) -> None:
        found = self.last[name]
        assert type(found) is type(value), (name, found)
        if name in VARYING or (self.stopped and name in ("text", "generated_tokens", "seq")):
            return
        if isinstance(value, str) and value.endswith("..."):
            assert found.startswith(value.removesuffix("...")), (name, found)
        else:
            assert found == value, (name, found)


@pytest.mark.parametrize("lines", EXCHANGES, ids=range(len(EXCHANGES)))
async def test_an_exchange_goes_as_it_is_shown(live: LiveServer, lines: list[str]) -> None:
    async with AsyncExitStack() as stack:
        reader = ExchangeReplay(await stack.enter_async_context(connect_client(live.url)))
        skips = False
        for line in lines:
            mark, text = line[0], line[2:]
            if mark == ">":
                await reader.send(text)
            elif mark == "-":
                reader.client.abort()
                reader.client = await stack.enter_async_context(connect_client(live.url))
            elif text == "...":
                skips = True
            else:
                await reader.read(json.loads(text), skips)
                skips = False


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_runs(live: LiveServer, program: str) -> None:
    url = live.url.replace("http", "ws", 1) + "/ws/chat"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "URL": url}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "42" in ran.stdout


def test_there_are_examples() -> None:
    assert (len(EXCHANGES), len(PROGRAMS)) == (7, 1)
