"""How somebody is turned away at the door: with a status and an error's usual body, before there is a socket."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from palaver.server.errors import error_headers, error_value, told


async def deny(socket: WebSocket, error: Exception) -> int:
    """The status that was told."""
    status = told(error).status
    await socket.send_denial_response(JSONResponse(error_value(error), status, error_headers(error)))
    return status
