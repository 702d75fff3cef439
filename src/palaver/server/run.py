"""Runs the server with uvicorn: it listens before the model is loaded, and shuts down gracefully."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from palaver.errors import BadParameter, PalaverError
from palaver.server.app import Server
from palaver.server.limits import limited_protocol
from palaver.server.settings import ServerSettings

BACKLOG = 2048
PING_SECONDS = 20.0
_QUIET_LIBRARIES = ("uvicorn", "uvicorn.error", "asyncio", "httpx", "httpcore", "alembic")


@dataclass(frozen=True, slots=True)
class TLSCertificate:
    """The files of a TLS certificate."""

    chain: Path
    key: Path | None = None


def socket_options(settings: ServerSettings) -> dict[str, Any]:
    """uvicorn's options for WebSockets: the size limit of bodies, no compression, and closed without a pong."""
    return {
        "ws": "websockets-sansio",
        "ws_max_size": settings.limits.body_bytes,
        "ws_ping_interval": PING_SECONDS,
        "ws_ping_timeout": PING_SECONDS,
        "ws_per_message_deflate": False,
    }


class UvicornServer(uvicorn.Server):
    """Shuts down in order: refuses new requests, lets replies finish for a while, parks turns, closes connections."""

    def __init__(self, server: Server, grace: float, certificate: TLSCertificate | None = None) -> None:
        self._palaver = server
        self._grace = grace
        self._hurry = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                server.asgi,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=limited_protocol(server.settings.limits),
                **socket_options(server.settings),
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, int(grace) + 5),
                ssl_certfile=certificate.chain if certificate else None,
                ssl_keyfile=certificate.key if certificate else None,
                proxy_headers=False,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal only ends the server, so that its caller can clean up. A second one skips the grace period."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurry.set()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in self.servers:
            listening.close()
        closing = asyncio.create_task(self._palaver.close(self._grace))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not closing.done():
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            closing = asyncio.create_task(self._palaver.close(0.0))
        await closing
        await super().shutdown(sockets)


async def run_server(serving: UvicornServer, listening: socket.socket, server: Server) -> None:
    """Runs until a signal ends it. Raises the error of loading the first model."""
    loading = asyncio.create_task(server.state.service.models.ready())
    running = asyncio.create_task(serving.serve(sockets=[listening]))
    try:
        await asyncio.wait({loading, running}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and isinstance(loading.exception(), PalaverError):
            serving.should_exit = True
        await running
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


def listen(settings: ServerSettings) -> socket.socket:
    """Raises BadParameter if the address is unknown or in use."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BadParameter("--host", settings.host, f"is no address of this machine ({error.strerror})") from None
    family, _, _, _, address = found[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadParameter(
            "--port", settings.port, f"can't be listened on ({error.strerror}); choose another"
        ) from None


def server_url(settings: ServerSettings, listening: socket.socket, tls: bool) -> str:
    """The base URL, without a trailing slash."""
    port = listening.getsockname()[1]
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}{settings.prefix}"


def log_to_stderr(debug: bool) -> None:
    """Logs Palaver's messages, and only the errors of libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logger = logging.getLogger("palaver")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    for name in _QUIET_LIBRARIES:
        library = logging.getLogger(name)
        library.handlers, library.propagate = [handler], False
        library.setLevel(logging.ERROR)
