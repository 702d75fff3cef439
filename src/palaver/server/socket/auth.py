"""API keys of WebSocket clients. A script in a browser can set no header but the subprotocols, so a key may be there.

A key in the URL is not accepted: URLs are stored in histories and in the logs of proxies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from palaver.server.auth import presented_key
from palaver.server.errors import error_headers, error_status, error_value

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
