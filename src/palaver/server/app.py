"""The server put together: routes over one service, inside the shell."""

from __future__ import annotations

from fastapi import FastAPI

from palaver import __version__
from palaver.chat.service import Service
from palaver.server import operation
from palaver.server.access import AccessLog
from palaver.server.callers import Callers
from palaver.server.conversations import routes as conversations
from palaver.server.document import describe
from palaver.server.failing import answer_errors
from palaver.server.floor import Floor
from palaver.server.metrics import Metrics
from palaver.server.openai import chat, completions, tokens
from palaver.server.page import routes as page
from palaver.server.page import session
from palaver.server.settings import ServerSettings
from palaver.server.shell import Shell
from palaver.server.state import State


class Server:
    """An ASGI application, and what its owner needs to end it well. The service is its owner's to enter and leave."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self.settings = settings
        self.access = AccessLog(settings.debug)
        self.state = State(service, settings, Metrics(), Floor(settings.limits.at_once), self.access)
        self.routes = _routes(self.state)
        callers = Callers(service.store, not settings.is_local, settings.secret, settings.port)
        self.asgi = Shell(self.routes, settings, callers, self.access, self.state.metrics, _is_open)

    async def close(self, grace: float) -> None:
        """Takes nothing more; what runs is waited for, then cut or put aside, and its readers are told."""
        self.state.closing.set()
        await self.state.floor.close(grace)
        await self.state.service.turns.park()


def _is_open(path: str) -> bool:
    return operation.is_open(path) or session.is_open(path)


def _routes(state: State) -> FastAPI:
    app = FastAPI(
        title="Palaver",
        version=__version__,
        description="The OpenAI API and the conversations of a self-hosted chat system.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.palaver = state
    answer_errors(app)
    describe(app)
    routers = (chat, completions, tokens, conversations, operation, page)
    for module in routers:
        app.include_router(module.router())
    return app
