"""A WebSocket client for tests, and a server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from palaver.server.app import Server
from palaver.server.settings import ServerLimits, ServerSettings
from tests.chat.scripted_service import WAVE, Stage, open_stage
from tests.client.live import TOKEN, listening
from tests.scripted_engine import Script, ScriptedEngine

SECONDS = 60
SUM = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0}


class SocketClient:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, **fields: Any) -> None:
        await self.socket.send(json.dumps(fields))

    async def receive(self, seconds: float = SECONDS) -> dict[str, Any]:
        text = await asyncio.wait_for(self.socket.recv(), seconds)
        assert isinstance(text, str)
        value: dict[str, Any] = json.loads(text)
        return value

    async def receive_many(self, count: int) -> list[dict[str, Any]]:
        return [await self.receive() for _ in range(count)]

    async def receive_turn(self, seconds: float = SECONDS) -> list[dict[str, Any]]:
        """The messages up to the end of the turn or an error; the first may take `seconds`."""
        received = [await self.receive(seconds)]
        while received[-1]["type"] not in ("done", "error"):
            received.append(await self.receive())
        return received

    async def request(self, **fields: Any) -> list[dict[str, Any]]:
        await self.send(**fields)
        return await self.receive_turn()

    async def expect_error(self, **fields: Any) -> str:
        """The error's text."""
        (message,) = await self.request(**fields)
        assert message["type"] == "error"
        text: str = message["error"]
        return text

    def abort(self) -> None:
        """Drops the connection without a close frame."""
        self.socket.transport.abort()

    async def wait_closed(self) -> tuple[int | None, str | None]:
        """The code and reason with which the server closed the socket."""
        await asyncio.wait_for(self.socket.wait_closed(), SECONDS)
        return self.socket.close_code, self.socket.close_reason


@asynccontextmanager
async def connect_client(url: str, **options: Any) -> AsyncIterator[SocketClient]:
    address = url.replace("http", "ws", 1) + "/ws/chat"
    known: dict[str, Any] = {"max_size": None, "proxy": None, "compression": None, "open_timeout": SECONDS}
    async with connect(address, **known, **options) as socket:
        yield SocketClient(socket)


@dataclass
class ScriptedServer:
    """A server whose engine replays scripts."""

    stage: Stage
    server: Server
    url: str

    @property
    def engine(self) -> ScriptedEngine:
        engine = self.stage.service.models.engine()
        assert isinstance(engine, ScriptedEngine)
        return engine

    async def wait_idle(self) -> None:
        """Waits until no reply is running."""
        async with asyncio.timeout(SECONDS):
            while len(self.server.state.limiter):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def scripted_server(
    folder: Path, scripts: Sequence[Script] = (WAVE,), held: bool = False, context: int = 4096, **limits: Any
) -> AsyncIterator[ScriptedServer]:
    settings = ServerSettings(limits=ServerLimits(**limits), secret=TOKEN)
    async with open_stage(folder, scripts, held=held, context=context) as stage:
        await stage.chat.wait_until_ready()
        server = Server(stage.service, settings)
        async with listening(server) as url:
            yield ScriptedServer(stage, server, url)


def texts(received: Sequence[dict[str, Any]], name: str = "text_delta") -> str:
    return "".join(message.get(name, "") for message in received if message["type"] == "chunk")
