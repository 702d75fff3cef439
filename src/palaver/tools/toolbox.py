"""The tool servers of all users: those of the operator, and those that each user added.

A user reaches the operator's servers and their own, never those of others. Servers that users add over HTTP are at
public addresses only, and in a file of their own, which only the server's account can read.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palaver.address_guard import AddressGuard
from palaver.tools.config import (
    MAX_SERVERS,
    BadToolServer,
    ServerConfig,
    add_server,
    check_server_name,
    file_version,
    read_servers,
    remove_server,
)
from palaver.tools.oauth import SignIn
from palaver.tools.servers import (
    SEPARATOR,
    ServerCard,
    ServerResource,
    ServerTool,
    ToolOutcome,
    ToolServers,
    ToolServerState,
)
from palaver.tools.transports import ToolLimits

TOO_SLOW = "is not connected yet"
USERS_FOLDER = "tools"
"""The folder of the servers of users, in the data folder."""
TOKENS_FOLDER = "tokens"
"""The folder of the tokens of sign-ins in it, one folder for each user."""
OPERATOR = "_operator"
"""The name of the folder for servers of the operator's file."""
MAX_SIGN_INS = 32
LIST_SECONDS = 30.0
"""How long a turn waits for the tools of its servers. Those that are not there by then are not offered."""


@dataclass(frozen=True, slots=True)
class OperatorServers:
    """The servers of the operator's file."""

    servers: tuple[ServerConfig, ...] = ()
    file: Path | None = None
    """The file, if local users may add servers to it, also commands."""
    only_for: str | None = None
    """The one user who may use them; None is everyone."""


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Some tools of a server: by their names at the server, or those that the server says only read."""

    names: frozenset[str] | None = None
    read_only: bool | None = None

    def matches(self, tool: ServerTool) -> bool:
        named = self.names is None or tool.tool in self.names
        return named and (self.read_only is None or tool.read_only == self.read_only)


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """Which tools of a server a turn offers, and which need an approval, as the `mcp` tools of OpenAI's API say it."""

    allowed: ToolFilter | None = None
    always: ToolFilter | None = None
    never: ToolFilter | None = None

    def allows(self, tool: ServerTool) -> bool:
        return self.allowed is None or self.allowed.matches(tool)

    def approval(self, tool: ServerTool) -> str | None:
        """ "always" or "never"; None: the user's rules decide."""
        if self.always is not None and self.always.matches(tool):
            return "always"
        return "never" if self.never is not None and self.never.matches(tool) else None


def parse_policy(value: Mapping[str, Any]) -> ToolPolicy:
    """From `allowed_tools` and `require_approval`. Raises ValueError with the name of the field that is wrong."""
    if unknown := set(value) - {"allowed_tools", "require_approval"}:
        raise ValueError(min(unknown))
    allowed, approval = value.get("allowed_tools"), value.get("require_approval")
    match approval:
        case None:
            filters: Mapping[str, Any] = {}
        case "always" | "never":
            filters = {approval: {}}
        case Mapping() if set(approval) <= {"always", "never"}:
            filters = approval
        case _:
            raise ValueError("require_approval")
    always, never = (_parse_filter("require_approval", filters.get(name)) for name in ("always", "never"))
    return ToolPolicy(_parse_filter("allowed_tools", allowed), always, never)


def _parse_filter(field: str, value: Any) -> ToolFilter | None:
    if value is None:
        return None
    if isinstance(value, list):
        value = {"tool_names": value}
    if not isinstance(value, Mapping) or not set(value) <= {"tool_names", "read_only"}:
        raise ValueError(field)
    names, read_only = value.get("tool_names"), value.get("read_only")
    is_list = isinstance(names, list) and all(isinstance(one, str) for one in names)
    if not (names is None or is_list) or not (read_only is None or isinstance(read_only, bool)):
        raise ValueError(field)
    return ToolFilter(None if names is None else frozenset(names), read_only)


@dataclass(eq=False)
class Toolbox:
    operator: OperatorServers = field(default_factory=OperatorServers)
    folder: Path | None = None
    """Where the servers of users are kept, one file each; None: users can't add servers."""
    limits: ToolLimits = field(default_factory=ToolLimits)
    guard: AddressGuard | None = field(default_factory=AddressGuard)
    """For the servers that users add."""
    _shared: ToolServers | None = None
    _own: dict[str, ToolServers] = field(default_factory=dict)
    _sign_ins: dict[str, tuple[str, str, SignIn]] = field(default_factory=dict)
    """By their state: who began it, the name of the server, and the sign-in."""
    _versions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By owner: the version of the file that was read."""
    _lent: dict[str, dict[str, ToolServers]] = field(default_factory=dict)
    """By owner and name: the servers that requests named by their URL."""

    def names(self, owner: str) -> tuple[str, ...]:
        return (*self._shared_for(owner).names, *self._of(owner).names)

    async def connect(self, owner: str, names: Iterable[str] | None = None) -> tuple[ServerCard, ...]:
        """The cards of these servers, by default of all, once they are connected. Raises BadToolServer for unknown
        names."""
        wanted = self.names(owner) if names is None else tuple(names)
        groups = [self._group(owner, name) for name in wanted]
        await asyncio.gather(*(group.connect([name]) for group, name in zip(groups, wanted, strict=True)))
        return self.cards(owner, wanted)

    def cards(self, owner: str, names: Iterable[str] | None = None) -> tuple[ServerCard, ...]:
        """The cards of these servers as they are now."""
        own = self._of(owner)
        wanted = self.names(owner) if names is None else names
        return tuple(replace(self._group(owner, name).card(name), is_own=name in own.names) for name in wanted)

    async def tools(
        self, owner: str, names: Iterable[str], connect: bool = True
    ) -> tuple[tuple[ServerTool, ...], dict[str, str]]:
        """The tools of these servers, and why those of others are not offered: they fail or take too long."""
        wanted = tuple(dict.fromkeys(names))
        for name in wanted:
            self._group(owner, name)
        if connect:
            connecting = asyncio.ensure_future(self.connect(owner, wanted))
            await asyncio.wait([connecting], timeout=LIST_SECONDS)
            if connecting.done():
                connecting.result()
        cards = self.cards(owner, wanted)
        failed = {card.name: card.error or TOO_SLOW for card in cards if card.state is not ToolServerState.READY}
        return tuple(tool for card in cards if card.name not in failed for tool in card.tools), failed

    async def call(self, owner: str, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Calls a tool by the name that models use. Raises BadToolServer or ToolServerFailed."""
        return await self._group(owner, server_of(name)).call(name, arguments)

    async def list_resources(self, owner: str, server: str) -> tuple[ServerResource, ...]:
        """What can be attached to a message. Raises BadToolServer or ToolServerFailed."""
        return await self._group(owner, server).list_resources(server)

    async def read_resource(self, owner: str, server: str, name: str, arguments: Mapping[str, str]) -> bytes:
        return await self._group(owner, server).read_resource(server, name, arguments)

    def add(self, owner: str, config: ServerConfig, *, is_local: bool = False) -> ServerCard:
        """Adds a server for good. Only a local user may add a command, since it is code that runs."""
        if config.name in self.names(owner):
            raise BadToolServer(f"There is a tool server {config.name!r} already: remove it first.")
        if is_local and self.operator.file is not None:
            add_server(self.operator.file, config)
            self._shared_for(owner).add(config)
        elif config.command:
            raise BadToolServer("A command is code that runs on the server: only its operator can add one.")
        else:
            add_server(self._file(owner), config)
        return self.cards(owner, [config.name])[0]

    async def remove(self, owner: str, name: str, *, is_local: bool = False) -> None:
        if name in self._of(owner).names:
            await self._of(owner).remove(name)
            remove_server(self._file(owner), name)
        elif is_local and self.operator.file is not None and name in self._shared_for(owner).names:
            remove_server(self.operator.file, name)
            await self._shared_for(owner).remove(name)
        else:
            raise BadToolServer(f"There is no tool server {name!r} of yours.")

    async def start_sign_in(self, owner: str, name: str, redirect_uri: str, *, is_local: bool = False) -> str:
        """Begins to sign a user in to a server. Returns the URL to open in a browser, which comes back to
        `redirect_uri`. The servers of the operator are signed in to by the local user alone."""
        shared = self._shared_for(owner) if is_local or self.operator.only_for == owner else ToolServers()
        groups = [group for group in (shared, self._of(owner)) if name in group.names]
        if not groups:
            raise BadToolServer(f"There is no tool server {name!r} of yours.")
        signing = groups[0].sign_in(name, redirect_uri)
        url = await signing.url
        self._sign_ins[signing.state] = (owner, name, signing)
        while len(self._sign_ins) > MAX_SIGN_INS:
            _end(self._sign_ins.pop(next(iter(self._sign_ins)))[2])
        return url

    async def finish_sign_in(self, owner: str, state: str, code: str, issuer: str | None = None) -> ServerCard:
        """Ends a sign-in that this user began. Raises BadToolServer or ToolServerFailed."""
        began, name, signing = self._sign_ins.get(state, ("", "", None))
        if signing is None or signing.task is None or began != owner:
            raise BadToolServer("There is no such sign-in of yours: begin it again.")
        del self._sign_ins[state]
        signing.finish(code, issuer)
        await signing.task
        return (await self.connect(owner, [name]))[0]

    async def lend(self, owner: str, config: ServerConfig, name: str = "") -> str:
        """Makes a server with a URL usable for turns that name it, without writing it anywhere: it may hold secrets.

        Returns the name to use, which is its own unless `name` is given. The same server keeps its connection.
        """
        check_server_name(config.name)
        self._file(owner)
        lent, prefix = self._lent.setdefault(owner, {}), f"{config.name[:23]}-"
        same = [one for one, group in lent.items() if group.config(one) == replace(config, name=one)]
        known = next((one for one in same if one == name or (not name and one.startswith(prefix))), None)
        if known is not None:
            lent[known] = lent.pop(known)  # the most recently used is last
            return known
        name = name or f"{prefix}{secrets.token_hex(4)}"
        ended = [lent.pop(name)] if name in lent else []
        while len(lent) >= MAX_SERVERS:
            ended.append(lent.pop(next(iter(lent))))
        lent[name] = ToolServers([replace(config, name=name)], self.limits, self.guard)
        await asyncio.gather(*(group.close() for group in ended))
        return name

    def has(self, owner: str, name: str) -> bool:
        """Whether turns of this user can use the server now."""
        return name in self.names(owner) or name in self._lent.get(owner, {})

    async def close(self) -> None:
        for _, _, signing in self._sign_ins.values():
            _end(signing)
        lent = [group for groups in self._lent.values() for group in groups.values()]
        groups = [*self._own.values(), *lent, *([self._shared] if self._shared is not None else [])]
        await asyncio.gather(*(group.close() for group in groups))

    def _group(self, owner: str, name: str) -> ToolServers:
        for group in (self._shared_for(owner), self._of(owner)):
            if name in group.names:
                return group
        if name in self._lent.get(owner, {}):
            return self._lent[owner][name]
        raise BadToolServer(f"There is no tool server {name!r}.")

    def _shared_for(self, owner: str) -> ToolServers:
        if self.operator.only_for not in (None, owner):
            return ToolServers()
        if self._shared is None:
            self._shared = ToolServers(self.operator.servers, self.limits, tokens=self._tokens(OPERATOR))
        return self._shared

    def _of(self, owner: str) -> ToolServers:
        """The servers that a user added, also by another process."""
        own = self._own.setdefault(owner, ToolServers((), self.limits, self.guard, self._tokens(owner)))
        if self.folder is not None and (version := file_version(self._file(owner))) != self._versions.get(owner, ()):
            own.update(one for one in read_servers(self._file(owner)) if one.url)
            self._versions[owner] = version
        return own

    def _tokens(self, owner: str) -> Path | None:
        return None if self.folder is None else self.folder / TOKENS_FOLDER / owner

    def _file(self, owner: str) -> Path:
        if self.folder is None:
            raise BadToolServer("This program keeps no tool servers of users.")
        return self.folder / f"{owner}.json"


def _end(signing: SignIn) -> None:
    if signing.task is not None:
        signing.task.cancel()


def server_of(tool: str) -> str:
    """The server of a tool, by the name that models use."""
    return tool.partition(SEPARATOR)[0]
