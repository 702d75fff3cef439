"""The settings and limits of the server. The defaults are safe on a personal machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerLimits:
    head_bytes: int = 64 << 10
    """The size of the request line and headers together."""
    head_seconds: float = 15.0
    """How long they may take to arrive."""
    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    """How long a body may take to arrive."""
    depth: int = 100
    """How deep JSON may be nested."""
    json_containers: int = 40_000
    """Objects and arrays of one body: 10,000 messages with parts."""
    json_names: int = 100_000
    """Names in the objects of one body."""
    json_values: int = 300_000
    """Values of one body: the token ids of a long context are that many."""
    tokenize_chars: int = 1 << 20
    """Characters of a text for `/v1/tokenize`."""
    imported: int = 10_000
    """Conversations of one imported file."""
    messages: int = 10_000
    choices: int = 32
    """The largest `n`."""
    tools: int = 512
    max_replies: int = 512
    """Stateless replies that run or wait, of all users together."""
    requests_per_minute: int = 0
    """Of one caller; 0 is no limit."""
    sockets: int = 64
    """Open WebSockets of one caller."""
    socket_idle_seconds: float = 600.0
    """A WebSocket without a turn is closed after this time."""
    socket_grace_seconds: float = 30.0
    """How long a turn continues after its WebSocket was cut, so that the client can reconnect to it."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8080
    prefix: str = ""
    """The path under which a proxy serves this, without a trailing slash."""
    hosts: tuple[str, ...] = ()
    """Further allowed host names."""
    origins: tuple[str, ...] = ()
    """Allowed origins of other pages, such as `https://chat.example`."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Parameters for requests that name none; see `palaver.chat.parameters`."""
    forced: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that override those of requests."""
    any_variables: bool = False
    """Whether requests may set template variables that are no switches."""
    remote_media: bool = False
    """Whether requests may name media by their address, which the server downloads."""
    any_model: bool = False
    """Whether an administrator may load further models by their hub id."""
    aliases: tuple[str, ...] = ()
    """Further names of the loaded model."""
    voice: str = "espeak"
    """The speaker: espeak, or the folder or hub id of a text-to-speech model."""
    share: bool = False
    """Whether users may share conversations by links that need no key."""
    debug: bool = False
    """Whether request bodies are logged."""
    instance: str = ""
    """The id of this server, by which clients that found its announcement recognise it."""
    secret: str = field(default="", repr=False)
    """The token in the data folder: makes programs of the same user on this machine administrators."""
    login_code: str = field(default="", repr=False)
    """Exchanged for the page's cookie at `/?login=CODE`. Valid for this run only."""
