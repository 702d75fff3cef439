"""What the routes of one server share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from palaver.chat.service import Service
from palaver.server.access import AccessLog
from palaver.server.callers import Callers
from palaver.server.database_probe import DatabaseProbe
from palaver.server.floor import Floor
from palaver.server.metrics import Metrics
from palaver.server.openai.remembering import Remembered
from palaver.server.openai.voicing import Transcripts
from palaver.server.responses.branches import Branches
from palaver.server.settings import ServerSettings
from palaver.server.socket.sockets import Sockets
from palaver.server.workers import Workers
from palaver.voice.loader import SpeakerCache


@dataclass(frozen=True, slots=True)
class State:
    service: Service
    settings: ServerSettings
    metrics: Metrics
    floor: Floor
    access: AccessLog
    callers: Callers
    sockets: Sockets
    remembered: Remembered = field(default_factory=Remembered)
    speakers: SpeakerCache = field(default_factory=SpeakerCache)
    workers: Workers = field(default_factory=Workers)
    transcripts: Transcripts = field(default_factory=Transcripts)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to shut down: streams without an end of their own are ended."""
    database: DatabaseProbe = field(default_factory=DatabaseProbe)
    branches: Branches = field(default_factory=Branches)
    attending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By the ids of their replies: what watches over responses that run."""


def state_of(request: Request) -> State:
    state: State = request.app.state.palaver
    return state


def _service(request: Request) -> Service:
    return state_of(request).service


def _closing(request: Request) -> asyncio.Event:
    return state_of(request).closing


StateOf = Annotated[State, Depends(state_of)]
ServiceOf = Annotated[Service, Depends(_service)]
ClosingOf = Annotated[asyncio.Event, Depends(_closing)]
