"""A live server on a port of this machine, over a scripted or a real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from palaver.chat.service import Service
from palaver.server.app import Server
from palaver.server.settings import ServerSettings

TOKEN = "the-token-of-the-data-folder"


@asynccontextmanager
async def served(service: Service, settings: ServerSettings | None = None, port: int = 0) -> AsyncIterator[str]:
    """The server's address. Leaving closes it as `palaver serve` does."""
    app = Server(service, settings or ServerSettings(any_model=True, secret=TOKEN))
    async with listening(app, port) as url:
        yield url


@asynccontextmanager
async def listening(app: Server, port: int = 0) -> AsyncIterator[str]:
    config = uvicorn.Config(app.asgi, host="127.0.0.1", port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done(), "the server did not start"
        await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        await app.close(grace=0)
        server.should_exit = True
        await running
