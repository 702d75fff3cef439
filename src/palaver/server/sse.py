"""Server-sent events, and what every streamed answer needs: it waits for its first chunk, it is closed at once when the
client disconnects, and its comments tell the progress while its model is loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.reply_stream import ReplyRequest
from palaver.errors import ModelNotOffered, ShuttingDown
from palaver.server.errors import ClientDisconnected, error_response, error_status, log_unexpected, speaks_anthropic

if TYPE_CHECKING:
    from palaver.server.state import ServerState

T = TypeVar("T")
FIRST_SECONDS = 0.5
"""How long a stream waits for the first output of the engine before it sends its status, so that errors of the
request have a status of their own."""
GRAMMAR_SECONDS = 5.0
"""The same for a request with a grammar, which takes time to compile and is refused most often."""

KEEP_ALIVE_SECONDS = 15.0
"""After so long without a chunk a comment is sent, so that no proxy closes the connection."""
KEEP_ALIVE = b": still here\n\n"
COMMENT_SECONDS = 0.25
"""How often a stream looks for a new comment while it waits for a chunk."""
STATUS_SECONDS = 2.0
"""How long a load has before the stream begins: one that fails until then is answered with a status of its own."""
MAX_PENDING_BYTES = 64 << 10
SEND_CHUNK = "send_chunk"
"""The connection's own `send` in the state of a request's scope. The layers between it and a response handle only the
start and the end of the response: its chunks bypass them."""


def encode_sse(data: bytes, *, event: str = "", id: int | None = None) -> bytes:
    """`data` is JSON without line breaks."""
    if id is None and not event:
        return b"data: %b\n\n" % data
    head = f"id: {id}\n" if id is not None else ""
    if event:
        head += f"event: {event}\n"
    return b"%bdata: %b\n\n" % (head.encode(), data)


def encode_json(value: Mapping[str, Any], event: str = "") -> bytes:
    """The value as an event. A lone surrogate, which JSON bodies can't contain, is replaced."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return encode_sse(data.encode("utf-8", "replace"), event=event)


class EventStream(Response):
    """Sends the chunks as they come, and closes their generator at once when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        headers: Mapping[str, str] | None = None,
        on_disconnect: Callable[[], None] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        """`on_disconnect` is called if the client disconnects early; `keep_alive` is sent when no chunks come."""
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._on_disconnect = on_disconnect
        self._keep_alive = keep_alive
        self._sent = False
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(scope.get("state", {}).get(SEND_CHUNK, send)))
        disconnected = asyncio.create_task(wait_disconnected(receive))
        try:
            while not sending.done() and not disconnected.done():
                self._sent = False
                await asyncio.wait(
                    {sending, disconnected}, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not self._sent and not sending.done() and not disconnected.done():
                    await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
        finally:
            cut = not sending.done()
            if cut and self._on_disconnect is not None:
                self._on_disconnect()
            await _cancel(disconnected)
            await _cancel(sending)
            await self._chunks.aclose()
        if not cut:
            sending.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The chunks, for another stream that sends them. Closing it early is a disconnect."""
        complete = False
        try:
            async for chunk in self._chunks:
                yield chunk
            complete = True
        finally:
            if not complete and self._on_disconnect is not None:
                self._on_disconnect()
            await self._chunks.aclose()

    def add_comments(self, describe: Callable[[], str]) -> None:
        """Sends comments while no chunk comes: each new text that `describe` returns."""
        self._chunks = _with_comments(self._chunks, describe)

    async def _send(self, send: Send) -> None:
        async with aclosing(ChunkJoiner(self._chunks)) as batches:
            async for batch in batches:
                self._sent = True
                await send({"type": "http.response.body", "body": batch, "more_body": True})


async def _with_comments(chunks: AsyncGenerator[bytes], describe: Callable[[], str]) -> AsyncGenerator[bytes]:
    sent = ""
    upcoming = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=COMMENT_SECONDS)
            if upcoming.done():
                try:
                    chunk = upcoming.result()
                except StopAsyncIteration:
                    return
                yield chunk
                upcoming = asyncio.ensure_future(anext(chunks))
            elif (text := " ".join(describe().split())) not in ("", sent):
                sent = text
                yield f": {text}\n\n".encode()
    finally:
        await close_stream(upcoming, chunks)


class ChunkJoiner:
    """Iterates over the chunks, joined where several are ready at the same time, as the tokens of one engine step are.

    A write costs the server and its client more than the encoding of a chunk. No chunk waits for the next one. The
    generator is not read ahead while a batch is sent, and a batch has at most `MAX_PENDING_BYTES` and one chunk.
    """

    def __init__(self, chunks: AsyncGenerator[bytes]) -> None:
        self._chunks = chunks
        self._waiting: _NextChunk | None = None
        self._error: Exception | None = None

    def __aiter__(self) -> ChunkJoiner:
        return self

    async def __anext__(self) -> bytes:
        """Raises the error of the chunks' generator after the chunks before it."""
        if self._error is not None:
            raise self._error
        pending = [] if self._waiting is None else [await self._wait(self._waiting)]
        size = sum(map(len, pending))
        while size <= MAX_PENDING_BYTES:
            upcoming = _NextChunk(self._chunks)
            try:
                chunk = upcoming.begin()
                if chunk is None:
                    self._waiting = upcoming
                    if pending:
                        break
                    chunk = await self._wait(upcoming)
            except Exception as error:
                if not pending:
                    raise
                self._error = error
                break
            pending.append(chunk)
            size += len(chunk)
        return b"".join(pending)

    def _wait(self, upcoming: _NextChunk) -> _NextChunk:
        self._waiting = None
        return upcoming

    async def aclose(self) -> None:
        """Stops reading. The generator itself is closed by its owner."""
        if self._waiting is not None:
            with suppress(asyncio.CancelledError, Exception):
                await self._waiting.cancel()


class _NextChunk:
    """A call of `anext` that is begun without waiting, and awaited if it has to wait."""

    def __init__(self, chunks: AsyncGenerator[bytes]) -> None:
        self._call: Any = anext(chunks)
        self._begun_with: Any = None
        """The future that the call waits for, until it is awaited."""
        self._awaited = False

    def begin(self) -> bytes | None:
        """The chunk; None if the call has to wait for it. Raises the error of the generator."""
        try:
            self._begun_with = self._call.send(None)
        except StopIteration as ready:
            return cast("bytes", ready.value)
        return None

    def cancel(self) -> _NextChunk:
        """To be awaited: the generator may wait before it ends."""
        self._begun_with = self._call.throw(asyncio.CancelledError())
        return self

    def __await__(self) -> Generator[Any, None, bytes]:
        return cast("Generator[Any, None, bytes]", self)

    def __iter__(self) -> _NextChunk:
        return self

    def __next__(self) -> Any:
        if self._awaited:
            return self._call.send(None)
        self._awaited = True
        return self._begun_with

    def throw(self, *error: Any) -> Any:
        return self._call.throw(*error)


async def wait_disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def first_seconds(request: ReplyRequest) -> float:
    """How long the answer to this request waits for its first chunk. A long prompt must not delay the opening chunk."""
    constrained = request.sampling.constraint is not None or bool(request.options.must_call)
    return GRAMMAR_SECONDS if constrained else FIRST_SECONDS


async def run_while_connected(request: Request, work: Awaitable[T], closing: asyncio.Event | None = None) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels it and raises ClientDisconnected.

    With `closing`, the work is also cancelled when the server shuts down, with ShuttingDown.
    """
    working = asyncio.ensure_future(work)
    disconnected = asyncio.create_task(wait_disconnected(request.receive))
    shutdown = asyncio.create_task((closing or asyncio.Event()).wait())
    try:
        await asyncio.wait({working, disconnected, shutdown}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected if disconnected.done() else ShuttingDown
    finally:
        for task in (working, disconnected, shutdown):
            task.cancel()
        await asyncio.gather(working, disconnected, shutdown, return_exceptions=True)


async def first_chunk(
    request: Request, stream: AsyncGenerator[T], seconds: float = GRAMMAR_SECONDS
) -> asyncio.Future[T]:
    """A future of the first chunk; it is done unless that takes longer than `seconds`. Raises the stream's error."""
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
    """Closes a stream whose first chunk may still be awaited."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()


async def with_first(first: asyncio.Future[T], stream: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The stream with its first chunk, which `first_chunk` took from it. Closing it closes the stream."""
    try:
        try:
            yield await first
        except StopAsyncIteration:
            return
        async for chunk in stream:
            yield chunk
    finally:
        await close_stream(first, stream)


@asynccontextmanager
async def close_on_failure(stream: AsyncGenerator[Any]) -> AsyncIterator[None]:
    """Closes the stream if the block fails before the answer has begun, also because the client disconnects."""
    try:
        yield
    except BaseException:
        await stream.aclose()
        raise


async def _cancel(task: asyncio.Task[None]) -> None:
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


async def answer_while_loading(
    request: Request,
    state: ServerState,
    name: str | None,
    is_streamed: bool | None,
    answer: Coroutine[Any, Any, Response],
) -> Response:
    """The answer to a request. If it is a stream and the model of that name is not loaded, comments such as
    `: loading sprout 40%` come before its chunks."""
    card = _loading_card(state, name) if is_streamed else None
    if card is None:
        return await answer
    answering = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({answering}, timeout=STATUS_SECONDS)
    except asyncio.CancelledError:
        answering.cancel()
        raise
    response = answering.result() if answering.done() else EventStream(_later_chunks(request, answering))
    if isinstance(response, EventStream):
        response.add_comments(_describe_load(state, card.name))
    return response


def _loading_card(state: ServerState, name: str | None) -> ModelCard | None:
    """None for a model that is ready, or that is not offered."""
    models, name = state.service.models, state.model_name(name)
    with suppress(ModelNotOffered):
        return None if models.is_ready(name) else models.card(name)
    return None


def _describe_load(state: ServerState, name: str) -> Callable[[], str]:
    def describe() -> str:
        card = _loading_card(state, name)
        if card is None or card.state is not ModelState.LOADING:
            return ""
        progress = "" if card.progress is None else f" {card.progress:.0%}"
        return f"loading {card.name}{progress}{f' ({card.note})' if card.note else ''}"

    return describe


async def _later_chunks(request: Request, answering: asyncio.Future[Response]) -> AsyncGenerator[bytes]:
    """The chunks of an answer that comes later. The status is sent by then: an error is an event."""
    try:
        response = await answering
    except ClientDisconnected:
        return
    except Exception as error:
        log_unexpected(error)
        yield _encode_error(error, request.scope)
        return
    assert isinstance(response, EventStream)
    async with aclosing(response.chunks()) as chunks:
        async for chunk in chunks:
            yield chunk


def _encode_error(error: Exception, scope: Scope) -> bytes:
    value = error_response(error, scope).value
    if speaks_anthropic(scope):
        return encode_json(value, "error")
    if scope["path"].endswith("/v1/responses"):
        inner = {"code": error_status(error).code, "message": value["error"]["message"], "param": None}
        return encode_json({"type": "error", **inner, "sequence_number": 0}, "error")
    return encode_json(value) + encode_sse(b"[DONE]")
