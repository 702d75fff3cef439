"""One socket: hears what its client asks for and tells the turn that it reads, one turn at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from palaver.errors import PalaverError
from palaver.server.errors import INTERNAL, NotJson, log_unexpected
from palaver.server.socket.producer import TurnProducer
from palaver.server.socket.schemas import Asked, ResumeRequest, StopRequest, TurnRequest, parse_message
from palaver.server.socket.turn import SocketTurn, encode_message
from palaver.server.state import ServerState
from palaver.store import Conflict

SHORT = 1 << 16
"""A text of so many characters is read at once; a longer one in a thread, so that nobody waits for it."""
GOODBYES = (1000, 1001)
GOING_AWAY = 1001


class SocketSession:
    def __init__(self, socket: WebSocket, state: ServerState) -> None:
        self._socket = socket
        self._state = state
        self._owner: str = socket.state.caller.owner_id
        self._admit: Callable[[], Awaitable[None]] = socket.state.again
        self._turn: SocketTurn | None = None
        self._telling: asyncio.Task[None] | None = None
        self._for_good = False

    async def run(self) -> None:
        """Until the client leaves, says nothing for too long, or the server ends."""
        closing = asyncio.create_task(self._state.closing.wait())
        hearing = asyncio.create_task(self._socket.receive())
        try:
            while True:
                await self._wait(hearing, closing)
                if self._telling is not None and self._telling.done():
                    self._read_to_the_end()
                if hearing.done():
                    if not await self._hear(hearing.result()):
                        return
                    hearing = asyncio.create_task(self._socket.receive())
                elif self._telling is None and closing.done():
                    await self._close(GOING_AWAY, "The server is shutting down.")
                    return
        except TimeoutError:
            await self._close(GOODBYES[0], "Nothing was asked for too long.")
        finally:
            await self._leave(hearing, closing)

    async def _wait(self, hearing: asyncio.Task[Message], closing: asyncio.Task[Any]) -> None:
        """For whatever comes next. TimeoutError where nothing is told and nothing asked for too long."""
        waited: set[asyncio.Task[Any]] = {hearing, self._telling or closing}
        patience = self._state.settings.limits.socket_idle_seconds if self._telling is None else None
        done, _ = await asyncio.wait(waited, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError

    async def _hear(self, message: Message) -> bool:
        """Whether there is more to come."""
        if message["type"] == "websocket.disconnect":
            self._for_good = is_goodbye(message)
            return False
        try:
            await self._take(message.get("text"))
        except Exception as error:
            log_unexpected(error)
            await self._refuse(error)
        return True

    async def _take(self, text: str | None) -> None:
        if text is None:
            raise NotJson("Messages are JSON text: bytes are not taken.")
        self._state.access.note_body(self._socket.state.request_id, text.encode("utf-8", "replace"))
        match await self._read(text):
            case StopRequest():
                if self._turn is not None:
                    self._turn.stop()
            case TurnRequest() as opening:
                turn = SocketTurn(self._owner, lasting=bool(opening.conversation))
                self._state.sockets.begin(turn, TurnProducer(turn, opening, self._state))
                self._tell(turn, 0)
            case ResumeRequest(turn_id=id, after=after):
                self._tell(self._state.sockets.turn(self._owner, id), after)

    async def _read(self, text: str) -> Asked:
        """What is asked. All but a stop counts as a request: the key is looked at again, and how many there were."""
        limits = self._state.settings.limits
        try:
            asked = (
                parse_message(text, limits)
                if len(text) <= SHORT
                else await self._state.workers.run(parse_message, text, limits)
            )
        except PalaverError:
            await self._admit()
            raise
        if not isinstance(asked, StopRequest):
            if self._turn is not None:
                raise Conflict(f"The turn {self._turn.id} is running on this socket: wait for its end, or stop it.")
            await self._admit()
        return asked

    def _tell(self, turn: SocketTurn, after: int) -> None:
        self._state.sockets.join(turn)
        self._turn = turn
        self._telling = asyncio.create_task(self._told(turn, after))

    async def _told(self, turn: SocketTurn, after: int) -> None:
        try:
            async with aclosing(turn.record.read(after)) as messages:
                async for text in messages:
                    await self._socket.send_text(text)
        except PalaverError as error:
            await self._refuse(error)
        except (WebSocketDisconnect, RuntimeError):
            pass  # the client is gone, which is heard, too

    def _read_to_the_end(self) -> None:
        """The turn was told whole, or can't be told here: the socket is free for another one."""
        assert self._turn is not None
        self._state.sockets.leave(self._turn, for_good=False)
        self._turn = self._telling = None

    async def _refuse(self, error: Exception) -> None:
        """An error that belongs to no turn."""
        said = str(error) if isinstance(error, PalaverError) else INTERNAL
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.send_text(encode_message({"type": "error", "error": said, "seq": 0}))

    async def _close(self, code: int, reason: str) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.close(code, reason)

    async def _leave(self, *tasks: asyncio.Task[Any]) -> None:
        if self._turn is not None:
            self._state.sockets.leave(self._turn, self._for_good)
        pending = [task for task in (*tasks, self._telling) if task is not None]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def is_goodbye(message: Message) -> bool:
    """Whether the client closed the socket because it is done. A line that was cut has no reason, not even none."""
    code = message.get("code")
    return code in GOODBYES or (code == 1005 and message.get("reason") is not None)
