"""Who calls: a user with a key, or the one user of this machine.

A key that is sent must be valid, on loopback too. Without one, a request that comes straight from this machine is the
local user's, with no right to administer the server: that takes a key, or the token in the data folder.
"""

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
from palaver.server.origins import is_direct
from palaver.server.page.cookies import cookie_key
from palaver.store import Store
from palaver.store.users import LOCAL

REMEMBERED_SECONDS = 2.0
"""For so long a key that was good is taken without another look: a revoked one is shut out after that."""
REMEMBERED = 1024
PLACEHOLDERS = frozenset({"none", "empty", "not-needed", "sk-no-key-required"})
"""What clients of local servers send because their library insists on a key: the same as none."""


@dataclass(frozen=True, slots=True)
class Caller:
    owner_id: str
    name: str
    admin: bool


class Callers:
    """Knows callers by their keys. Where none is needed, a caller without one is the local user."""

    def __init__(self, store: Store, needs_key: bool, token: str = "", port: int = 0) -> None:
        """`token` makes the local user an administrator; `port` names the page's cookie."""
        self._port = port
        self._store = store
        self._needs_key = needs_key
        self._token = token
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()
        self._local_id: str | None = None

    async def find(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Raises NoKey for a key that is not valid, and for none where one is needed."""
        key = presented(headers) or cookie_key(headers, self._port)
        if key and key.lower() not in PLACEHOLDERS:
            return await self.by_key(key)
        if self._needs_key or not is_direct(headers):
            raise NoKey(given=bool(key))
        return await self._local(admin=False)

    async def by_key(self, key: str) -> Caller:
        """The caller with this key, or with the token. Raises NoKey."""
        if self._token and hmac.compare_digest(key.encode("latin-1", "replace"), self._token.encode()):
            return await self._local(admin=True)
        known = self._known.get(key)
        if known is not None and time.monotonic() - known[0] < REMEMBERED_SECONDS:
            return known[1]
        found = await asyncio.to_thread(self._store.keys.find, key)
        if found is None:
            self._known.pop(key, None)
            raise NoKey(given=True)
        caller = Caller(found.user_id, found.user, found.admin)
        self._known[key] = (time.monotonic(), caller)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return caller

    async def _local(self, admin: bool) -> Caller:
        if self._local_id is None:
            self._local_id = (await asyncio.to_thread(self._store.users.ensure)).id
        return Caller(self._local_id, LOCAL, admin)


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
        raise NotAllowed("This needs an administrator's key, or the token in the server's data folder.")
    return caller


Whoever = Annotated[Caller, Depends(_whoever)]
Admin = Annotated[Caller, Depends(_admin)]
