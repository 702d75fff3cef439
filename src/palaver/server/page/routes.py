"""Serves the built files of the page, with a policy that allows its own scripts only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from palaver.server.page import session
from palaver.server.state import StateDep
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
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
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


def router() -> APIRouter:
    routes = APIRouter()
    routes.include_router(session.routes)
    files = APIRouter(include_in_schema=False)

    @files.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request, state: StateDep, accept_encoding: Encodings = "", login: str = "") -> Response:
        path: str = request.scope.get("raw_path", b"/").decode("latin-1")
        if state.settings.prefix and path == state.settings.prefix:  # relative URLs need the slash
            return RedirectResponse(state.settings.prefix + "/", 308)
        if login:  # the address that `palaver serve` prints
            answer = RedirectResponse(state.settings.prefix + "/", 303, HEADERS | {"cache-control": "no-store"})
            session.log_in(login, request, answer, state)
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

    routes.include_router(files)
    return routes


def _file(name: str, cache_control: str, encodings: str) -> Response:
    """A file of the build, compressed if the client accepts it. Names can't lead out of the folder."""
    path = DIST / name
    if ".." in name or "\\" in name or path.suffix not in _MEDIA_TYPES or not path.is_file():
        raise NotFound("page", name)
    headers = HEADERS | {"cache-control": cache_control, "vary": "accept-encoding"}
    compressed = path.with_name(path.name + ".gz")
    if "gzip" in encodings and compressed.is_file():
        path, headers = compressed, headers | {"content-encoding": "gzip"}
    return FileResponse(path, media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)
