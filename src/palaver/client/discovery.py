"""A server of one's own on this machine is found by a private file in the folder of the store that it serves.

So only whoever can read the store is led to its server, and never to the server of another store.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from palaver.client.connection import pinned_context

PATIENCE_S = 3.0
"""A server that does not answer for so long is not there; where nobody listens that is known at once."""

TOKEN = "token"
"""The file in the data folder that holds it."""


@dataclass(frozen=True, slots=True)
class Announcement:
    url: str
    pid: int
    instance: str
    """Says which server answers: another one may have taken over the port. No secret."""
    secret: str = ""
    """The token in the data folder, which this server takes for an administrator's key of the local user."""
    store: str = ""
    """The database's address without its password, where it is not the folder's own."""
    certificate: str = ""
    """What it shows over TLS."""

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """Whom to trust at its address: over TLS nobody but the server that wrote this."""
        return pinned_context(self.certificate) if self.certificate else True


@contextmanager
def announce_server(
    folder: Path, url: str, secret: str = "", store: str = "", certificate: str = ""
) -> Iterator[Announcement]:
    """Inside, the server can be found by whoever may read the folder of its store."""
    told = Announcement(url.rstrip("/"), os.getpid(), secrets.token_hex(8), secret, _address(store), certificate)
    path = _place(folder) / f"{told.pid}.json"
    _write(path, json.dumps(asdict(told)))
    try:
        yield told
    finally:
        path.unlink(missing_ok=True)


def local_token(folder: Path) -> str:
    """The token that proves to a server of this folder that its client may read it; made where there is none."""
    path = folder / TOKEN
    if not path.is_file() or not path.read_text().strip():
        _write(path, secrets.token_urlsafe(32))
    path.chmod(0o600)
    return path.read_text().strip()


async def find_server(folder: Path, store: str = "") -> Announcement | None:
    """The server of this store that was started last and is there; what dead ones left is removed."""
    for path in _newest_first(folder):
        told = _read(path)
        if told is None or told.store != _address(store):
            continue
        if not _lives(told.pid):
            path.unlink(missing_ok=True)
        elif await _answers(told):
            return told
    return None


def _address(store: str) -> str:
    parts = urlsplit(store)
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user.partition(':')[0]}{at}{host}").geturl()


def _place(folder: Path) -> Path:
    place = folder / "servers"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and for nobody else's eyes from the first moment."""
    beside = path.with_suffix(f".{secrets.token_hex(4)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    beside.replace(path)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((folder / "servers").glob("*.json"), key=_time, reverse=True)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _read(path: Path) -> Announcement | None:
    """None for what is no announcement, or was written by somebody else, or could be read by others."""
    try:
        status = path.stat()
        if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            return None
        return Announcement(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _lives(pid: int) -> bool:
    if os.name != "posix":  # elsewhere asking would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _answers(told: Announcement) -> bool:
    """Whether it is that very server. The secret is not sent to whoever else may be there."""
    try:
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False, verify=told.trust) as client:
            health = (await client.get(f"{told.url}/health")).json()
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, ValueError):
        return False
    return isinstance(health, dict) and health.get("instance") == told.instance
