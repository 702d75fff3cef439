"""Fronts: several servers on one store. A client may use any of them, whichever process runs its turn.

A turn runs in the process that holds it (`store/leases.py`). Commands for it are stored and its holder is notified; its
tokens are read from the store by the other processes, which are notified of new ones; changes are shown on the pages of
all processes. Notifications only save waiting: what one of them says is found in the store without it too, later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, assert_never

from palaver.chat.interface import ConversationChange
from palaver.chat.turn_log import outlast
from palaver.chat.turns import ChangeFeed, Turns
from palaver.errors import PalaverError
from palaver.store import NotFound, Store
from palaver.store.notifications import (
    CacheCleared,
    CommandStored,
    ConversationChanged,
    Gap,
    Notification,
    RoundStopped,
    TokensStored,
)
from palaver.store.records import new_id
from palaver.store.replies import NewTokens, TurnCommand

_log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""How often the store is read without a notification, in case one was lost."""
POLL_SECONDS = 0.1
"""The same on systems without notifications."""
READ_SECONDS = 0.008
"""How long readers wait for the tokens of other replies, after the start of the read before."""


class Fronts:
    """The link of this process to the others. Enter it before the turns: their lease has its address."""

    def __init__(self, store: Store, turns: Turns, changes: ChangeFeed) -> None:
        self._store = store
        self._turns = turns
        self._changes = changes
        self._id = new_id()
        self.on_round_stopped: Callable[[str], None] = lambda reply_id: None
        """Called with a reply whose tool calls must not go on."""
        self.on_cache_cleared: Callable[[str], Coroutine[Any, Any, None]] | None = None
        """Called with a conversation whose cache another process was asked to clear."""
        self.look_seconds = LOOK_SECONDS
        self._followers: dict[str, set[asyncio.Event]] = {}
        self._due: set[str] = set()
        """Replies with new tokens whose readers are woken soon, together."""
        self._read_at = 0.0
        """When the last read began, by the clock of the event loop."""
        self._reads: list[tuple[str, int, asyncio.Future[NewTokens]]] = []
        self._reading: asyncio.Task[None] | None = None
        self._outgoing: list[Notification] = []
        self._sending: asyncio.Task[None] | None = None
        self._command_due = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._receiver: Callable[[Notification], None] | None = None
        self._commands: asyncio.Task[None]

    async def __aenter__(self) -> Fronts:
        loop = asyncio.get_running_loop()

        def receive(notification: Notification) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._receive, notification)

        self._receiver = receive
        if not await asyncio.to_thread(self._store.notifications.listen, receive):
            self.look_seconds = POLL_SECONDS
        self._changes.forward = self._forward_change
        self._commands = asyncio.create_task(self._run_commands())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._changes.forward = None
        running = [task for task in (self._commands, self._reading, *self._tasks) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)
        assert self._receiver is not None
        await asyncio.to_thread(self._store.notifications.stop_listening, self._receiver)

    # readers

    @contextmanager
    def follow(self, reply_id: str) -> Iterator[TokenFollower]:
        """Follows a reply that another process writes. The reply must be watched: see `Replies.watch`."""
        woken = asyncio.Event()
        self._followers.setdefault(reply_id, set()).add(woken)
        try:
            yield TokenFollower(self, reply_id, woken)
        finally:
            self._followers[reply_id].discard(woken)
            if not self._followers[reply_id]:
                del self._followers[reply_id]

    async def read(self, reply_id: str, after: int) -> NewTokens:
        """The tokens of a reply after that number. Reads of all readers that wait are one transaction."""
        found: asyncio.Future[NewTokens] = asyncio.get_running_loop().create_future()
        self._reads.append((reply_id, after, found))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all())
        return await found

    async def _read_all(self) -> None:
        while self._reads:
            await asyncio.sleep(0)  # lets the readers that were woken together add theirs
            reads, self._reads = self._reads, []
            self._read_at = asyncio.get_running_loop().time()
            first: dict[str, int] = {}
            for reply_id, after, _ in reads:
                first[reply_id] = min(after, first.get(reply_id, after))
            try:
                new = await outlast(self._store.replies.read_new, first)
            except BaseException as error:
                for _, _, found in reads:
                    if not found.done():
                        found.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
                if not isinstance(error, Exception):
                    raise
                continue
            for reply_id, after, found in reads:
                if found.done():
                    continue
                if reply_id not in new:
                    found.set_exception(NotFound("reply", reply_id))
                else:
                    steps = new[reply_id].steps[after - first[reply_id] :]
                    found.set_result(replace(new[reply_id], steps=steps))

    # commands

    async def _run_commands(self) -> None:
        while True:
            await self._turns.wait_running()  # an idle server does not look
            with suppress(TimeoutError):
                async with asyncio.timeout(self.look_seconds):
                    await self._command_due.wait()
            self._command_due.clear()
            if not self._turns.running:
                continue
            try:
                await self._turns.run_commands()
            except PalaverError as error:
                _log.warning("commands for turns could not be read: %s", error)
            except Exception:
                _log.exception("a command for a turn failed")

    # what this process tells the others

    def clear_cache(self, conversation_id: str) -> None:
        """The engines of all processes free what they hold of the conversation."""
        self._send(CacheCleared(self._id, conversation_id))

    def _forward_change(self, owner: str, change: ConversationChange) -> None:
        self._send(ConversationChanged(self._id, owner, change.conversation_id, change.what, change.message_id))

    def _send(self, notification: Notification) -> None:
        self._outgoing.append(notification)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            try:
                await asyncio.to_thread(self._store.notifications.send, outgoing)
            except PalaverError as error:
                _log.warning("other servers were not notified: %s", error)
            except Exception:
                _log.exception("other servers were not notified")

    # what the others tell this process

    def _receive(self, notification: Notification) -> None:
        match notification:
            case TokensStored(reply_ids=ids):
                self._wake_soon(ids)
            case CommandStored(reply_id=id, stop=stop, answer=answer):
                if stop or answer:
                    self._turns.run_command(TurnCommand(id, stop, answer))
                elif self._turns.get(id) is not None:
                    self._command_due.set()
            case RoundStopped(reply_id=id):
                self.on_round_stopped(id)
            case ConversationChanged(sender=sender):
                if sender != self._id:
                    change = ConversationChange(
                        notification.conversation_id, notification.what, notification.message_id
                    )
                    self._changes.deliver(notification.owner_id, change)
            case CacheCleared(sender=sender, conversation_id=id):
                if sender != self._id and self.on_cache_cleared is not None:
                    self._spawn(self.on_cache_cleared(id))
            case Gap():
                self._command_due.set()
                self._wake_soon(self._followers)
                self._changes.deliver_missed()
            case _:
                assert_never(notification)

    def _wake_soon(self, reply_ids: Iterable[str]) -> None:
        """Wakes the readers of these replies: at once after a pause, else when the last read was a while ago. A read
        costs the same for one reply as for many."""
        if not self._due:
            loop = asyncio.get_running_loop()
            loop.call_at(self._read_at + READ_SECONDS, self._wake_due)
        self._due.update(reply_ids)

    def _wake_due(self) -> None:
        due, self._due = self._due, set()
        for id in due:
            for woken in self._followers.get(id, ()):
                woken.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class TokenFollower:
    """Reads the tokens that another process stores."""

    def __init__(self, fronts: Fronts, reply_id: str, woken: asyncio.Event) -> None:
        self._fronts = fronts
        self._reply_id = reply_id
        self._woken = woken

    async def read(self, after: int) -> NewTokens:
        """Waits for a notification, for up to `look_seconds`, and reads what is new."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._fronts.look_seconds):
                await self._woken.wait()
        self._woken.clear()
        return await self._fronts.read(self._reply_id, after)
