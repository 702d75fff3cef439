"""The limits of the server, in the order in which a request meets them: the size and time of its headers, its rate,
the size, time and nesting of its body, and the number of replies that run at the same time."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from palaver.errors import QueueFull, ShuttingDown
from palaver.server.errors import ClientDisconnected, NotJson, TooLarge, TooMany, TooSlow
from palaver.server.settings import ServerLimits
from palaver.store.users import RateLimits

LINGER_SECONDS = 2.0
"""How long further input is discarded after a refusal: if the connection closed at once, the client's system might
drop the answer."""
_FORGET_SECONDS = 600.0
_JSON_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}:,]', re.DOTALL)
_MANY_QUOTES = 200_000
"""From so many quotes on a pattern is faster than splitting the body at them."""
_SUSPECT = (b"\\ud", b"\\uD", b"NaN", b"Infinity")
"""Every lone surrogate, and every number that JSON does not have, contains one of these. They are searched as plain
strings, because a pattern would hold the GIL for the whole of a large body."""


class HeadersTooLarge(Exception):
    """Ends the parsing of a request."""


def limited_protocol(limits: ServerLimits) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn that enforces the limits of a request's headers.

    Without it a client could hold connections for ever by sending nothing, or its headers byte by byte.
    """

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _partial_head = 0
        """Bytes of headers that are not complete yet."""
        _in_body = False
        _head_size = 0
        """Bytes of the request line, headers and trailers of the current request."""
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            in_body = self._in_body
            super().data_received(data)
            if self._refused:
                return
            if not self._is_idle:
                self._stop_timer()
                return
            self._partial_head += 0 if in_body or self._in_body else len(data)
            if self._partial_head > limits.head_bytes:
                self._refuse_headers()
            else:
                self._start_timer()

        def on_message_begin(self) -> None:
            self._head_size = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count_head(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count_head(len(name) + len(value) + len(b": \r\n"))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Called by uvicorn for a request that it cannot parse."""
            if self._head_size > limits.head_bytes:
                self._refuse_headers()
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, msg)

        def _count_head(self, size: int) -> None:
            self._head_size += size
            if self._head_size > limits.head_bytes:
                raise HeadersTooLarge

        def _refuse_headers(self) -> None:
            message = f"The request's headers are larger than {limits.head_bytes} bytes."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

        @property
        def _is_idle(self) -> bool:
            """Whether no request is being answered."""
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return False
            return self.cycle is None or self.cycle.response_complete

        def _start_timer(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(limits.head_seconds, self._on_timeout)

        def _stop_timer(self) -> None:
            self._partial_head = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timeout(self) -> None:
            self._timer = None
            if self._is_idle and self._partial_head:
                message = f"The request's headers did not arrive within {limits.head_seconds:g} s."
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)
            elif self._is_idle:  # no data, or only the rest of a request that was answered
                self.transport.close()

        def _refuse(self, status: HTTPStatus, message: str) -> None:
            self._stop_timer()
            self._refused = True
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    return Connection


class RateLimiter:
    """A token bucket for each caller, which refills within a minute and is shared by all servers on the store."""

    def __init__(self, per_minute: int, buckets: RateLimits) -> None:
        self._per_minute = per_minute
        self._buckets = buckets
        self._swept = time.monotonic()

    async def acquire(self, caller: str) -> None:
        """Raises TooMany."""
        if not self._per_minute:
            return
        seconds = await asyncio.to_thread(self._buckets.acquire, caller, self._per_minute)
        if seconds:
            wait = math.ceil(seconds)
            raise TooMany(f"More than {self._per_minute} requests a minute: try again in {wait} s.", wait)
        if time.monotonic() - self._swept > _FORGET_SECONDS:
            self._swept = time.monotonic()
            await asyncio.to_thread(self._buckets.forget_full)


async def read_body(receive: Receive, limits: ServerLimits, content_length: bytes | None) -> bytes:
    """Reads the whole body. Raises TooLarge as early as possible, and TooSlow after `body_seconds`."""
    if content_length is not None and content_length.isdigit() and int(content_length) > limits.body_bytes:
        raise TooLarge(limits.body_bytes)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(receive, limits.body_bytes)
    except TimeoutError:
        raise TooSlow(limits.body_seconds) from None


async def _read(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise TooLarge(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def check_json(body: bytes, limits: ServerLimits) -> None:
    """Raises NotJson for a body that is too costly to parse, or has strings that are no text.

    Syntax errors are left to the parser.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise NotJson(f"The body is not UTF-8 (byte {error.start}).") from None
    if _may_exceed(body, limits):
        _check_shape(body, limits)
    if any(part in body for part in _SUSPECT):
        _check_values(body)


def _may_exceed(body: bytes, limits: ServerLimits) -> bool:
    """A fast upper bound, which also counts brackets and commas inside of strings."""
    containers = body.count(b"[") + body.count(b"{")
    min_limit = min(limits.depth, limits.json_containers)
    return containers > min_limit or body.count(b":") > limits.json_names or body.count(b",") > limits.json_values


def _check_shape(body: bytes, limits: ServerLimits) -> None:
    """Checks depth and counts before a parser builds millions of values from a few megabytes."""
    depth = containers = names = values = 0
    shape = _without_strings(body) if body.count(b'"') < _MANY_QUOTES else body
    for token in _JSON_TOKENS.finditer(shape):
        first = shape[token.start()]
        if first in b"[{":
            depth += 1
            containers += 1
            if depth > limits.depth:
                raise NotJson(f"The body is nested deeper than {limits.depth} levels.")
            if containers > limits.json_containers:
                raise NotJson(f"The body has more than {limits.json_containers} objects and arrays.")
        elif first in b"]}":
            depth -= 1
        elif first in b":":
            names += 1
            if names > limits.json_names:
                raise NotJson(f"The objects in the body have more than {limits.json_names} names.")
        elif first in b",":
            values += 1
            if values > limits.json_values:
                raise NotJson(f"The body has more than {limits.json_values} values.")


def _without_strings(body: bytes) -> bytes:
    """The body without its strings. For long strings this is much faster than a pattern, which holds the GIL."""
    return b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def _check_values(body: bytes) -> None:
    def refuse(name: str) -> Any:
        raise NotJson(f"{name} is not a number.")

    try:
        value = json.loads(body, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotJson("A string in the body contains half of a character (a lone surrogate).") from None
    except (ValueError, RecursionError):
        return


def replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body as one message, then the messages after it."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class ConcurrencyLimiter:
    """Limits how many stateless replies run at the same time, and stops them when the server shuts down.

    The last eighth of the places is reserved for owners without a running reply: one owner can't lock out others.
    """

    def __init__(self, max_replies: int) -> None:
        self._at_once = max_replies
        self._reserved = max_replies // 8
        self._running: dict[int, Callable[[], None]] = {}
        self._owners: Counter[str] = Counter()
        self._next_id = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.closing = False

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def acquire(self, owner: str, stop: Callable[[], None], replies: int = 1) -> Iterator[None]:
        """Takes places until the block ends; `stop` may be called to end it early. Raises QueueFull."""
        if self.closing:
            raise ShuttingDown
        limit = self._at_once - (self._reserved if self._owners[owner] else 0)
        if len(self._running) + replies > limit:
            raise QueueFull(len(self._running))
        ids = range(self._next_id, self._next_id + replies)
        self._next_id += replies
        self._running.update(dict.fromkeys(ids, stop))
        self._owners[owner] += replies
        self._empty.clear()
        try:
            yield
        finally:
            for id in ids:
                del self._running[id]
            self._owners[owner] -= replies
            if not self._owners[owner]:
                del self._owners[owner]
            if not self._running:
                self._empty.set()

    async def close(self, grace: float) -> None:
        """Refuses new replies, waits up to `grace` seconds for the running ones, then stops them."""
        self.closing = True
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            for stop in list(self._running.values()):
                stop()
