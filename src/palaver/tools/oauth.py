"""Signing in to tool servers with OAuth, by the SDK: tokens in private files, and the code that a browser brings back.

A sign-in is begun by a user (`SignIn`), never by a connection: one that needs it says so on the server's card. All
requests of it, also those for metadata and tokens, go through the HTTP client of the server, with its limits and guard.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from palaver.tools.config import ServerConfig, write_private

if TYPE_CHECKING:
    import httpx2
    from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
    from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

SIGN_IN_SECONDS = 600.0
"""How long a sign-in waits for the browser."""
MAX_LINE = 16_384
DONE = "You are signed in. You can close this page."


class SignInNeeded(Exception):
    """The tokens are missing or not valid any more."""


class TokenFile:
    """The tokens for one server, in a file that only its owner can read. Bound to the server's URL by its name."""

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self._path = folder / f"{config.name}-{hashlib.sha256(config.url.encode()).hexdigest()[:16]}.json"
        self.stored = asyncio.Event()
        """Set when new tokens are written."""

    def forget(self) -> None:
        self.stored.clear()
        self._path.unlink(missing_ok=True)

    @property
    def has_tokens(self) -> bool:
        return "tokens" in self._read()

    async def get_tokens(self) -> OAuthToken | None:
        from mcp.shared.auth import OAuthToken

        value = self._read().get("tokens")
        return None if value is None else OAuthToken.model_validate(value)

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._write("tokens", tokens)
        self.stored.set()

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        from mcp.shared.auth import OAuthClientInformationFull

        value = self._read().get("client")
        return None if value is None else OAuthClientInformationFull.model_validate(value)

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._write("client", client_info)

    def _read(self) -> dict[str, Any]:
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _write(self, key: str, value: Any) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._path, {**self._read(), key: value.model_dump(mode="json", exclude_none=True)})


class SignIn:
    """One sign-in: `url` is to be opened in a browser, `finish` takes what the browser brings back."""

    def __init__(self, redirect_uri: str) -> None:
        self.redirect_uri = redirect_uri
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._code: asyncio.Future[AuthorizationCodeResult] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """The secret that the browser brings back."""
        return parse_qs(urlsplit(self.url.result()).query).get("state", [""])[0]

    def finish(self, code: str, issuer: str | None = None) -> None:
        from mcp.client.auth import AuthorizationCodeResult

        if not self._code.done():
            self._code.set_result(AuthorizationCodeResult(code=code, state=self.state, iss=issuer))

    def provider(self, config: ServerConfig, tokens: TokenFile) -> OAuthClientProvider:
        async def show(url: str) -> None:
            if not self.url.done():
                self.url.set_result(url)

        async def wait() -> AuthorizationCodeResult:
            return await self._code

        return _provider(config, tokens, self.redirect_uri, show, wait)


def token_auth(config: ServerConfig, tokens: TokenFile | None) -> httpx2.Auth | None:
    """The tokens of an earlier sign-in, refreshed where that is possible; None without any."""
    if tokens is None or not tokens.has_tokens or any(name.lower() == "authorization" for name in config.headers):
        return None

    async def refuse(url: str = "") -> Any:
        raise SignInNeeded

    return _provider(config, tokens, "http://127.0.0.1/callback", refuse, refuse)


def _provider(config: ServerConfig, tokens: TokenFile, redirect_uri: str, show: Any, wait: Any) -> OAuthClientProvider:
    from mcp.client.auth import OAuthClientProvider
    from mcp.shared.auth import OAuthClientMetadata

    metadata = OAuthClientMetadata.model_validate({"client_name": "Palaver", "redirect_uris": [redirect_uri]})
    return OAuthClientProvider(config.endpoint, metadata, tokens, show, wait)


class LoopbackCallback:
    """The address on this machine to which a browser brings the code."""

    def __init__(self) -> None:
        self.redirect_uri = ""
        self._values: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    async def wait(self) -> dict[str, str]:
        """The parameters that the browser brought: `state`, and `code` or `error`."""
        async with asyncio.timeout(SIGN_IN_SECONDS):
            return await self._values

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            line = (await reader.readline())[:MAX_LINE].decode("latin-1").split(" ")
            url = urlsplit(line[1] if len(line) > 1 else "")
            values = {name: one[0] for name, one in parse_qs(url.query).items()}
            found = line[0] == "GET" and url.path == "/callback" and "state" in values
            if found and not self._values.done():
                self._values.set_result(values)
            body = DONE if found else "Not found."
            head = f"HTTP/1.1 {'200 OK' if found else '404 Not Found'}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
            await writer.drain()
        writer.close()


@asynccontextmanager
async def listen_for_code() -> AsyncIterator[LoopbackCallback]:
    callback = LoopbackCallback()
    server = await asyncio.start_server(callback._handle, "127.0.0.1", 0, limit=MAX_LINE)
    callback.redirect_uri = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/callback"
    try:
        yield callback
    finally:
        server.close()
