"""The shell around every route: what comes in is checked here before anything else sees it, and noted at the end.

Plain ASGI, because it stands between the routes and every piece of every stream."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from palaver.server.auth import OriginGuard
from palaver.server.error_responses import error_response
from palaver.server.errors import DuplicateHeader, NoKey, log_unexpected
from palaver.server.limits import RateLimiter
from palaver.server.request_body import ClientDisconnected, check_json, read_body, replay_body
from palaver.server.settings import ServerLimits
from palaver.server.socket.auth import deny, headers_with_key
from palaver.server.state import ServerState
from palaver.store.records import new_id

_REQUEST_ID = re.compile(r"[\w.:-]{1,100}")
_WITH_BODY = ("POST", "PUT", "PATCH", "DELETE")
_SINGLE = frozenset({b"host", b"origin", b"authorization", b"x-api-key", b"api-key", b"content-length"})
_SMALL_BODY = 64 << 10
"""Up to so many bytes a body is checked on the spot, which is quicker than a thread."""
_LARGE_BODY = 1 << 20
"""Beyond so many bytes the memory that a request took is given back after it."""
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE, OPTIONS"),
    (
        b"access-control-allow-headers",
        b"authorization, content-type, x-api-key, last-event-id, x-conversation, idempotency-key, anthropic-version, "
        b"anthropic-beta, anthropic-dangerous-direct-browser-access",
    ),
    (b"access-control-max-age", b"600"),
)


class ProtectionMiddleware:
    def __init__(self, app: ASGIApp, state: ServerState, is_open: Callable[[str], bool]) -> None:
        """`is_open`: which paths, without the prefix, are answered to whoever asks."""
        settings = state.settings
        self.app = app
        self.settings = settings
        self.access = state.access
        self.metrics = state.metrics
        self.workers = state.workers
        self.gate = OriginGuard(settings)
        self._callers = state.callers
        self._is_open = is_open
        self._rates = RateLimiter(settings.limits.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope = self._placed(scope)
        if scope["type"] == "websocket":
            await self._socket(scope, headers, receive, send)
        else:
            await _Exchange(self, scope, headers, receive, send).run()

    def _placed(self, scope: Scope) -> Scope:
        """Without the prefix under which a proxy serves us, whether the proxy took it off or not."""
        prefix = self.settings.prefix
        state = {**scope.get("state", {}), "request_id": _request_id(dict(scope["headers"]))}
        if not prefix:
            return {**scope, "state": state}
        path: str = scope["path"]
        inside = path.removeprefix(prefix) if path == prefix or path.startswith(prefix + "/") else path
        return {**scope, "state": state, "root_path": prefix, "path": prefix + (inside or "/")}

    async def admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Whoever may not come in is refused. Of an open path, whoever is not known comes in as nobody."""
        self.check(scope, headers)
        try:
            scope["state"]["caller"] = caller = await self._callers.find(headers)
        except NoKey:
            if not self._is_open(scope["path"].removeprefix(self.settings.prefix)):
                raise
            scope["state"]["caller"] = None
            self._rates.take((scope.get("client") or ("nobody",))[0])
        else:
            self._rates.take(caller.owner_id)

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises DuplicateHeader, or ForeignCaller."""
        names = [name for name, _ in scope["headers"] if name in _SINGLE]
        if len(names) > len(set(names)):
            raise DuplicateHeader(next(name for name in names if names.count(name) > 1).decode())
        self.gate.check(headers)

    async def _socket(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        """The same checks as for a request. `again` makes them for each turn of a socket that stays open."""
        begun, status = time.monotonic(), 101
        headers = headers_with_key(headers, scope.get("subprotocols", ()))
        try:
            await self.admit(scope, headers)
            scope["state"]["again"] = partial(self.admit, scope, headers)
        except Exception as error:
            log_unexpected(error)
            status = await deny(WebSocket(scope, receive, send), error)
        else:
            await self.app(scope, receive, send)
        finally:
            caller, path = scope["state"].get("caller"), unquote(scope["path"])
            id = scope["state"]["request_id"]
            self.access.note(id, caller, "SOCKET", path, status, time.monotonic() - begun)
            self.metrics.request(status)

    def shared(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What lets a page of an origin that the operator named read the answer."""
        origin = headers.get(b"origin")
        if origin is None or not self.gate.is_named(origin.decode("latin-1")):
            return []
        exposed = (b"access-control-expose-headers", b"x-request-id, request-id, x-conversation, retry-after")
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), exposed]


class _Exchange:
    """One request and its answer."""

    def __init__(
        self, shell: ProtectionMiddleware, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        self._shell = shell
        self._scope = scope
        self._headers = headers
        self._receive = receive
        self._plain_send = send
        self._id: str = scope["state"]["request_id"]
        self._begun = time.monotonic()
        self._status = 0
        self._whole = False
        self._is_large = False

    async def run(self) -> None:
        try:
            await self._answer()
        except ClientDisconnected:
            self._status = self._status or 499
        except Exception as error:
            log_unexpected(error)
            if not self._status:
                await self._refuse(error)
            elif not self._whole:  # too late to say it: the connection is cut, so that nobody takes this for all
                raise
        finally:
            caller = self._scope["state"].get("caller")
            seconds = time.monotonic() - self._begun
            path = unquote(self._scope["path"])
            self._shell.access.note(self._id, caller, self._scope["method"], path, self._status, seconds)
            self._shell.metrics.request(self._status)
            if self._is_large:
                self._shell.workers.trim()

    async def _answer(self) -> None:
        if self._scope["method"] == "OPTIONS" and b"access-control-request-method" in self._headers:
            self._shell.check(self._scope, self._headers)
            await self._preflight()
            return
        await self._shell.admit(self._scope, self._headers)
        receive = self._receive
        if self._scope["method"] in _WITH_BODY:
            receive = await self._checked_body()
        await self._shell.app(self._scope, receive, self._send)

    async def _checked_body(self) -> Receive:
        limits = self._shell.settings.limits
        body = await read_body(self._receive, limits, self._headers.get(b"content-length"))
        self._is_large = len(body) > _LARGE_BODY
        kind = self._headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if body and (not kind or kind.endswith(b"json")):
            await self._check(body, limits)
        self._shell.access.note_body(self._id, body)
        return replay_body(body, self._receive)

    async def _check(self, body: bytes, limits: ServerLimits) -> None:
        if len(body) <= _SMALL_BODY:
            check_json(body, limits)
        else:
            await self._shell.workers.run(check_json, body, limits)

    async def _preflight(self) -> None:
        await self._send({"type": "http.response.start", "status": 204, "headers": list(_PREFLIGHT)})
        await self._send({"type": "http.response.body", "body": b""})

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            names = (b"x-request-id", b"request-id")  # as OpenAI's clients look for it, and Anthropic's
            extra = [*((name, self._id.encode()) for name in names), *self._shell.shared(self._headers)]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        elif not message.get("more_body", False):
            self._whole = True
        await self._plain_send(message)

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
        """Reads the rest of a body that is too large, and discards it.

        A client that is still sending it would not see the answer of a connection that is closed at once.
        """
        if b"expect" in self._headers:  # the client waits for leave to send it
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._shell.settings.limits.body_seconds):
                while (message := await self._receive())["type"] == "http.request" and message.get("more_body"):
                    pass


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{new_id()}"
