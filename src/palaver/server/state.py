"""The state that all routes of one server share, and its FastAPI dependencies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from palaver.chat.service import Service
from palaver.server.auth import Authenticator
from palaver.server.database_probe import DatabaseProbe
from palaver.server.limits import ConcurrencyLimiter
from palaver.server.metrics import Metrics
from palaver.server.openai.reply_index import ReplyIndex, TranscriptIndex
from palaver.server.responses.history import ResponseIndex
from palaver.server.settings import ServerSettings
from palaver.server.socket.registry import SocketRegistry
from palaver.server.workers import Workers
from palaver.voice.loader import SpeakerCache


@dataclass(frozen=True, slots=True)
class ServerState:
    service: Service
    settings: ServerSettings
    metrics: Metrics
    limiter: ConcurrencyLimiter
    authenticator: Authenticator
    sockets: SocketRegistry
    reply_index: ReplyIndex = field(default_factory=ReplyIndex)
    speakers: SpeakerCache = field(default_factory=SpeakerCache)
    workers: Workers = field(default_factory=Workers)
    transcripts: TranscriptIndex = field(default_factory=TranscriptIndex)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server starts to shut down: it ends streams that would otherwise stay open."""
    database_probe: DatabaseProbe = field(default_factory=DatabaseProbe)
    response_index: ResponseIndex = field(default_factory=ResponseIndex)
    response_watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By reply id: the tasks that watch running responses."""


def get_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.palaver
    return state


def get_service(request: Request) -> Service:
    return get_state(request).service


def get_closing(request: Request) -> asyncio.Event:
    return get_state(request).closing


StateDep = Annotated[ServerState, Depends(get_state)]
ServiceDep = Annotated[Service, Depends(get_service)]
ClosingDep = Annotated[asyncio.Event, Depends(get_closing)]
