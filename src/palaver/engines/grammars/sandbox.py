"""Tries a grammar where a crash, a hang or a lack of memory ends nothing but the trial."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

from palaver.constraints import Constraint, Grammar, Marked
from palaver.engines.grammars.compiler import named_ids
from palaver.errors import EngineClosed, EngineError
from palaver.phases import Vocabulary

_LENGTH = struct.Struct("!I")


def send(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Raises EOFError where the other side is gone."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return json.loads(_exactly(connection, size))


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    socket.send_fds(connection, [b"\0"], [descriptor])


def receive_descriptor(connection: socket.socket) -> int | None:
    """None where the other side is gone."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return descriptors[0] if data else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return bytes(data)


def pack_constraint(constraint: Constraint) -> dict[str, Any]:
    ids = constraint.ids if isinstance(constraint, Marked) else None
    return {"grammar": constraint.grammar.value, "text": constraint.text, "ids": ids}


def unpack_constraint(message: dict[str, Any]) -> Constraint:
    grammar, text, ids = Grammar(message["grammar"]), message["text"], message["ids"]
    return Constraint(grammar, text) if ids is None else Marked(grammar, text, tuple(ids))


WALL_SECONDS = 10.0
"""The longest that a trial may take, waiting for the processor included."""
_START_SECONDS = 30.0
"""Until a process that was just started, or builds another view of the vocabulary, takes the trial up."""
_END_SECONDS = 5.0
TOO_MUCH = "it takes too much time, memory or depth to compile"


class GrammarSandbox:
    """A warm process that compiles each grammar in a fork of itself. The first trial starts it, and one after its
    death starts it again."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the process, if none runs."""
        with self._lock:
            self._running()

    def why_not(self, constraint: Constraint) -> str | None:
        """Why the grammar is refused, or None. Blocks until the trial is over; trials run side by side.

        Raises EngineError where the trial could not be made.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._submit(theirs, named_ids(constraint))
            try:
                ours.settimeout(_START_SECONDS)
                receive(ours)
            except (EOFError, OSError) as error:
                raise EngineError("The grammar couldn't be tried: the sandbox's process didn't answer.") from error
            try:
                ours.settimeout(WALL_SECONDS + _END_SECONDS)
                send(ours, pack_constraint(constraint))
                why: str | None = receive(ours)["why"]
            except (EOFError, OSError):
                return TOO_MUCH
            return why

    def close(self) -> None:
        """Ends the process. Trials that run fail."""
        with self._lock:
            self._closed = True
            self._end()

    def _submit(self, theirs: socket.socket, named: tuple[int, ...]) -> None:
        with self._lock:
            connection = self._running()
            try:
                send_descriptor(connection, theirs.fileno())
                send(connection, named)
            except OSError as error:
                raise EngineError("The grammar couldn't be tried: the sandbox's process is gone.") from error

    def _running(self) -> socket.socket:
        if self._closed:
            raise EngineClosed
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "palaver.engines.grammars.trial", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection = ours
        ours.settimeout(_START_SECONDS)
        try:
            send(ours, [token.decode("latin-1") for token in self._vocabulary])
        except OSError as error:
            raise EngineError("The grammar couldn't be tried: the sandbox's process didn't start.") from error
        return ours

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
