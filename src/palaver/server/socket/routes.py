"""The route of the socket."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from palaver.errors import PalaverError
from palaver.server.errors import ShuttingDown
from palaver.server.socket.denial import deny
from palaver.server.socket.keys import PROTOCOL
from palaver.server.socket.talking import Talking
from palaver.server.state import State


def router() -> APIRouter:
    routes = APIRouter()

    @routes.websocket("/ws/chat")
    async def chat(socket: WebSocket) -> None:
        state: State = socket.app.state.palaver
        try:
            if state.closing.is_set():
                raise ShuttingDown
            with state.sockets.opened(socket.state.caller.owner_id):
                await socket.accept(PROTOCOL if PROTOCOL in socket["subprotocols"] else None)
                await Talking(socket, state).run()
        except PalaverError as error:
            await deny(socket, error)

    return routes
