"""A tool server that needs a sign-in, and its authorization server, in one thread of the tests."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.tools import misbehaving_server


class AuthorizationServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), OAuthHandler)
        self.base = f"http://127.0.0.1:{self.server_address[1]}"
        self.codes: dict[str, str] = {}
        """The code challenges, by code."""
        self.tokens: set[str] = set()
        self.registered: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"{self.base}/mcp"

    def authorize(self, url: str) -> str:
        """What a browser does after the user agreed: the URL to which it is sent."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert (query["response_type"], query["code_challenge_method"]) == ("code", "S256")
        assert query["redirect_uri"] in self.registered[-1]["redirect_uris"]
        code = secrets.token_hex(8)
        self.codes[code] = query["code_challenge"]
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"


class OAuthHandler(misbehaving_server.Handler):
    server: AuthorizationServer

    def do_GET(self) -> None:
        base = self.server.base
        match self.path:
            case "/.well-known/oauth-protected-resource/mcp":
                self.answer(200, {"resource": self.server.url, "authorization_servers": [base]})
            case "/.well-known/oauth-authorization-server":
                metadata = {
                    "issuer": base,
                    "authorization_endpoint": f"{base}/authorize",
                    "token_endpoint": f"{base}/token",
                    "registration_endpoint": f"{base}/register",
                    "response_types_supported": ["code"],
                    "code_challenge_methods_supported": ["S256"],
                    "token_endpoint_auth_methods_supported": ["none"],
                }
                self.answer(200, metadata)
            case "/mcp":
                self.answer(405, {})
            case _:
                self.answer(404, {})

    def do_POST(self) -> None:
        if self.path == "/mcp" and self.headers.get("authorization", "")[7:] in self.server.tokens:
            super().do_POST()
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        match self.path:
            case "/mcp":
                where = f"{self.server.base}/.well-known/oauth-protected-resource/mcp"
                self.answer(401, {}, {"www-authenticate": f'Bearer resource_metadata="{where}"'})
            case "/register":
                client = {**json.loads(body), "client_id": f"client-{len(self.server.registered)}"}
                self.server.registered.append(client)
                self.answer(201, client)
            case "/token":
                form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
                digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
                challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
                if self.server.codes.pop(form.get("code", ""), None) != challenge:
                    self.answer(400, {"error": "invalid_grant"})
                    return
                token = f"token-{secrets.token_hex(8)}"
                self.server.tokens.add(token)
                self.answer(200, {"access_token": token, "token_type": "Bearer", "expires_in": 3600})

    def answer(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve_oauth() -> Iterator[AuthorizationServer]:
    with AuthorizationServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
