"""The route `/ws/chat`, and the session of one socket, which sends the messages of one turn at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from fastapi import APIRouter
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from palaver.errors import PalaverError, ShuttingDown
from palaver.server.auth import PROTOCOL, deny
from palaver.server.errors import INTERNAL, NotJson, log_unexpected
from palaver.server.middleware import AccessLog
from palaver.server.socket.registry import SocketTurn, encode_message
from palaver.server.socket.schemas import ClientMessage, ResumeRequest, StopRequest, TurnRequest, parse_message
from palaver.server.socket.streaming import TurnProducer
from palaver.server.state import ServerState
from palaver.store import Conflict

MAX_INLINE_SIZE = 1 << 16
"""Longer messages are parsed in a thread, so that they don't block the event loop."""
NORMAL_CLOSE_CODES = (1000, 1001)
GOING_AWAY = 1001


class SocketSession:
    def __init__(self, socket: WebSocket, state: ServerState) -> None:
        self._socket = socket
        self._state = state
        self._access_log = AccessLog(state.settings.debug)
        self._owner: str = socket.state.caller.owner_id
        self._admit: Callable[[], Awaitable[None]] = socket.state.admit
        self._turn: SocketTurn | None = None
        self._sender: asyncio.Task[None] | None = None
        self._closed_by_client = False

    async def run(self) -> None:
        """Runs until the client disconnects, is idle for too long, or the server shuts down."""
        closing = asyncio.create_task(self._state.closing.wait())
        receiving = asyncio.create_task(self._socket.receive())
        try:
            while True:
                await self._wait(receiving, closing)
                if self._sender is not None and self._sender.done():
                    self._finish_turn()
                if receiving.done():
                    if not await self._handle(receiving.result()):
                        return
                    receiving = asyncio.create_task(self._socket.receive())
                elif self._sender is None and closing.done():
                    await self._close(GOING_AWAY, "The server is shutting down.")
                    return
        except TimeoutError:
            await self._close(NORMAL_CLOSE_CODES[0], "Nothing was asked for too long.")
        finally:
            await self._clean_up(receiving, closing)

    async def _wait(self, receiving: asyncio.Task[Message], closing: asyncio.Task[Any]) -> None:
        """Waits for a message, the end of the turn or the shutdown. Raises TimeoutError on an idle socket."""
        tasks: set[asyncio.Task[Any]] = {receiving, self._sender or closing}
        timeout = self._state.settings.limits.socket_idle_seconds if self._sender is None else None
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError

    async def _handle(self, message: Message) -> bool:
        """Returns False after a disconnect."""
        if message["type"] == "websocket.disconnect":
            self._closed_by_client = is_normal_close(message)
            return False
        try:
            await self._dispatch(message.get("text"))
        except Exception as error:
            log_unexpected(error)
            await self._send_error(error)
        return True

    async def _dispatch(self, text: str | None) -> None:
        if text is None:
            raise NotJson("Messages must be JSON text, not bytes.")
        self._access_log.log_body(self._socket.state.request_id, text.encode("utf-8", "replace"))
        match await self._parse(text):
            case StopRequest():
                if self._turn is not None:
                    self._turn.stop()
            case TurnRequest() as request:
                turn = SocketTurn(self._owner, stored=bool(request.conversation))
                self._state.sockets.start(turn, TurnProducer(turn, request, self._state))
                self._send_turn(turn, 0)
            case ResumeRequest(turn_id=id, after=after):
                self._send_turn(self._state.sockets.turn(self._owner, id), after)

    async def _parse(self, text: str) -> ClientMessage:
        """Parses a message. All but a stop count as requests: the key and the rate limit are checked again."""
        limits = self._state.settings.limits
        try:
            message = (
                parse_message(text, limits)
                if len(text) <= MAX_INLINE_SIZE
                else await self._state.workers.run(parse_message, text, limits)
            )
        except PalaverError:
            await self._admit()
            raise
        if not isinstance(message, StopRequest):
            if self._turn is not None:
                raise Conflict(f"The turn {self._turn.id} is running on this socket: wait for its end, or stop it.")
            await self._admit()
        return message

    def _send_turn(self, turn: SocketTurn, after: int) -> None:
        self._state.sockets.add_reader(turn)
        self._turn = turn
        self._sender = asyncio.create_task(self._send_messages(turn, after))

    async def _send_messages(self, turn: SocketTurn, after: int) -> None:
        try:
            async with aclosing(turn.log.read(after)) as messages:
                async for text in messages:
                    await self._socket.send_text(text)
        except PalaverError as error:
            await self._send_error(error)
        except (WebSocketDisconnect, RuntimeError):
            pass  # the client disconnected; `run` receives that as well

    def _finish_turn(self) -> None:
        """All messages were sent, or the turn can't be read: the socket is free for another one."""
        assert self._turn is not None
        self._state.sockets.remove_reader(self._turn, closed=False)
        self._turn = self._sender = None

    async def _send_error(self, error: Exception) -> None:
        """Sends an error that belongs to no turn."""
        text = str(error) if isinstance(error, PalaverError) else INTERNAL
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.send_text(encode_message({"type": "error", "error": text, "seq": 0}))

    async def _close(self, code: int, reason: str) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.close(code, reason)

    async def _clean_up(self, *tasks: asyncio.Task[Any]) -> None:
        if self._turn is not None:
            self._state.sockets.remove_reader(self._turn, self._closed_by_client)
        pending = [task for task in (*tasks, self._sender) if task is not None]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def is_normal_close(message: Message) -> bool:
    """Whether the client closed the socket. A lost connection also has code 1005, but then the reason is None."""
    code = message.get("code")
    return code in NORMAL_CLOSE_CODES or (code == 1005 and message.get("reason") is not None)


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
