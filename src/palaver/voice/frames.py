"""What a voice's process and ours tell each other: a line of JSON, then bytes."""

from __future__ import annotations

import json
from typing import IO, Any


def write(stream: IO[bytes], value: dict[str, Any], data: bytes = b"") -> None:
    stream.write(json.dumps({**value, "bytes": len(data)}).encode() + b"\n" + data)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """None at the end."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    value: dict[str, Any] = json.loads(line)
    data = stream.read(value["bytes"])
    return (value, data) if len(data) == value["bytes"] else None
