"""What every streamed or folded answer does: it waits for the first word, and ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request

from palaver.chat.reply_stream import ReplyRequest as Asking
from palaver.errors import ShuttingDown
from palaver.server.openai.choices import ChoiceDelta, CompletionStream
from palaver.server.request_body import ClientDisconnected
from palaver.server.sse import wait_disconnected
from palaver.server.state import ServerState

T = TypeVar("T")
FIRST_SECONDS = 0.5
"""For so long a stream waits for the engine's first word, so that a refusal has a status of its own."""
GRAMMAR_SECONDS = 5.0
"""The same where a grammar is compiled first, which is what engines refuse most."""


def first_seconds(request: Asking) -> float:
    """For how long the answer to a request waits for the first word. A long prompt must not hold back its opening."""
    constrained = request.sampling.constraint is not None or bool(request.options.must_call)
    return GRAMMAR_SECONDS if constrained else FIRST_SECONDS


async def run_while_connected(request: Request, work: Awaitable[T], closing: asyncio.Event | None = None) -> T:
    """The work's result, unless the client leaves before: then Left, and the work is cancelled.

    With `closing`, the work is also cancelled when the server shuts down, with ShuttingDown.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(wait_disconnected(request.receive))
    ending = asyncio.create_task((closing or asyncio.Event()).wait())
    try:
        await asyncio.wait({working, leaving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected if leaving.done() else ShuttingDown
    finally:
        for task in (working, leaving, ending):
            task.cancel()
        await asyncio.gather(working, leaving, ending, return_exceptions=True)


async def first_chunk(
    request: Request, stream: AsyncGenerator[T], seconds: float = GRAMMAR_SECONDS
) -> asyncio.Future[T]:
    """The stream's first word, or its promise where that takes long. Raises what the stream raised instead."""
    first = asyncio.ensure_future(anext(stream))
    try:
        await run_while_connected(request, asyncio.wait({first}, timeout=seconds))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    return first


async def close_stream(first: asyncio.Future[T], stream: AsyncGenerator[T]) -> None:
    """Closes a stream, wherever it is: its first word may still be waited for."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()


@asynccontextmanager
async def close_on_failure(stream: AsyncGenerator[Any]) -> AsyncIterator[None]:
    """What goes wrong before an answer has begun, or a client that leaves, closes the stream it was to be made of."""
    try:
        yield
    except BaseException:
        await stream.aclose()
        raise


async def limited_stream(state: ServerState, speaking: CompletionStream) -> AsyncGenerator[ChoiceDelta]:
    """The stream, while it has the floor."""
    with state.floor.taken(speaking.asked.request.owner, speaking.stop, len(speaking.choices)):
        async with aclosing(speaking.tell()) as stream:
            async for told in stream:
                yield told


async def indexed_stream(
    state: ServerState, speaking: CompletionStream, stream: AsyncGenerator[ChoiceDelta]
) -> AsyncGenerator[ChoiceDelta]:
    """The stream; the tokens of each reply are remembered when it ends, for when its words come back."""
    request = speaking.asked.request
    async with aclosing(stream):
        async for told in stream:
            if told.finished is not None:
                reply = speaking.choices[told.index].utterance.reply()
                state.remembered.keep(request.owner, request.messages, reply.message, reply.token_ids)
            yield told
