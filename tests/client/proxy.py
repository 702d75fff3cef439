"""A proxy in front of a server that cuts connections on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class CuttingProxy:
    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self._to = (parts.hostname, parts.port)
        self.allowance: Callable[[bytes], int | None] = lambda request: None
        """How many bytes of the answer to a request get through before the line is cut; None: all."""
        self.cuts = 0
        self.requests: list[bytes] = []
        self.down = False
        """Whether all connections are refused."""
        self._open: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server
        self.url = ""

    async def start(self) -> None:
        self._listening = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._listening.close()
        self.cut()
        await self._listening.wait_closed()

    def cut(self) -> None:
        """Every connection at once."""
        for writer in list(self._open):
            writer.transport.abort()
        self.cuts += bool(self._open)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            there, back = await asyncio.open_connection(*self._to)
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._exchange(reader, writer, there, back)
            back.transport.abort()
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> None:
        left: int | None = None

        async def asked() -> None:
            nonlocal left
            while chunk := await reader.read(65536):
                self.requests.append(chunk)
                left = self.allowance(chunk)
                back.write(chunk)

        async def answered() -> None:
            nonlocal left
            while chunk := await there.read(65536):
                if left is not None and len(chunk) >= left:
                    writer.write(chunk[:left])
                    await writer.drain()
                    self.cuts += 1
                    return
                left = None if left is None else left - len(chunk)
                writer.write(chunk)
                await writer.drain()

        tasks = [asyncio.create_task(asked()), asyncio.create_task(answered())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()


@asynccontextmanager
async def line_to(server: str) -> AsyncIterator[CuttingProxy]:
    line = CuttingProxy(server)
    await line.start()
    try:
        yield line
    finally:
        await line.close()
