"""A client of the socket, as tests speak through it."""

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
from tests.chat.making import WAVE, Stage, staged
from tests.client.live import TOKEN, listening
from tests.scripted_engine import Script, ScriptedEngine

SECONDS = 60
SUM = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0}


class Talk:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, **fields: Any) -> None:
        await self.socket.send(json.dumps(fields))

    async def next(self, seconds: float = SECONDS) -> dict[str, Any]:
        text = await asyncio.wait_for(self.socket.recv(), seconds)
        assert isinstance(text, str)
        value: dict[str, Any] = json.loads(text)
        return value

    async def told(self, count: int) -> list[dict[str, Any]]:
        return [await self.next() for _ in range(count)]

    async def rest(self, seconds: float = SECONDS) -> list[dict[str, Any]]:
        """All that comes, up to the end of a turn or an error; `seconds` may pass before the first of it."""
        found = [await self.next(seconds)]
        while found[-1]["type"] not in ("done", "error"):
            found.append(await self.next())
        return found

    async def ask(self, **fields: Any) -> list[dict[str, Any]]:
        await self.send(**fields)
        return await self.rest()

    async def refused(self, **fields: Any) -> str:
        """The sentence with which something is refused."""
        (told,) = await self.ask(**fields)
        assert told["type"] == "error"
        sentence: str = told["error"]
        return sentence

    def cut(self) -> None:
        """The line is cut: nobody says goodbye."""
        self.socket.transport.abort()

    async def ended(self) -> tuple[int | None, str | None]:
        """How the server closed the socket."""
        await asyncio.wait_for(self.socket.wait_closed(), SECONDS)
        return self.socket.close_code, self.socket.close_reason


@asynccontextmanager
async def talking(url: str, **options: Any) -> AsyncIterator[Talk]:
    address = url.replace("http", "ws", 1) + "/ws/chat"
    async with connect(address, max_size=None, proxy=None, compression=None, **options) as socket:
        yield Talk(socket)


@dataclass
class Scene:
    """A server whose model says what its scripts say."""

    stage: Stage
    server: Server
    url: str

    @property
    def engine(self) -> ScriptedEngine:
        engine = self.stage.service.models.current().engine
        assert isinstance(engine, ScriptedEngine)
        return engine

    async def until_free(self) -> None:
        """Until no reply is in the making."""
        async with asyncio.timeout(SECONDS):
            while len(self.server.state.floor):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def scene(
    folder: Path, scripts: Sequence[Script] = (WAVE,), held: bool = False, context: int = 4096, **limits: Any
) -> AsyncIterator[Scene]:
    settings = ServerSettings(limits=ServerLimits(**limits), secret=TOKEN)
    async with staged(folder, scripts, held=held, context=context) as stage:
        await stage.chat.ready()
        server = Server(stage.service, settings)
        async with listening(server) as url:
            yield Scene(stage, server, url)


def texts(told: Sequence[dict[str, Any]], name: str = "text_delta") -> str:
    return "".join(message.get(name, "") for message in told if message["type"] == "chunk")
