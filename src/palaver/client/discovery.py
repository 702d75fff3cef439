"""Discovery of the user's own server: it announces itself by a private file in the data folder of its store.

Only a user who can read the store finds its server, and never the server of another store. The server proves that it
knows the secret before the secret is sent to it: another user's process may listen on the port of a dead server.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from enum import Enum, auto
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

HEALTH_TIMEOUT_S = 3.0
"""The timeout for the health check of an announced server."""

TOKEN = "token"
"""The name of the token's file in the data folder."""

MAX_NONCE = 64
"""The length of the longest nonce that a server signs."""

WRITE_TIMEOUT_S = 1.0
"""How long an empty token file counts as one that another process is about to write."""


@dataclass(frozen=True, slots=True)
class Announcement:
    url: str
    pid: int
    instance: str
    """Identifies the server: another one may have taken over the port. Not secret."""
    secret: str
    """The token in the data folder, which the server accepts as an administrator's key of the local user."""
    store: str = ""
    """The database's address without its password; empty for the folder's own database."""
    certificate: str = ""
    """Its TLS certificate; empty without TLS."""
    host: str = ""
    """The machine or container, where the address means the same; empty in files of earlier versions."""
    processes: str = ""
    """The running system and its process namespace, where `pid` means the same; empty if that is not known."""

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """How to verify the server: over TLS only by the announced certificate."""
        return pinned_context(self.certificate) if self.certificate else True


@contextmanager
def announce_server(
    folder: Path, url: str, secret: str, store: str = "", certificate: str = ""
) -> Iterator[Announcement]:
    """While entered, users who can read the folder find the server. It must answer `/health` with `sign_nonce`."""
    instance, places = secrets.token_hex(8), (_host(), _processes())
    announcement = Announcement(url.rstrip("/"), os.getpid(), instance, secret, _address(store), certificate, *places)
    path = _servers_folder(folder) / f"{announcement.instance}.json"
    _write(path, json.dumps(asdict(announcement)))
    try:
        yield announcement
    finally:
        path.unlink(missing_ok=True)


def sign_nonce(secret: str, instance: str, nonce: str) -> str:
    """Proves that a server knows the secret. The instance is part of the proof: all servers of a data folder have the
    same secret, and another one's answer could be passed on."""
    message = f"palaver health {instance} {nonce}".encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def local_token(folder: Path) -> str:
    """The token that proves that a client can read this folder; created if there is none.

    Processes that start at once get the same one: the first to create the file.
    """
    path = folder / TOKEN
    while not _is_written(path):
        _create(path, secrets.token_urlsafe(32))
    path.chmod(0o600)
    return path.read_text().strip()


def _is_written(path: Path) -> bool:
    """Whether the file has a text. One that stays empty is deleted."""
    end = time.monotonic() + WRITE_TIMEOUT_S
    with suppress(FileNotFoundError):
        while not path.read_text().strip():
            if time.monotonic() > end:
                path.unlink()
                break
            time.sleep(0.01)
        else:
            return True
    return False


def _create(path: Path, text: str) -> None:
    """Writes the file unless there is one, readable by its owner alone."""
    temporary = _temporary(path)
    _write_new(temporary, text)
    try:
        os.link(temporary, path)  # at once with its content, and never over another file
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        with suppress(FileExistsError):
            _write_new(path, text)
    finally:
        temporary.unlink()


async def find_server(folder: Path, store: str = "", url: str = "") -> Announcement | None:
    """The running server of this store that was started last; with a URL, that at this address. Files of this host's
    dead servers are removed: those of other hosts and containers may be alive, though they can't be reached from
    here."""
    for path in _newest_first(folder):
        announcement = _read(path)
        if announcement is None or announcement.store != _address(store) or url not in ("", announcement.url):
            continue
        if _is_process_dead(announcement):
            path.unlink(missing_ok=True)
            continue
        health = await _check_health(announcement)
        if health is _Health.RUNNING:
            return announcement
        if health is _Health.DEAD and announcement.host in ("", _host()):
            path.unlink(missing_ok=True)
    return None


def _host() -> str:
    """The host's name and, on Linux, its network: containers may have the same name."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _processes() -> str:
    """The boot and the process namespace on Linux, else the host's name; empty if they are not known."""
    if sys.platform != "linux":
        return socket.gethostname()
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_process_dead(announcement: Announcement) -> bool:
    """Whether the server's process has ended, as far as that can be seen from this one."""
    if not announcement.processes or announcement.processes != _processes():
        return False
    import psutil

    return not psutil.pid_exists(announcement.pid)


def _address(store: str) -> str:
    parts = urlsplit(store)
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user.partition(':')[0]}{at}{host}").geturl()


def _servers_folder(folder: Path) -> Path:
    servers = folder / "servers"
    servers.mkdir(mode=0o700, parents=True, exist_ok=True)
    return servers


def _write(path: Path, text: str) -> None:
    """Writes the file atomically, readable by its owner alone."""
    temporary = _temporary(path)
    _write_new(temporary, text)
    temporary.replace(path)


def _temporary(path: Path) -> Path:
    return path.with_suffix(f".{secrets.token_hex(4)}")


def _write_new(path: Path, text: str) -> None:
    """Raises FileExistsError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((folder / "servers").glob("*.json"), key=_time, reverse=True)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _read(path: Path) -> Announcement | None:
    """None for a file that is not an announcement, is of another user, or is readable by others."""
    try:
        status = path.stat()
        if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            return None
        return _parse(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _parse(value: Any) -> Announcement | None:
    """Ignores unknown names: the server may be newer. None without a secret, which no server could prove to know."""
    if not isinstance(value, dict):
        return None
    known = {one.name: value[one.name] for one in fields(Announcement) if one.name in value}
    if not all(isinstance(one, int if name == "pid" else str) for name, one in known.items()):
        return None
    return Announcement(**known) if known.get("secret") else None


class _Health(Enum):
    RUNNING = auto()
    DEAD = auto()
    """Its port is closed, or of another server."""
    UNKNOWN = auto()


async def _check_health(announcement: Announcement) -> _Health:
    """Whether this server runs at its address. The secret is not sent: another process may listen there. So the server
    proves that it knows the secret."""
    nonce = secrets.token_urlsafe(32)
    try:
        async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False, verify=announcement.trust) as client:
            health = (await client.get(f"{announcement.url}/health", params={"nonce": nonce})).json()
    except httpx.ConnectError as error:
        return _Health.DEAD if _is_refused(error) else _Health.UNKNOWN
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, ValueError):
        return _Health.UNKNOWN
    instance, proof = (health.get("instance"), health.get("proof")) if isinstance(health, dict) else (None, None)
    if instance != announcement.instance:
        return _Health.DEAD if instance else _Health.UNKNOWN
    expected = sign_nonce(announcement.secret, announcement.instance, nonce)
    is_proven = isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())
    return _Health.RUNNING if is_proven else _Health.UNKNOWN


def _is_refused(error: BaseException | None) -> bool:
    """Whether the connection was refused, at each of the host's addresses."""
    match error:
        case None:
            return False
        case ConnectionRefusedError():
            return True
        case BaseExceptionGroup():
            return all(map(_is_refused, error.exceptions))
        case _:
            return _is_refused(error.__cause__ or error.__context__)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def leaf_certificate(chain: Path) -> str:
    """The server's own certificate from a file, which may also hold its issuers' certificates and its key."""
    found = _CERTIFICATE.search(chain.read_text(encoding="ascii", errors="replace"))
    return found[0] + "\n" if found else ""


def pinned_context(certificate: str) -> ssl.SSLContext:
    """An SSL context that trusts exactly this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is pinned: its host names may differ
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context
