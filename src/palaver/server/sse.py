"""Server-sent events: one owner of the stream, who closes it when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

QUIET_SECONDS = 15.0
"""After so long without a word a comment is sent, so that nobody on the way takes the stream for dead."""
COMMENT = b": still here\n\n"
MAX_WAITING = 64 << 10


class EventStream(Response):
    """Sends the pieces as they come. Whatever they hold on to is let go of at once when the client is gone."""

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        headers: Mapping[str, str] | None = None,
        on_leave: Callable[[], None] | None = None,
        quiet: bytes = COMMENT,
    ) -> None:
        """`on_leave` is called when the client went before the end; `quiet` is sent while nothing happens."""
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._on_leave = on_leave
        self._quiet = quiet
        self._sent = False
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(wait_disconnected(receive))
        try:
            while not sending.done() and not leaving.done():
                self._sent = False
                await asyncio.wait({sending, leaving}, timeout=QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not self._sent and not sending.done() and not leaving.done():
                    await send({"type": "http.response.body", "body": self._quiet, "more_body": True})
        finally:
            left = not sending.done()
            if left and self._on_leave is not None:
                self._on_leave()
            await _ended(leaving)
            await _ended(sending)
            await self._pieces.aclose()
        if not left:
            sending.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        async with aclosing(joined(self._pieces)) as batches:
            async for batch in batches:
                self._sent = True
                await send({"type": "http.response.body", "body": batch, "more_body": True})


async def joined(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The pieces, joined where several are ready at once, as the tokens of one engine frame are.

    A write costs the server and its reader more than the making of a piece, and a piece never waits for the next one.
    While the reader is slow no more than `MAX_WAITING` bytes, and one piece, are taken.
    """
    waiting: list[bytes] = []
    ready, taken = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async for piece in pieces:
            waiting.append(piece)
            ready.set()
            if sum(map(len, waiting)) > MAX_WAITING:
                taken.clear()
                await taken.wait()

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: ready.set())
    try:
        while waiting or not reading.done():
            await ready.wait()
            ready.clear()
            if waiting:
                batch = b"".join(waiting)
                waiting.clear()
                taken.set()
                yield batch
        reading.result()
    finally:
        await _ended(reading)


async def wait_disconnected(receive: Receive) -> None:
    """Ends when the client is no longer there."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: asyncio.Task[None]) -> None:
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
