"""The file that names tool servers: the `mcpServers` JSON that other programs use, read as it is.

    {"mcpServers": {
        "files":   {"command": "npx", "args": ["-y", "some-server"], "env": {"TOKEN": "${TOKEN}"}},
        "weather": {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ..."}}
    }}

A server has a command (stdio) or a URL (streamable HTTP). Fields that Palaver does not use stay in the file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palaver.address_guard import BadAddress, parse_url
from palaver.errors import RequestError

try:
    import fcntl
except ImportError:  # Windows: two programs that change the file at the same time are not kept apart
    fcntl = None  # type: ignore[assignment]

FILE_NAME = "mcp.json"
DEMO = "demo"
MAX_SERVERS = 32
MAX_FILE_BYTES = 1 << 20
_KEY = "mcpServers"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]|_(?!_)){0,31}")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_HTTP_TYPES = ("http", "streamable-http", "streamableHttp", "streamable_http")


class BadToolServer(RequestError):
    """The configuration of a tool server is not valid."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A tool server. Its arguments, environment, address and headers may hold secrets: its representation has none."""

    name: str
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def transport(self) -> str:
        return "http" if self.url else "stdio"

    @property
    def endpoint(self) -> str:
        """The URL without its query, which may hold a key: for requests, which are logged."""
        return urlsplit(self.url)._replace(query="", fragment="").geturl()

    def to_json(self) -> dict[str, Any]:
        """The entry of the file."""
        if self.url:
            return {"type": "http", "url": self.url, **({"headers": dict(self.headers)} if self.headers else {})}
        entry: dict[str, Any] = {"command": self.command, "args": list(self.args)}
        return {**entry, **({"env": dict(self.env)} if self.env else {}), **({"cwd": self.cwd} if self.cwd else {})}


def check_server_name(name: str) -> str:
    """The name. It is the beginning of the names of its tools, which models may limit to 64 characters."""
    if not _NAME.fullmatch(name) or name.endswith("_"):
        raise BadToolServer(
            f"{name[:80]!r} can't be the name of a tool server: use up to 32 letters, digits, - and single _."
        )
    return name


def read_servers(path: Path) -> tuple[ServerConfig, ...]:
    """The enabled servers of the file; none if it does not exist. Raises BadToolServer."""
    servers = _read_entries(path)
    if len(servers) > MAX_SERVERS:
        raise BadToolServer(f"{path} names {len(servers)} tool servers: the limit is {MAX_SERVERS}.")
    parsed = [parse_server(name, entry) for name, entry in servers.items() if not _is_disabled(entry)]
    return tuple(parsed)


def add_server(path: Path, server: ServerConfig) -> None:
    """Writes the server into the file, which only its owner can read. Raises BadToolServer if the name is taken."""
    with _locked(path):
        document = _read_document(path)
        entries = document.setdefault(_KEY, {})
        if server.name in entries:
            raise BadToolServer(f"There is a tool server {server.name!r} already: remove it first.")
        if len(entries) >= MAX_SERVERS:
            raise BadToolServer(f"There are {MAX_SERVERS} tool servers already, which is the limit.")
        entries[server.name] = server.to_json()
        write_private(path, document)


def remove_server(path: Path, name: str) -> None:
    with _locked(path):
        document = _read_document(path)
        if name not in document.get(_KEY, {}):
            raise BadToolServer(f"There is no tool server {name!r} in {path}.")
        del document[_KEY][name]
        write_private(path, document)


def file_version(path: Path) -> tuple[int, ...]:
    """Changes whenever a server is added or removed, also by another process: each replaces the file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def parse_server(name: str, entry: Any, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """One entry of the file. `${NAME}` and `${NAME:-default}` stand for environment variables. Raises BadToolServer."""
    check_server_name(name)
    if not isinstance(entry, dict):
        raise BadToolServer(f"The tool server {name!r} must be an object with a command or a url.")
    entry = _expand(name, entry, os.environ if environment is None else environment)
    kind, command = entry.get("type") or entry.get("transport"), entry.get("command")
    url = entry.get("url") or entry.get("serverUrl")
    if kind == "sse":
        raise BadToolServer(f"The tool server {name!r} uses SSE, which is obsolete: use its streamable HTTP URL.")
    if isinstance(url, str) and not command and kind in (None, *_HTTP_TYPES):
        try:
            parse_url(url)
        except BadAddress as error:
            raise BadToolServer(f"The tool server {name!r} {error}.") from None
        return ServerConfig(name, url=url, headers=_texts(name, entry, "headers"))
    if isinstance(command, str) and command and not url and kind in (None, "stdio", "local"):
        args = entry.get("args") or []
        if not isinstance(args, list) or not all(isinstance(one, str) for one in args):
            raise BadToolServer(f"The args of the tool server {name!r} must be a list of texts.")
        cwd = entry.get("cwd")
        return ServerConfig(
            name, command, tuple(args), _texts(name, entry, "env"), cwd if isinstance(cwd, str) else None
        )
    raise BadToolServer(f"The tool server {name!r} must have either a command or a url.")


def server_from_words(
    name: str, words: Sequence[str], headers: Mapping[str, str] | None = None, env: Mapping[str, str] | None = None
) -> ServerConfig:
    """A server from the words of a command: a URL, a command with its arguments, or nothing for the demo server."""
    if not words and name == DEMO:
        words = (sys.executable, "-m", "palaver", "tools", "demo")
    if len(words) == 1 and "://" in words[0]:
        return parse_server(name, {"url": words[0], "headers": dict(headers or {})}, {})
    return parse_server(
        name, {"command": words[0] if words else "", "args": list(words[1:]), "env": dict(env or {})}, {}
    )


def _texts(name: str, entry: Mapping[str, Any], key: str) -> Mapping[str, str]:
    value = entry.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(one, str | int | float) for one in value.values()):
        raise BadToolServer(f"{key} of the tool server {name!r} must be an object of texts.")
    return {str(key): str(one) for key, one in value.items()}


def _expand(name: str, value: Any, environment: Mapping[str, str]) -> Any:
    match value:
        case str():
            return _VARIABLE.sub(lambda found: _variable(name, found, environment), value)
        case list():
            return [_expand(name, one, environment) for one in value]
        case dict():
            return {key: _expand(name, one, environment) for key, one in value.items()}
        case _:
            return value


def _variable(name: str, found: re.Match[str], environment: Mapping[str, str]) -> str:
    value = environment.get(found[1], found[2])
    if value is None:
        raise BadToolServer(f"The tool server {name!r} needs the environment variable {found[1]}, which is not set.")
    return value


def _is_disabled(entry: Any) -> bool:
    return isinstance(entry, dict) and (entry.get("disabled") is True or entry.get("enabled") is False)


def _read_entries(path: Path) -> Mapping[str, Any]:
    return dict(_read_document(path).get(_KEY, {}))


def _read_document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadToolServer(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise BadToolServer(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get(_KEY, {}), dict):
        raise BadToolServer(f'{path} must be an object with "{_KEY}", an object of servers by name.')
    return document


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes from changing the file. The lock is a file beside it, since the file is replaced."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "wb", opener=_private_opener) as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _private_opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_private(path: Path, document: Mapping[str, Any]) -> None:
    """Replaces the file. It may hold secrets: only its owner can read it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8", opener=_private_opener) as file:
            json.dump(document, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
