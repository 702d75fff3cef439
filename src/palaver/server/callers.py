"""Who calls: a user with a key, or the one user of this machine."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from palaver.server.errors import NoKey, NotAllowed
from palaver.server.page.cookies import cookie_key
from palaver.store import Store

REMEMBERED_SECONDS = 2.0
"""For so long a key that was good is taken without another look: a revoked one is shut out after that."""
REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Caller:
    owner_id: str
    name: str
    admin: bool


class Callers:
    """Knows callers by their keys. Where none is needed, a caller without one is the local user."""

    def __init__(self, store: Store, needs_key: bool, secret: str = "", port: int = 0) -> None:
        """`secret` is a key of the local user that is kept nowhere; `port` names the page's cookie."""
        self._port = port
        self._store = store
        self._needs_key = needs_key
        self._secret = secret
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()
        self._local: Caller | None = None

    async def find(self, headers: Mapping[bytes, bytes]) -> Caller:
        key = presented(headers) or cookie_key(headers, self._port)
        caller = await self._by_key(key) if key else None
        if caller is not None:
            return caller
        if self._needs_key:
            raise NoKey(given=key is not None)
        return await self._the_local_one()

    async def _by_key(self, key: str) -> Caller | None:
        if self._secret and hmac.compare_digest(key.encode("latin-1", "replace"), self._secret.encode()):
            return await self._the_local_one()
        known = self._known.get(key)
        if known is not None and time.monotonic() - known[0] < REMEMBERED_SECONDS:
            return known[1]
        found = await asyncio.to_thread(self._store.keys.find, key)
        if found is None:
            self._known.pop(key, None)
            return None
        caller = Caller(found.user_id, found.user, found.admin)
        self._known[key] = (time.monotonic(), caller)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return caller

    async def _the_local_one(self) -> Caller:
        if self._local is None:
            user = await asyncio.to_thread(self._store.users.ensure)
            self._local = Caller(user.id, user.name, True)
        return self._local


def presented(headers: Mapping[bytes, bytes]) -> str | None:
    """The key of a request, in whichever header its client sends it."""
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    given = headers.get(b"x-api-key") or headers.get(b"api-key")
    return given.decode("latin-1").strip() if given else None


def _whoever(request: Request) -> Caller:
    caller: Caller | None = request.state.caller
    if caller is None:
        raise NoKey(given=False)
    return caller


def _admin(request: Request) -> Caller:
    caller = _whoever(request)
    if not caller.admin:
        raise NotAllowed("This needs an administrator's key.")
    return caller


Whoever = Annotated[Caller, Depends(_whoever)]
Admin = Annotated[Caller, Depends(_admin)]
