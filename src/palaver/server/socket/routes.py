"""The route `/ws/chat`."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from palaver.errors import PalaverError, ShuttingDown
from palaver.server.auth import PROTOCOL, deny
from palaver.server.socket.session import SocketSession
from palaver.server.state import ServerState


def router() -> APIRouter:
    routes = APIRouter()

    @routes.websocket("/ws/chat")
    async def chat(socket: WebSocket) -> None:
        state: ServerState = socket.app.state.palaver
        try:
            if state.closing.is_set():
                raise ShuttingDown
            with state.sockets.connect(socket.state.caller.owner_id):
                await socket.accept(PROTOCOL if PROTOCOL in socket["subprotocols"] else None)
                await SocketSession(socket, state).run()
        except PalaverError as error:
            await deny(socket, error)

    return routes
