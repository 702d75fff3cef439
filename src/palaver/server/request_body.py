"""Bodies are read whole, within bounds, before anybody looks at them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.types import Message, Receive

from palaver.server.errors import NotJson, TooLarge, TooSlow
from palaver.server.settings import ServerLimits

_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}:,]', re.DOTALL)
_MANY_QUOTES = 200_000
_SUSPECT = (b"\\ud", b"\\uD", b"NaN", b"Infinity")
"""What a lone surrogate, or a number that JSON does not have, is written with. Looked for as plain strings: a pattern
would hold up every other thread for as long as it takes to go through a large body."""


class ClientDisconnected(Exception):
    """The client went away before its body was whole, or before its answer began."""


async def read_body(receive: Receive, limits: ServerLimits, announced: bytes | None) -> bytes:
    """The whole body. TooLarge as early as it can be known, TooSlow where it does not come."""
    if announced is not None and announced.isdigit() and int(announced) > limits.body_bytes:
        raise TooLarge(limits.body_bytes)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(receive, limits.body_bytes)
    except TimeoutError:
        raise TooSlow(limits.body_seconds) from None


async def _read(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise TooLarge(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def check_json(body: bytes, limits: ServerLimits) -> None:
    """Refuses what costs a parser too much, or what would be no text afterwards. Other mistakes are the parser's."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise NotJson(f"The body is not UTF-8 (byte {error.start}).") from None
    if _may_exceed(body, limits):
        _check_shape(body, limits)
    if any(part in body for part in _SUSPECT):
        _check_values(body)


def _may_exceed(body: bytes, limits: ServerLimits) -> bool:
    """A quick look that takes what is inside of texts for structure, too."""
    containers = body.count(b"[") + body.count(b"{")
    least = min(limits.depth, limits.json_containers)
    return containers > least or body.count(b":") > limits.json_names or body.count(b",") > limits.json_values


def _check_shape(body: bytes, limits: ServerLimits) -> None:
    """Depth and counts, before a parser builds millions of values from a few megabytes."""
    depth = containers = names = values = 0
    shape = _without_texts(body) if body.count(b'"') < _MANY_QUOTES else body
    for token in _TOKENS.finditer(shape):
        first = shape[token.start()]
        if first in b"[{":
            depth += 1
            containers += 1
            if depth > limits.depth:
                raise NotJson(f"The body is nested deeper than {limits.depth} levels.")
            if containers > limits.json_containers:
                raise NotJson(f"The body holds more than {limits.json_containers} objects and arrays.")
        elif first in b"]}":
            depth -= 1
        elif first in b":":
            names += 1
            if names > limits.json_names:
                raise NotJson(f"The objects of the body hold more than {limits.json_names} names.")
        elif first in b",":
            values += 1
            if values > limits.json_values:
                raise NotJson(f"The body holds more than {limits.json_values} values.")


def _without_texts(body: bytes) -> bytes:
    """What stands between the texts. Much quicker for long ones than a pattern, which holds up every other thread."""
    return b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def _check_values(body: bytes) -> None:
    def refuse(name: str) -> Any:
        raise NotJson(f"{name} is no number.")

    try:
        value = json.loads(body, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotJson("A text of the body holds half of a character (a lone surrogate).") from None
    except (ValueError, RecursionError):
        return


def replay_body(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes after it."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
