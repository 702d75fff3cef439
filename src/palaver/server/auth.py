"""Authentication: keys, the page's cookie, and the checks of the Host and Origin headers.

A key that is sent must be valid, on loopback too. A direct request from this machine without a key is the local
user's, who is no administrator: that takes a key, or the token in the data folder.

A script in a browser can set no header of a WebSocket but the subprotocols, so a key may be there. A key in the URL is
not accepted: URLs are stored in histories and in the logs of proxies."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Annotated
from urllib.parse import urlsplit

from cachetools import TTLCache
from fastapi import Depends, Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from palaver.server.errors import ForeignCaller, NoKey, NotAllowed, error_headers, error_status, error_value
from palaver.server.settings import ServerSettings
from palaver.store import Store
from palaver.store.users import LOCAL


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. A server that listens there needs no key."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def cookie_name(port: int) -> str:
    return f"palaver_{port}"


def cookie_key(headers: Mapping[bytes, bytes], port: int) -> str | None:
    """The key in the page's cookie."""
    try:
        cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return None
    found = cookies.get(cookie_name(port))
    return (found.value or None) if found else None


_FORWARDING = frozenset({b"forwarded", b"via", b"x-real-ip"})
_FORWARDING_PREFIX = b"x-forwarded-"


def is_direct(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a program of this machine sent the request: to a loopback name, and not through a proxy."""
    if any(name in _FORWARDING or name.startswith(_FORWARDING_PREFIX) for name in headers):
        return False
    return is_loopback(_hostname(headers.get(b"host", b"").decode("latin-1").strip().lower()))


class OriginGuard:
    """Checks Host and Origin of requests and sockets.

    Starlette's TrustedHostMiddleware does not fit: on loopback every name and address of this machine is allowed, an
    invalid Host is refused with the error format of the API, and sockets are denied with an HTTP response.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._hosts = frozenset(name.lower() for name in settings.hosts)
        self.origins = frozenset(origin.rstrip("/").lower() for origin in settings.origins)
        self._local = is_loopback(settings.host)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ForeignCaller."""
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if (self._local or self._hosts) and not self._is_allowed_host(_hostname(host)):
            raise ForeignCaller(f"The host {host[:100]!r} is not one of this server's names; --allow-host adds it.")
        origin = headers.get(b"origin")
        if origin is not None and not self.allows(origin.decode("latin-1"), host):
            raise ForeignCaller("Pages of other origins may not call this server; --allow-origin allows one.")

    def allows(self, origin: str, host: str) -> bool:
        """Whether the page is of this server, or of an origin that the operator allowed."""
        lowered = origin.rstrip("/").lower()
        return lowered in self.origins or (bool(host) and lowered in (f"http://{host}", f"https://{host}"))

    def _is_allowed_host(self, name: str) -> bool:
        return name in self._hosts or (self._local and is_loopback(name))


def _hostname(host: str) -> str:
    """The host without its port. Empty if it is invalid."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "") if not parts.username and parts.path == "" and not parts.query else ""
    except ValueError:
        return ""


KEY_CACHE_SECONDS = 2.0
"""How long a valid key is not looked up again. A revoked key is refused after that."""
KEY_CACHE_SIZE = 1024
PLACEHOLDER_KEYS = frozenset({"none", "empty", "not-needed", "sk-no-key-required"})
"""Sent by clients whose library requires a key. They count as no key."""


@dataclass(frozen=True, slots=True)
class Caller:
    owner_id: str
    name: str
    admin: bool


class Authenticator:
    """Finds the caller of a request by its key. If no key is needed, a caller without one is the local user."""

    def __init__(self, store: Store, needs_key: bool, token: str = "", port: int = 0) -> None:
        """`token` makes the local user an administrator; `port` names the page's cookie."""
        self._port = port
        self._store = store
        self._needs_key = needs_key
        self._token = token
        self._cache: TTLCache[str, Caller] = TTLCache(KEY_CACHE_SIZE, KEY_CACHE_SECONDS)
        self._local_id: str | None = None

    async def find(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Raises NoKey for an invalid key, and for a missing one if it is needed."""
        key = presented_key(headers) or cookie_key(headers, self._port)
        if key and key.lower() not in PLACEHOLDER_KEYS:
            return await self.by_key(key)
        if self._needs_key or not is_direct(headers):
            raise NoKey(given=bool(key))
        return await self._local_caller(admin=False)

    async def by_key(self, key: str) -> Caller:
        """The caller with this key, or with the token. Raises NoKey."""
        if self._token and hmac.compare_digest(key.encode("latin-1", "replace"), self._token.encode()):
            return await self._local_caller(admin=True)
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        found = await asyncio.to_thread(self._store.keys.find, key)
        if found is None:
            raise NoKey(given=True)
        caller = self._cache[key] = Caller(found.user_id, found.user, found.admin)
        return caller

    async def _local_caller(self, admin: bool) -> Caller:
        if self._local_id is None:
            self._local_id = (await asyncio.to_thread(self._store.users.ensure)).id
        return Caller(self._local_id, LOCAL, admin)


def presented_key(headers: Mapping[bytes, bytes]) -> str | None:
    """The key of a request, from any of the headers that clients use."""
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    given = headers.get(b"x-api-key") or headers.get(b"api-key")
    return given.decode("latin-1").strip() if given else None


async def get_caller(request: Request) -> Caller:
    """Like all dependencies it is async: FastAPI calls others in threads, which costs more than they do."""
    caller: Caller | None = request.state.caller
    if caller is None:
        raise NoKey(given=False)
    return caller


async def get_admin(request: Request) -> Caller:
    caller = await get_caller(request)
    if not caller.admin:
        raise NotAllowed("This needs an administrator's key, or the token in the server's data folder.")
    return caller


CallerDep = Annotated[Caller, Depends(get_caller)]
AdminDep = Annotated[Caller, Depends(get_admin)]


PROTOCOL = "palaver"
"""The subprotocol that the server selects if the client offers it."""
_KEY_PREFIX = "palaver.key."


def headers_with_key(headers: Mapping[bytes, bytes], subprotocols: Iterable[str]) -> Mapping[bytes, bytes]:
    """The headers, with the key from the subprotocols if no header has one."""
    keys = (name.removeprefix(_KEY_PREFIX) for name in subprotocols if name.startswith(_KEY_PREFIX))
    key = next(keys, "")
    if not key or presented_key(headers) is not None:
        return headers
    return {**headers, b"authorization": f"Bearer {key}".encode("latin-1", "replace")}


async def deny(socket: WebSocket, error: Exception) -> int:
    """Rejects the handshake with the error's HTTP status, and returns the status."""
    status = error_status(error).status
    await socket.send_denial_response(JSONResponse(error_value(error), status, error_headers(error)))
    return status
