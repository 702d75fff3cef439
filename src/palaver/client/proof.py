"""The proof of a server's identity on each connection: another program may have taken the port of one that ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from palaver.client.discovery import find_server

Prove: TypeAlias = Callable[[], Awaitable[None]]
"""Raises httpx.ConnectError unless the right server listens at the address."""


def prove_server(folder: Path, store: str, url: str) -> Prove:
    """A server of this store must answer there, the one that was found or a later one."""

    async def prove() -> None:
        if await find_server(folder, store, url) is None:
            raise httpx.ConnectError("no server of this data folder answers there")

    return prove


def request_hooks(prove: Prove | None) -> dict[str, list[Callable[[httpx.Request], Awaitable[None]]]]:
    """Hooks of an `httpx.AsyncClient`, which call `prove` for each new connection, between connecting and sending."""
    if prove is None:
        return {}

    async def add_trace(request: httpx.Request) -> None:
        is_new = False

        async def trace(event: str, info: Mapping[str, Any]) -> None:
            nonlocal is_new
            if event.endswith(".connect_tcp.complete"):  # also through a proxy
                is_new = True
            elif is_new and event.endswith(".send_request_headers.started"):
                await prove()

        request.extensions["trace"] = trace

    return {"request": [add_trace]}
