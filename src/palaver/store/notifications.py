"""Notifications between the processes that share a store.

PostgreSQL carries them (LISTEN and NOTIFY). On SQLite every listening process has a datagram socket, whose address is
in the table of holders. The store is the record: a notification only says that there is something to read, and it may
be lost. A listener that has lost some for certain receives `Gap`.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from sqlalchemy import Connection, NullPool, create_engine, select, text

from palaver.encoding import Tagged, adapter
from palaver.store.database import Database
from palaver.store.schema import holders

_log = logging.getLogger(__name__)
CHANNEL = "palaver"
"""PostgreSQL's channel."""
_NOTIFY = text("SELECT pg_notify(:channel, payload) FROM unnest(CAST(:payloads AS text[])) AS payload")
MAX_REPLIES = 150
"""Replies in one notification: PostgreSQL's payloads are below 8,000 bytes."""
MAX_DATAGRAM = 65_536
SEND_SECONDS = 0.05
"""How long a sender waits for a process that does not read."""
CONNECT_SECONDS = 5.0
RECONNECT_SECONDS = (0.05, 2.0)
"""The first and the longest pause before a lost connection is opened again."""
PROBE_SECONDS = 10.0
"""After this time without a notification the connection is tested."""


@dataclass(frozen=True, slots=True)
class TokensStored:
    """Replies that are read in other processes have new tokens, or have ended."""

    type: Literal["tokens"] = field(default="tokens", kw_only=True, repr=False)
    reply_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommandStored:
    """The holder of this reply has a command to run. Without either flag it is read from the store."""

    type: Literal["command"] = field(default="command", kw_only=True, repr=False)
    reply_id: str
    stop: bool = False
    answer: bool = False


@dataclass(frozen=True, slots=True)
class RoundStopped:
    """The tool calls of this reply must not go on."""

    type: Literal["round_stopped"] = field(default="round_stopped", kw_only=True, repr=False)
    reply_id: str


@dataclass(frozen=True, slots=True)
class ConversationChanged:
    """A change for the pages of a user."""

    type: Literal["change"] = field(default="change", kw_only=True, repr=False)
    sender: str
    """The process that has shown it to its own clients already."""
    owner_id: str
    conversation_id: str
    what: str
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Engines must free what they hold of this conversation."""

    type: Literal["cache_cleared"] = field(default="cache_cleared", kw_only=True, repr=False)
    sender: str
    conversation_id: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Notifications were lost: read the store. Never sent."""

    type: Literal["gap"] = field(default="gap", kw_only=True, repr=False)


Notification = TokensStored | CommandStored | RoundStopped | ConversationChanged | CacheCleared | Gap
Receive = Callable[[Notification], None]
_ADAPTER = adapter(Annotated[Notification, Tagged])


def tokens_stored(reply_ids: Sequence[str]) -> Iterator[TokensStored]:
    """Split so that each fits into a payload."""
    for start in range(0, len(reply_ids), MAX_REPLIES):
        yield TokensStored(tuple(reply_ids[start : start + MAX_REPLIES]))


def encode_notification(notification: Notification) -> str:
    """Its payload."""
    return _ADAPTER.dump_json(notification).decode()


def notify(database: Database, connection: Connection, notification: Notification) -> None:
    """Notifies all processes, this one included, once the write transaction is committed."""
    database.notify(connection, encode_notification(notification))


class Notifications:
    """Sends and receives the notifications of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listener: _PostgresListener | _SocketListener | None = None
        self._receivers: tuple[Receive, ...] = ()
        self._socket: socket.socket | None = None
        """Sends datagrams; opened when the first one is sent."""
        self._sending = threading.Lock()
        self._stalled: set[str] = set()
        """Addresses that did not take the last notification: no sender waits for them."""
        database.deliver = self._deliver

    @property
    def address(self) -> str | None:
        """Where this process listens, on SQLite. Its holders have it in their rows."""
        return self._listener.address if isinstance(self._listener, _SocketListener) else None

    def listen(self, receive: Receive) -> bool:
        """Calls `receive`, in a thread, for every notification from now on. Returns False if this system has none."""
        self._receivers += (receive,)
        if self._listener is not None:
            return True
        if not self._database.is_sqlite:
            self._listener = _PostgresListener(self._database, self._receive)
        elif _has_unix_sockets():
            self._listener = _SocketListener(self._receive)
        return self._listener is not None

    def stop_listening(self, receive: Receive) -> None:
        self._receivers = tuple(one for one in self._receivers if one != receive)
        if not self._receivers:
            self._close_listener()

    def send(self, notifications: Iterable[Notification]) -> None:
        """Sends notifications that belong to no transaction."""
        self._deliver([encode_notification(one) for one in notifications])

    def close(self) -> None:
        self._close_listener()
        self._database.deliver = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _receive(self, notification: Notification) -> None:
        for receive in self._receivers:
            receive(notification)

    def _deliver(self, payloads: list[str]) -> None:
        """On PostgreSQL not in the transaction that they tell of: of those that notify, one commits at a time, so that
        the tokens and commands of all processes would wait while a message is synced."""
        if self._database.is_sqlite:
            self._send_datagrams(payloads)
            return
        with self._database.write_statement() as connection:
            connection.execute(_NOTIFY, {"channel": CHANNEL, "payloads": payloads})

    def _send_datagrams(self, payloads: list[str]) -> None:
        if not _has_unix_sockets():
            return
        query = select(holders.c.address).where(holders.c.address.is_not(None)).distinct()
        with self._database.read_transaction() as connection:
            addresses = connection.execute(query).scalars().all()
        if not addresses:
            return
        with self._sending:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.settimeout(SEND_SECONDS)
            for address in addresses:
                for payload in payloads:
                    self._send_datagram(self._socket, payload, address)

    def _send_datagram(self, sender: socket.socket, payload: str, address: str) -> None:
        """A process that is dead, or does not read, misses it: it looks into the store later."""
        try:
            sender.sendto(payload.encode(), socket.MSG_DONTWAIT if address in self._stalled else 0, address)
            self._stalled.discard(address)
        except TimeoutError:
            self._stalled.add(address)
        except OSError:
            pass


class _SocketListener:
    """A datagram socket in a folder that only this user can open."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._folder = Path(tempfile.mkdtemp(prefix="palaver-"))
        self.address = str(self._folder / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(self.address)
        except BaseException:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", self.address)
        self._thread.join()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while data := self._socket.recv(MAX_DATAGRAM):
            _decode_and_call(self._receive, data)


class _PostgresListener:
    """One connection that listens, and is opened again when it is lost."""

    def __init__(self, database: Database, receive: Receive) -> None:
        self._receive = receive
        self._engine = create_engine(
            database.url,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"connect_timeout": int(CONNECT_SECONDS)},
        )
        self._closed, self._waker = socket.socketpair()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._thread.start()
        self._listening.wait(CONNECT_SECONDS)

    def close(self) -> None:
        self._waker.send(b"x")
        self._thread.join()
        self._waker.close()
        self._closed.close()

    def _run(self) -> None:
        pause = RECONNECT_SECONDS[0]
        while True:
            try:
                with self._engine.connect() as connection:
                    driver: Any = connection.connection.driver_connection
                    driver.execute(f"LISTEN {CHANNEL}")
                    if self._listening.is_set():  # not the first connection
                        self._receive(Gap())
                    pause = RECONNECT_SECONDS[0]
                    self._listening.set()
                    self._read(driver)
                    return
            except Exception as error:
                _log.warning("no notifications from the database, trying again: %s", type(error).__name__)
                self._listening.set()
            if self._wait_closed(pause):
                return
            pause = min(2 * pause, RECONNECT_SECONDS[1])

    def _read(self, driver: Any) -> None:
        """Returns when the listener is closed; raises when the connection is lost."""
        with selectors.DefaultSelector() as selector:
            selector.register(driver.fileno(), selectors.EVENT_READ)
            selector.register(self._closed, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(PROBE_SECONDS)}
                if self._closed in ready:
                    return
                if not ready:
                    driver.execute("SELECT 1")
                for notification in driver.notifies(timeout=0):
                    _decode_and_call(self._receive, notification.payload.encode())

    def _wait_closed(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._closed, selectors.EVENT_READ)
            return bool(selector.select(seconds))


def _decode_and_call(receive: Receive, data: bytes) -> None:
    try:
        notification = _ADAPTER.validate_json(data)
    except ValueError:  # of another version of Palaver
        _log.debug("an unknown notification: %r", data[:100])
        return
    try:
        receive(notification)
    except Exception:
        _log.exception("a notification was not handled")


def _has_unix_sockets() -> bool:
    return os.name == "posix" and hasattr(socket, "AF_UNIX")
