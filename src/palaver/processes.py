"""Helpers for child processes: messages over a socket, descriptors, and the end with the parent."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import struct
import sys
from typing import Any

_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")


def die_with_parent() -> None:
    """Asks the Linux kernel to kill this process when its parent dies. Elsewhere the closed connection ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def send(connection: socket.socket, message: Any) -> None:
    """Sends a JSON value."""
    data = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receives a JSON value. Raises EOFError if the connection is closed."""
    (size,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    return json.loads(receive_bytes(connection, size))


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """Receives exactly that many bytes. Raises EOFError if the connection is closed before."""
    data = bytearray(size)
    view, received = memoryview(data), 0
    while received < size:
        count = connection.recv_into(view[received:])
        if not count:
            raise EOFError
        received += count
    return data


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    socket.send_fds(connection, [b"\0"], [descriptor])


def receive_descriptor(connection: socket.socket) -> int | None:
    """None if the connection is closed."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return descriptors[0] if data else None
