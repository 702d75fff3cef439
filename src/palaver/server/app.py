"""Builds the server, all routes over one service inside the middleware, and runs it with uvicorn: it listens before
the model is loaded, and shuts down gracefully."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute

from palaver import __version__
from palaver.chat.service import Service
from palaver.errors import BadParameter, PalaverError
from palaver.memory import collect_seldom
from palaver.server import admin, speech, transcriptions
from palaver.server.anthropic import routes as anthropic
from palaver.server.auth import Authenticator, is_loopback
from palaver.server.conversations import routes as conversations
from palaver.server.errors import install_error_handlers
from palaver.server.limits import ConcurrencyLimiter, limited_protocol
from palaver.server.metrics import Metrics, TurnMetrics
from palaver.server.middleware import ProtectionMiddleware
from palaver.server.openai import completions
from palaver.server.openai import routes as openai
from palaver.server.openai.sampling_params import operator_parameters
from palaver.server.openapi import install_openapi
from palaver.server.page import routes as page
from palaver.server.page import shared_page
from palaver.server.remote_media import RemoteMedia
from palaver.server.responses import conversations as openai_conversations
from palaver.server.responses import routes as responses
from palaver.server.responses.history import is_background
from palaver.server.settings import ServerSettings
from palaver.server.socket import routes as websocket
from palaver.server.socket.registry import SocketRegistry
from palaver.server.state import ServerState
from palaver.voice.speech import SpeakerCache


class Server:
    """The ASGI application and its shutdown. The service is entered and left by its owner."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self.settings = settings
        self.state = ServerState(
            service,
            settings,
            Metrics(),
            ConcurrencyLimiter(settings.limits.max_replies),
            Authenticator(service.store, not is_loopback(settings.host), settings.secret, settings.port),
            _socket_registry(settings),
            speakers=SpeakerCache(settings.voice),
            fetch_media=RemoteMedia().fetch if settings.remote_media else None,
        )
        service.turns.on_event = TurnMetrics(self.state.metrics).on_event
        service.should_continue = is_background
        if service.titles is not None:
            service.titles.is_busy = lambda: len(self.state.limiter) > 0
        if settings.forced:
            service.requests.adjust = lambda given, format: operator_parameters({}, given, settings.forced, format)
        self.routes = _routes(self.state)
        self.asgi = ProtectionMiddleware(self.routes, self.state, _is_public)

    async def close(self, grace: float) -> None:
        """Refuses new requests, waits up to `grace` seconds for running replies, then stops them and parks the turns.

        If the next server resumes interrupted turns, the parked ones are left for it to resume.
        """
        self.state.closing.set()
        turns = self.state.service.turns
        await asyncio.gather(self.state.limiter.close(grace), turns.drain(grace))
        await turns.park(leave=self.state.service.resume)
        await self.state.sockets.wait_closed()
        await self.state.speakers.close()
        await self.state.workers.close()


def _socket_registry(settings: ServerSettings) -> SocketRegistry:
    return SocketRegistry(settings.limits.socket_grace_seconds, settings.limits.sockets)


def _is_public(path: str) -> bool:
    return admin.is_public(path) or page.is_public(path)


def _routes(state: ServerState) -> FastAPI:
    app = FastAPI(
        title="Palaver",
        version=__version__,
        description="The APIs of OpenAI and Anthropic, and the conversations of a self-hosted chat system.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.palaver = state
    install_error_handlers(app)
    install_openapi(app)
    app.router.routes.extend(_all_routes())
    return app


@cache
def _all_routes() -> tuple[BaseRoute, ...]:
    """The routes of all APIs, in the order in which they match. They hold no state: requests find it in the app.

    FastAPI takes half a second to build their validators. `include_router` would do it twice, the second time when the
    first request comes.
    """
    routers = (
        openai.chat_router(),
        completions.router(),
        openai.tokens_router(),
        speech.router(),
        transcriptions.router(),
        responses.router(),
        openai_conversations.router(),
        anthropic.router(),
        *conversations.routers(),
        admin.router(),
        websocket.router(),
        shared_page.router(),
        *page.routers(),
    )
    return tuple(route for router in routers for route in router.routes)


BACKLOG = 2048
SWITCH_SECONDS = 0.001
"""After this time a thread leaves Python's interpreter to another one."""
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
        favour_latency()
        await running
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


def favour_latency() -> None:
    """Call once everything is imported. Nothing is answered during a collection of garbage; and the threads that call
    the store would wait 5 ms for the event loop's thread at each of their steps."""
    collect_seldom()
    sys.setswitchinterval(SWITCH_SECONDS)


def listen(settings: ServerSettings) -> socket.socket:
    """Raises BadParameter if the address is unknown or in use."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BadParameter("--host", settings.host, f"is not an address of this machine ({error.strerror})") from None
    family, _, _, _, address = found[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadParameter(
            "--port", settings.port, f"can't be listened on ({error.strerror}); choose another"
        ) from None


def server_url(settings: ServerSettings, listening: socket.socket, tls: bool) -> str:
    """The base URL, without a trailing slash. A name of this machine itself may stand for several addresses, at which
    other programs may listen: the URL has the one that the server has. Certificates are for names."""
    address, port = listening.getsockname()[:2]
    named = tls or not ip_address(address).is_loopback
    loopback = "::1" if listening.family == socket.AF_INET6 else "127.0.0.1"
    host = loopback if settings.host in ("0.0.0.0", "::", "") else settings.host if named else address
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
