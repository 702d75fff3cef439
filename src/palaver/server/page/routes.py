"""The web page: its built files, with a policy that allows its own scripts only, and its session.

A session exchanges a key for a cookie that no script can read and no other site can send. The page itself and the
sign-in need no key.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from palaver.server.auth import cookie_name, is_loopback
from palaver.server.state import ServerState, StateDep
from palaver.store import NotFound

Encodings = Annotated[str, Header()]
DIST = Path(__file__).parent / "dist"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "worker-src 'self'",
        "frame-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), geolocation=(), microphone=(self)",
}
PREVIEW = "preview.html"
"""The frame in which the page shows HTML, SVG and diagrams that a model wrote."""
PREVIEW_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "media-src data: blob:",
        "font-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
        "sandbox allow-scripts",
    )
)
PREVIEW_HEADERS = {
    **{name: value for name, value in HEADERS.items() if name != "x-frame-options"},
    "content-security-policy": PREVIEW_POLICY,
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "x-dns-prefetch-control": "off",
}
_CACHE_FOREVER = "public, max-age=31536000, immutable"
_CACHE_REVALIDATE = "no-cache"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".ttf": "font/ttf",
    ".webmanifest": "application/manifest+json",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
}
UNBUILT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Palaver</title>
<h1>Palaver is running, but its page has not been built.</h1>
<p>A released package has it inside. In a checkout, with Node 20.19 or newer:</p>
<pre>make page</pre>
<p>or by hand: <code>cd web &amp;&amp; npm ci &amp;&amp; npm run build</code>. Then load this page again: the server
can go on running.</p>
<p>Everything else works without it: <code>palaver chat</code> in a terminal, and the APIs under <code>v1/</code> and
<code>api/</code>.</p>
</html>
"""


def routers() -> tuple[APIRouter, ...]:
    files = APIRouter(include_in_schema=False)

    @files.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request, state: StateDep, accept_encoding: Encodings = "", login: str = "") -> Response:
        path: str = request.scope.get("raw_path", b"/").decode("latin-1")
        if state.settings.prefix and path == state.settings.prefix:  # relative URLs need the slash
            return RedirectResponse(state.settings.prefix + "/", 308)
        if login:  # the address that `palaver serve` prints
            answer = RedirectResponse(state.settings.prefix + "/", 303, HEADERS | {"cache-control": "no-store"})
            log_in(login, request, answer, state)
            return answer
        if not (DIST / "index.html").is_file():
            return Response(UNBUILT, media_type="text/html", headers=HEADERS | {"cache-control": _CACHE_REVALIDATE})
        return _file("index.html", _CACHE_REVALIDATE, accept_encoding)

    @files.api_route("/assets/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, accept_encoding: Encodings = "") -> Response:
        return _file(f"assets/{name}", _CACHE_FOREVER, accept_encoding)

    @files.api_route("/{name}", methods=["GET", "HEAD"])
    async def other(name: str, accept_encoding: Encodings = "") -> Response:
        return _file(name, _CACHE_REVALIDATE, accept_encoding)

    return session_routes, files


def _file(name: str, cache_control: str, encodings: str) -> Response:
    """A file of the build, compressed if the client accepts it. Names can't lead out of the folder."""
    path = DIST / name
    if ".." in name or "\\" in name or path.suffix not in _MEDIA_TYPES or not path.is_file():
        raise NotFound("page", name)
    policy = PREVIEW_HEADERS if name == PREVIEW else HEADERS
    headers = policy | {"cache-control": cache_control, "vary": "accept-encoding"}
    compressed = path.with_name(path.name + ".gz")
    if "gzip" in encodings and compressed.is_file():
        path, headers = compressed, headers | {"content-encoding": "gzip"}
    return FileResponse(path, media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)


PUBLIC_PATHS = ("/", f"/{PREVIEW}", "/api/session", "/sw.js", "/manifest.webmanifest")
PUBLIC_PREFIXES = ("/assets/", "/icon", "/share/")
_YEAR = 365 * 24 * 3600

session_routes = APIRouter(tags=["session"])


class SessionInfo(BaseModel):
    """The user of the page. `needs_key`: whether a key is required."""

    needs_key: bool
    signed_in: bool
    name: str
    admin: bool
    transcribes: bool
    """Whether the server can transcribe speech."""
    shares: bool
    """Whether conversations may be shared by links."""


class KeySignIn(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    key: str = Field(min_length=1, max_length=500)


def is_public(path: str) -> bool:
    """Whether this path, without the proxy's prefix, needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIXES)


@session_routes.get("/api/session")
async def session(request: Request, state: StateDep) -> SessionInfo:
    caller = request.state.caller
    return _session_info(state, caller and caller.name, caller is not None and caller.admin)


@session_routes.post("/api/session")
async def sign_in(body: KeySignIn, request: Request, response: Response, state: StateDep) -> SessionInfo:
    """Exchanges a key for a cookie."""
    key = body.key.strip()
    caller = await state.authenticator.by_key(key)
    _set_cookie(request, response, state, key, _YEAR)
    return _session_info(state, caller.name, caller.admin)


@session_routes.delete("/api/session", status_code=204)
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
    return SessionInfo(
        needs_key=needs_key,
        signed_in=name is not None,
        name=name or "",
        admin=admin,
        transcribes=bool(state.service.transcriber_name),
        shares=state.settings.share,
    )
