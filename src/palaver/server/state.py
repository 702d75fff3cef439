"""What the routes of one server share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from palaver.chat.service import Service
from palaver.server.access_log import AccessLog
from palaver.server.auth import Authenticator
from palaver.server.database_probe import DatabaseProbe
from palaver.server.limits import ConcurrencyLimiter
from palaver.server.metrics import Metrics
from palaver.server.openai.audio import TranscriptIndex
from palaver.server.openai.reply_index import ReplyIndex
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
    floor: ConcurrencyLimiter
    access: AccessLog
    callers: Authenticator
    sockets: SocketRegistry
    remembered: ReplyIndex = field(default_factory=ReplyIndex)
    speakers: SpeakerCache = field(default_factory=SpeakerCache)
    workers: Workers = field(default_factory=Workers)
    transcripts: TranscriptIndex = field(default_factory=TranscriptIndex)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to shut down: streams without an end of their own are ended."""
    database: DatabaseProbe = field(default_factory=DatabaseProbe)
    branches: ResponseIndex = field(default_factory=ResponseIndex)
    attending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By the ids of their replies: what watches over responses that run."""


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.palaver
    return state


def _service(request: Request) -> Service:
    return state_of(request).service


def _closing(request: Request) -> asyncio.Event:
    return state_of(request).closing


StateOf = Annotated[ServerState, Depends(state_of)]
ServiceOf = Annotated[Service, Depends(_service)]
ClosingOf = Annotated[asyncio.Event, Depends(_closing)]
