"""Open sockets by owner, and turns with the logs of their messages, which can be resumed by another socket."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from palaver.chat.turn_log import Log
from palaver.errors import BadParameter
from palaver.server.errors import TooMany
from palaver.store import NotFound
from palaver.store.records import new_id

if TYPE_CHECKING:
    from palaver.server.socket.streaming import TurnProducer

RETENTION_SECONDS = 600.0
"""How long a turn can be resumed after its end."""
MAX_RETAINED_SIZE = 64 << 20
"""The total characters of all ended turns. Above it the oldest is dropped early."""
CLOSE_TIMEOUT = 5.0


class MessageLog(Log[str]):
    """The encoded messages. Every reader gets the same bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        """The total length in characters."""

    def add(self, message: Mapping[str, Any], last: bool = False) -> None:
        """Adds a message with the next sequence number. `last` ends the log."""
        text = encode_message({**message, "seq": len(self) + 1})
        self.size += len(text)
        self.set_status(None)
        self.append(text, last)

    def add_status(self, message: Mapping[str, Any]) -> None:
        """A status that readers get until the next message. It repeats the last sequence number."""
        self.set_status(encode_message({**message, "seq": len(self)}))

    def read(self, after: int = 0) -> AsyncGenerator[str]:
        """The messages after a sequence number, to the end of the log."""
        if after > len(self):
            raise BadParameter("after", after, f"the turn has {len(self)} messages so far")
        return self.follow(after)


def encode_message(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


@dataclass(eq=False)
class SocketTurn:
    """One reply and its message log. It may outlive the socket that requested it."""

    owner: str
    stored: bool = False
    """Whether the reply belongs to a conversation: then it continues without readers."""
    id: str = field(default_factory=new_id)
    log: MessageLog = field(default_factory=MessageLog)
    readers: int = 0
    on_stop: Callable[[], None] | None = None
    """Stops the generation; None when it has ended."""

    def stop(self) -> None:
        """Stops the generation within one step and keeps the text so far. Has no effect after the end."""
        if self.on_stop is not None:
            self.on_stop()


class SocketRegistry:
    """Counts sockets per owner, and runs and retains turns."""

    def __init__(self, grace: float, max_sockets: int) -> None:
        """`grace`: seconds that a turn continues without readers; `max_sockets`: the limit per owner."""
        self._grace = grace
        self._max_sockets = max_sockets
        self._open_sockets: Counter[str] = Counter()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._turns: dict[str, SocketTurn] = {}
        self._drop_timers: dict[SocketTurn, asyncio.TimerHandle] = {}
        """Of the ended turns, oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_timers: dict[str, asyncio.TimerHandle] = {}

    @contextmanager
    def connect(self, owner: str) -> Iterator[None]:
        """Counts a socket of the owner while it is open. Raises TooMany at the limit."""
        if self._open_sockets[owner] >= self._max_sockets:
            raise TooMany(f"{self._max_sockets} sockets are open already: close one of them.")
        self._open_sockets[owner] += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self._open_sockets[owner] -= 1
            if not self._open_sockets[owner]:
                del self._open_sockets[owner]
            if not self._open_sockets:
                self._none_open.set()

    async def wait_closed(self) -> None:
        """Waits until all sockets have closed at a shutdown, for `CLOSE_TIMEOUT` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._none_open.wait()

    def start(self, turn: SocketTurn, producer: TurnProducer) -> None:
        self._turns[turn.id] = turn
        turn.on_stop = producer.stop
        task = asyncio.create_task(producer.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._on_end(done, turn))

    def turn(self, owner: str, id: str) -> SocketTurn:
        """Raises NotFound if it does not exist, was dropped or has another owner."""
        turn = self._turns.get(id)
        if turn is None or turn.owner != owner:
            raise NotFound("turn", id)
        return turn

    def add_reader(self, turn: SocketTurn) -> None:
        """Adds a reader, which keeps the turn running."""
        turn.readers += 1
        if timer := self._stop_timers.pop(turn.id, None):
            timer.cancel()

    def remove_reader(self, turn: SocketTurn, closed: bool) -> None:
        """Removes a reader. The last one stops the turn: at once if the client closed the socket, else after `grace`.

        A turn of a conversation continues.
        """
        turn.readers -= 1
        if turn.readers or turn.log.ended or turn.stored:
            return
        if closed:
            turn.stop()
        else:
            self._stop_timers[turn.id] = asyncio.get_running_loop().call_later(self._grace, self._stop_unread, turn)

    def _stop_unread(self, turn: SocketTurn) -> None:
        self._stop_timers.pop(turn.id, None)
        turn.stop()

    def _on_end(self, task: asyncio.Task[None], turn: SocketTurn) -> None:
        self._tasks.discard(task)
        turn.on_stop = None
        if timer := self._stop_timers.pop(turn.id, None):
            timer.cancel()
        self._drop_timers[turn] = asyncio.get_running_loop().call_later(RETENTION_SECONDS, self._drop, turn)
        while sum(ended.log.size for ended in self._drop_timers) > MAX_RETAINED_SIZE:
            self._drop(next(iter(self._drop_timers)))

    def _drop(self, turn: SocketTurn) -> None:
        del self._turns[turn.id]
        self._drop_timers.pop(turn).cancel()  # a pending timer would keep the turn in memory
