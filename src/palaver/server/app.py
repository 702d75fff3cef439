"""Builds the server: all routes over one service, inside the middleware."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

from palaver import __version__
from palaver.chat.service import Service
from palaver.server import admin, speech
from palaver.server.anthropic import routes as anthropic
from palaver.server.auth import Authenticator, is_loopback
from palaver.server.conversations import routes as conversations
from palaver.server.errors import install_error_handlers
from palaver.server.limits import ConcurrencyLimiter
from palaver.server.metrics import Metrics, TurnMetrics
from palaver.server.middleware import ProtectionMiddleware
from palaver.server.openai import completions
from palaver.server.openai import routes as openai
from palaver.server.openai.sampling_params import operator_parameters
from palaver.server.openapi import install_openapi
from palaver.server.page import routes as page
from palaver.server.responses import routes as responses
from palaver.server.responses.history import is_background
from palaver.server.settings import ServerSettings
from palaver.server.socket import routes as socket
from palaver.server.socket.registry import SocketRegistry
from palaver.server.state import ServerState
from palaver.voice.loader import SpeakerCache


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
        )
        service.turns.on_event = TurnMetrics(self.state.metrics).on_event
        service.should_continue = is_background
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
    app.include_router(openai.chat_router())
    app.include_router(completions.router())
    app.include_router(openai.tokens_router())
    for module in (speech, responses, anthropic, conversations, admin, socket, page):
        app.include_router(module.router())
    return app
