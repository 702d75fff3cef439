"""The middleware around all routes: checks headers, key, rate and body, and logs the request at its end.

Plain ASGI, because every chunk of every stream passes it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from palaver.server.auth import Caller, OriginGuard, deny, headers_with_key
from palaver.server.errors import ClientDisconnected, DuplicateHeader, NoKey, error_response, log_unexpected
from palaver.server.limits import RateLimiter, check_json, read_body, replay_body
from palaver.server.settings import ServerLimits
from palaver.server.sse import SEND_CHUNK
from palaver.server.state import ServerState
from palaver.store.records import new_id

_REQUEST_ID = re.compile(r"[\w.:-]{1,100}")
_BODY_METHODS = ("POST", "PUT", "PATCH", "DELETE")
_SINGLE_HEADERS = frozenset({b"host", b"origin", b"authorization", b"x-api-key", b"api-key", b"content-length"})
_SMALL_BODY = 64 << 10
"""A body up to this size is checked in the event loop, which is faster than a thread."""
_LARGE_BODY = 1 << 20
"""After a request with a larger body, unused memory is returned to the system."""
_MAX_LOGGED_PATH = 200
_SHARE_LINK = re.compile(r"^(.*/share/).*", re.DOTALL)
_SECRET_FIELDS = frozenset({"headers", "authorization", "server_url"})
_CORS_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_CORS_HEADERS = (
    "authorization content-type x-api-key last-event-id x-conversation idempotency-key anthropic-version "
    "anthropic-beta anthropic-dangerous-direct-browser-access".split()
)
_CORS_EXPOSED = ("x-request-id", "request-id", "x-conversation", "retry-after")


class AccessLog:
    """One line for each request: caller, path, status and time."""

    def __init__(self, debug: bool = False) -> None:
        """`debug`: whether request bodies are logged."""
        self._debug = debug
        self._access = logging.getLogger("palaver.access")
        self._bodies = logging.getLogger("palaver.debug")

    def log(self, id: str, caller: Caller | None, method: str, path: str, status: int, seconds: float) -> None:
        path = _SHARE_LINK.sub(r"\1<redacted>", path)
        printable = "".join(letter if letter.isprintable() else "�" for letter in path[:_MAX_LOGGED_PATH])
        name = caller.name if caller is not None else "-"
        self._access.info("%s %s %s %s %d %.0f ms", id, name, method, printable, status, seconds * 1000)

    def log_body(self, id: str, body: bytes) -> None:
        if self._debug:
            self._bodies.debug("%s asks %s", id, without_secrets(body))


def without_secrets(body: bytes) -> str:
    """The body for the log, without the headers and tokens for tool servers."""
    text = body.decode("utf-8", "replace")
    if not any(f'"{name}"' in text for name in _SECRET_FIELDS):
        return text
    try:
        return json.dumps(_redact(json.loads(text)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return f"[{len(body)} bytes that are not JSON]"


def _redact(value: Any) -> Any:
    match value:
        case dict():
            return {name: "<redacted>" if name in _SECRET_FIELDS else _redact(one) for name, one in value.items()}
        case list():
            return [_redact(one) for one in value]
        case _:
            return value


class ProtectionMiddleware:
    def __init__(self, app: ASGIApp, state: ServerState, is_public: Callable[[str], bool]) -> None:
        """`is_public` decides which paths, without the prefix, need no key."""
        settings = state.settings
        self.app = app
        self.settings = settings
        self.access_log = AccessLog(settings.debug)
        self.metrics = state.metrics
        self.workers = state.workers
        self.origin_guard = OriginGuard(settings)
        self.cors = CORSMiddleware(
            app,
            allow_origins=self.origin_guard.origins,
            allow_methods=_CORS_METHODS,
            allow_headers=_CORS_HEADERS,
            expose_headers=_CORS_EXPOSED,
        )
        """Used by `_RequestCycle` after the guard: by itself it would answer a preflight before the Host is checked."""
        self._authenticator = state.authenticator
        self._is_public = is_public
        self._rate_limiter = RateLimiter(settings.limits.requests_per_minute, state.service.store.rate_limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope = self._prepare(scope)
        if scope["type"] == "websocket":
            await self._socket(scope, headers, receive, send)
        else:
            await _RequestCycle(self, scope, headers, receive, send).run()

    def _prepare(self, scope: Scope) -> Scope:
        """The scope with a request id and with the proxy's prefix in its path, whether the proxy removed it or not."""
        prefix = self.settings.prefix
        state = {**scope.get("state", {}), "request_id": _request_id(dict(scope["headers"]))}
        if not prefix:
            return {**scope, "state": state}
        path: str = scope["path"]
        inside = path.removeprefix(prefix) if path == prefix or path.startswith(prefix + "/") else path
        return {**scope, "state": state, "root_path": prefix, "path": prefix + (inside or "/")}

    async def admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Sets the caller, and raises an error for one without access. On a public path the caller may be None."""
        self.check(scope, headers)
        try:
            scope["state"]["caller"] = caller = await self._authenticator.find(headers)
        except NoKey:
            if not self._is_public(scope["path"].removeprefix(self.settings.prefix)):
                raise
            scope["state"]["caller"] = None
            await self._rate_limiter.acquire((scope.get("client") or ("unknown",))[0])
        else:
            await self._rate_limiter.acquire(caller.owner_id)

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises DuplicateHeader, or ForeignCaller."""
        names = [name for name, _ in scope["headers"] if name in _SINGLE_HEADERS]
        if len(names) > len(set(names)):
            raise DuplicateHeader(next(name for name in names if names.count(name) > 1).decode())
        self.origin_guard.check(headers)

    async def _socket(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        """Makes the same checks as for a request. The state's `admit` repeats them for each turn of a socket."""
        started, status = time.monotonic(), 101
        headers = headers_with_key(headers, scope.get("subprotocols", ()))
        try:
            await self.admit(scope, headers)
            scope["state"]["admit"] = partial(self.admit, scope, headers)
        except Exception as error:
            log_unexpected(error)
            status = await deny(WebSocket(scope, receive, send), error)
        else:
            await self.app(scope, receive, send)
        finally:
            caller, path = scope["state"].get("caller"), unquote(scope["path"])
            id = scope["state"]["request_id"]
            self.access_log.log(id, caller, "SOCKET", path, status, time.monotonic() - started)
            self.metrics.count_request(status)


class _RequestCycle:
    """One request and its response."""

    def __init__(
        self,
        middleware: ProtectionMiddleware,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        send: Send,
    ) -> None:
        self._middleware = middleware
        self._scope = scope
        self._headers = headers
        self._receive = receive
        self._raw_send = send
        self._id: str = scope["state"]["request_id"]
        self._started = time.monotonic()
        self._status = 0
        self._complete = False
        self._is_large = False
        scope["state"][SEND_CHUNK] = send

    async def run(self) -> None:
        try:
            await self._answer()
        except ClientDisconnected:
            self._status = self._status or 499
        except Exception as error:
            log_unexpected(error)
            if not self._status:
                await self._refuse(error)
            elif not self._complete:  # the connection must close without an end
                raise
        finally:
            caller = self._scope["state"].get("caller")
            seconds = time.monotonic() - self._started
            path = unquote(self._scope["path"])
            self._middleware.access_log.log(self._id, caller, self._scope["method"], path, self._status, seconds)
            self._middleware.metrics.count_request(self._status)
            if self._is_large:
                self._middleware.workers.trim()

    async def _answer(self) -> None:
        preflight = {b"origin", b"access-control-request-method"} <= self._headers.keys()
        if self._scope["method"] == "OPTIONS" and preflight:
            self._middleware.check(self._scope, self._headers)
            response = self._middleware.cors.preflight_response(Headers(scope=self._scope))
            await response(self._scope, self._receive, self._send)
            return
        await self._middleware.admit(self._scope, self._headers)
        receive = self._receive
        if self._scope["method"] in _BODY_METHODS:
            receive = await self._checked_body()
        await self._middleware.app(self._scope, receive, self._send)

    async def _checked_body(self) -> Receive:
        limits = self._middleware.settings.limits
        body = await read_body(self._receive, limits, self._headers.get(b"content-length"))
        self._is_large = len(body) > _LARGE_BODY
        kind = self._headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if body and (not kind or kind.endswith(b"json")):
            await self._check(body, limits)
        self._middleware.access_log.log_body(self._id, body)
        return replay_body(body, self._receive)

    async def _check(self, body: bytes, limits: ServerLimits) -> None:
        if len(body) <= _SMALL_BODY:
            check_json(body, limits)
        else:
            await self._middleware.workers.run(check_json, body, limits)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            names = (b"x-request-id", b"request-id")  # the names that OpenAI's and Anthropic's clients read
            ids = ((name, self._id.encode()) for name in names)
            message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await self._middleware.cors.send(message, self._raw_send, Headers(scope=self._scope))
            return
        if not message.get("more_body", False):
            self._complete = True
        await self._raw_send(message)

    async def _refuse(self, error: Exception) -> None:
        answer = error_response(error, self._scope)
        body = json.dumps(answer.value).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **answer.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        if answer.status in (408, 413):  # the rest of the body is not wanted
            raw.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": answer.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if answer.status == 413:
            await self._drain()
        await self._send({"type": "http.response.body", "body": b""})

    async def _drain(self) -> None:
        """Reads and discards the rest of a body that is too large.

        A client that is still sending would not see the response of a connection that is closed at once.
        """
        if b"expect" in self._headers:  # the client waits for "100 Continue" before it sends the body
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._middleware.settings.limits.body_seconds):
                while (message := await self._receive())["type"] == "http.request" and message.get("more_body"):
                    pass


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{new_id()}"
