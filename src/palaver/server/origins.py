"""Who may reach a server that asks for no key: programs of this machine, and no page from elsewhere.

A page of any site can send requests to a server on the reader's own machine, under the site's name (Origin) or, by
turning that name into a local address, under its own host (Host). Both are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from palaver.server.errors import ForeignCaller
from palaver.server.settings import ServerSettings, is_loopback

_FORWARDING = frozenset({b"forwarded", b"via", b"x-real-ip"})
_FORWARDING_PREFIX = b"x-forwarded-"


def is_direct(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a program of this machine sent the request for itself: to a loopback name, and not through a proxy."""
    if any(name in _FORWARDING or name.startswith(_FORWARDING_PREFIX) for name in headers):
        return False
    return is_loopback(_name(headers.get(b"host", b"").decode("latin-1").strip().lower()))


class Gate:
    def __init__(self, settings: ServerSettings) -> None:
        self._hosts = frozenset(name.lower() for name in settings.hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.origins)
        self._local = settings.is_local

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ForeignCaller."""
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if (self._local or self._hosts) and not self._is_ours(_name(host)):
            raise ForeignCaller(f"The host {host[:100]!r} is none of this server's names; --allow-host adds one.")
        origin = headers.get(b"origin")
        if origin is not None and not self.allows(origin.decode("latin-1"), host):
            raise ForeignCaller("Pages of another origin may not call this server; --allow-origin adds one.")

    def allows(self, origin: str, host: str) -> bool:
        """A page from this very server, or one that the operator named."""
        lowered = origin.rstrip("/").lower()
        return lowered in self._origins or (bool(host) and lowered in (f"http://{host}", f"https://{host}"))

    def is_named(self, origin: str) -> bool:
        return origin.rstrip("/").lower() in self._origins

    def _is_ours(self, name: str) -> bool:
        return name in self._hosts or (self._local and is_loopback(name))


def _name(host: str) -> str:
    """Without the port. Nothing where it can't be read."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "") if not parts.username and parts.path == "" and not parts.query else ""
    except ValueError:
        return ""
