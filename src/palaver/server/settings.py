"""What an operator decides about the server. Everything has a default that is safe on one's own machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerLimits:
    head_bytes: int = 64 << 10
    """Of a request's line and headers together."""
    head_seconds: float = 15.0
    """For how long they may take to arrive."""
    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    """For how long a body may take to arrive as a whole."""
    depth: int = 100
    """How deep JSON may be nested."""
    json_containers: int = 40_000
    """Objects and arrays of one body: 10,000 messages with parts."""
    json_names: int = 100_000
    """Names in the objects of one body."""
    json_values: int = 300_000
    """Values of one body: the token ids of a long context are that many."""
    tokenize_chars: int = 1 << 20
    """Of a text that is to be tokenized for its own sake."""
    imported: int = 10_000
    """Conversations of one imported file."""
    messages: int = 10_000
    choices: int = 32
    """The largest `n`."""
    tools: int = 512
    at_once: int = 512
    """Replies of the OpenAI API in the making or waiting, of all users together."""
    requests_per_minute: int = 0
    """Of one key; 0 is no limit."""
    sockets: int = 64
    """WebSockets that one caller has open."""
    socket_idle_seconds: float = 600.0
    """A WebSocket is closed after so long without a turn."""
    socket_grace_seconds: float = 30.0
    """For so long a turn goes on whose WebSocket was cut, so that its client can come back to it."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8080
    prefix: str = ""
    """The path under which a proxy serves this; without a slash at its end."""
    hosts: tuple[str, ...] = ()
    """Further names the server may be called by."""
    origins: tuple[str, ...] = ()
    """Pages of other origins that may call, as in `https://chat.example`."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Parameters for requests that name none; see `palaver.chat.parameters`."""
    forced: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that go before whatever a request names."""
    any_variables: bool = False
    """Whether a request may set variables of the template that are no switches."""
    any_model: bool = False
    """Whether an administrator may load models beyond those at hand: folders and ids of the hub."""
    aliases: tuple[str, ...] = ()
    """Further names the model answers to."""
    voice: str = "espeak"
    """What speaks: espeak, or the folder or hub id of a text-to-speech model."""
    debug: bool = False
    """Whether the log holds what is said."""
    instance: str = ""
    """Says which server this is, to whoever found it by its announcement."""
    secret: str = field(default="", repr=False)
    """The token in the data folder: makes programs of the same user on this machine administrators."""
    login_code: str = field(default="", repr=False)
    """In the page's address (`/?login=CODE`) it is exchanged for the page's cookie. Of this run alone."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server: then no key is needed."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
