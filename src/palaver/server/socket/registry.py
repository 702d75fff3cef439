"""What is open: sockets by whose they are, and turns, which outlive the sockets that read them for a while."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from palaver.server.errors import TooMany
from palaver.server.socket.turn import SocketTurn
from palaver.store import NotFound

if TYPE_CHECKING:
    from palaver.server.socket.producer import TurnProducer

KEPT_SECONDS = 600.0
"""For so long a turn that is over can be read again."""
KEPT_SIZE = 64 << 20
"""Characters of all turns that are over; then the oldest is forgotten sooner."""

CLOSING_SECONDS = 5.0


class SocketRegistry:
    def __init__(self, grace: float, most: int) -> None:
        """`grace`: for how many seconds a turn that nobody reads goes on; `most`: how many sockets one caller has."""
        self._grace = grace
        self._most = most
        self._open: Counter[str] = Counter()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._turns: dict[str, SocketTurn] = {}
        self._over: list[SocketTurn] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unread: dict[str, asyncio.TimerHandle] = {}

    @contextmanager
    def opened(self, owner: str) -> Iterator[None]:
        """One more socket of that caller; TooMany where there are enough."""
        if self._open[owner] >= self._most:
            raise TooMany(f"{self._most} sockets are open already: close one of them.")
        self._open[owner] += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]
            if not self._open:
                self._none_open.set()

    async def closed(self) -> None:
        """Waits for sockets that close themselves, because the server ends; not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._none_open.wait()

    def begin(self, turn: SocketTurn, making: TurnProducer) -> None:
        self._turns[turn.id] = turn
        turn.halt = making.stop
        task = asyncio.create_task(making.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, turn))

    def turn(self, owner: str, id: str) -> SocketTurn:
        """Another's is not found, and one that was forgotten neither."""
        found = self._turns.get(id)
        if found is None or found.owner != owner:
            raise NotFound("turn", id)
        return found

    def join(self, turn: SocketTurn) -> None:
        """One more reads it: it is to go on."""
        turn.readers += 1
        if waiting := self._unread.pop(turn.id, None):
            waiting.cancel()

    def leave(self, turn: SocketTurn, for_good: bool) -> None:
        """One less. What nobody reads is stopped: at once where its last reader said goodbye, else after the grace."""
        turn.readers -= 1
        if turn.readers or turn.record.ended or turn.lasting:
            return
        if for_good:
            turn.stop()
        else:
            self._unread[turn.id] = asyncio.get_running_loop().call_later(self._grace, self._give_up, turn)

    def _give_up(self, turn: SocketTurn) -> None:
        self._unread.pop(turn.id, None)
        turn.stop()

    def _ended(self, task: asyncio.Task[None], turn: SocketTurn) -> None:
        self._tasks.discard(task)
        turn.halt = None
        if waiting := self._unread.pop(turn.id, None):
            waiting.cancel()
        self._over.append(turn)
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, turn)
        while sum(one.record.size for one in self._over) > KEPT_SIZE:
            self._forget(self._over[0])

    def _forget(self, turn: SocketTurn) -> None:
        if self._turns.pop(turn.id, None) is not None:
            self._over.remove(turn)
