"""Messages between the sandbox and its process: JSON after its length, and descriptors of sockets."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from palaver.constraints import Constraint, Grammar, Marked

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
