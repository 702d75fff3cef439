"""Bodies are read whole, within bounds, before anybody looks at them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.types import Message, Receive

from palaver.server.errors import NotJson, TooLarge, TooSlow
from palaver.server.settings import Limits

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_NUMBERS = re.compile(rb"\b(?:NaN|Infinity)\b")


class Left(Exception):
    """The client went away before its body was whole, or before its answer began."""


async def read_body(receive: Receive, limits: Limits, announced: bytes | None) -> bytes:
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
            raise Left
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise TooLarge(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def check_json(body: bytes, depth: int) -> None:
    """Refuses what a parser would choke on, or what would be no text afterwards. Other mistakes are the parser's."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise NotJson(f"The body is not UTF-8 (byte {error.start}).") from None
    if body.count(b"[") + body.count(b"{") > depth and _depth(body) > depth:
        raise NotJson(f"The body is nested deeper than {depth} levels.")
    if _SURROGATE.search(body) or _NOT_NUMBERS.search(body):
        _check_values(body)


def _depth(body: bytes) -> int:
    deepest = now = 0
    for token in _TOKENS.finditer(body):
        first = body[token.start()]
        if first in b"[{":
            now += 1
            deepest = max(deepest, now)
        elif first in b"]}":
            now -= 1
    return deepest


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


def given_again(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes after it."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
