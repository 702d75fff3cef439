"""A key from where a page can put one: browsers let scripts set no header of a WebSocket but its subprotocols.

An address is no place for a key: it is kept in histories and in the logs of every proxy on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from palaver.server.auth import presented_key
from palaver.server.errors import error_headers, error_status, error_value

PROTOCOL = "palaver"
"""What is agreed upon with a client that offers subprotocols at all."""
_KEY = "palaver.key."


def headers_with_key(headers: Mapping[bytes, bytes], subprotocols: Iterable[str]) -> Mapping[bytes, bytes]:
    """The headers; a key among the subprotocols is as good as one in the usual header, which goes before it."""
    offered = (one.removeprefix(_KEY) for one in subprotocols if one.startswith(_KEY))
    key = next(offered, "")
    if not key or presented_key(headers) is not None:
        return headers
    return {**headers, b"authorization": f"Bearer {key}".encode("latin-1", "replace")}


async def deny(socket: WebSocket, error: Exception) -> int:
    """The status that was told."""
    status = error_status(error).status
    await socket.send_denial_response(JSONResponse(error_value(error), status, error_headers(error)))
    return status
