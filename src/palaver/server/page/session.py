"""The page's session: exchanges a key for a cookie that no script can read and no other site can send.

The page itself and the sign-in need no key.
"""

from __future__ import annotations

import hmac

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from palaver.server.auth import cookie_name, is_loopback
from palaver.server.state import ServerState, StateDep

PUBLIC_PATHS = ("/", "/api/session", "/sw.js", "/manifest.webmanifest")
PUBLIC_PREFIXES = ("/assets/", "/icon")
_YEAR = 365 * 24 * 3600

routes = APIRouter(tags=["session"])


class SessionInfo(BaseModel):
    """Who reads the page. `needs_key` says whether somebody without a key is let in at all."""

    needs_key: bool
    signed_in: bool
    name: str
    admin: bool


class SignIn(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    key: str = Field(min_length=1, max_length=500)


def is_public(path: str) -> bool:
    """Whether this path, without the proxy's prefix, needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIXES)


@routes.get("/api/session")
async def session(request: Request, state: StateDep) -> SessionInfo:
    caller = request.state.caller
    return _session_info(state, caller and caller.name, caller is not None and caller.admin)


@routes.post("/api/session")
async def sign_in(body: SignIn, request: Request, response: Response, state: StateDep) -> SessionInfo:
    """Takes a key and gives a cookie for it."""
    key = body.key.strip()
    caller = await state.authenticator.by_key(key)
    _set_cookie(request, response, state, key, _YEAR)
    return _session_info(state, caller.name, caller.admin)


@routes.delete("/api/session", status_code=204)
async def sign_out(request: Request, response: Response, state: StateDep) -> None:
    _set_cookie(request, response, state, "", 0)


def log_in(code: str, request: Request, response: Response, state: ServerState) -> None:
    """Sets the cookie of the local administrator if the code is the one that the server printed."""
    settings = state.settings
    if settings.login_code and hmac.compare_digest(code.encode("utf-8", "replace"), settings.login_code.encode()):
        _set_cookie(request, response, state, settings.secret, _YEAR)


def _set_cookie(request: Request, response: Response, state: ServerState, value: str, age: int) -> None:
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
    path = state.settings.prefix or "/"
    name = cookie_name(state.settings.port)
    response.set_cookie(name, value, age, path=path, secure=secure, httponly=True, samesite="strict")


def _session_info(state: ServerState, name: str | None, admin: bool) -> SessionInfo:
    needs_key = not is_loopback(state.settings.host) or name is None
    return SessionInfo(needs_key=needs_key, signed_in=name is not None, name=name or "", admin=admin)
