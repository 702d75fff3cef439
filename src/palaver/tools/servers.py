"""Tool servers: connections to several MCP servers, their tools under names of their own, and calls with bounds.

A server that hangs, dies or floods fails alone: its card says why, its calls end with a `ToolServerFailed`, and the
next use connects again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from palaver.address_guard import AddressGuard
from palaver.errors import PalaverError
from palaver.messages import Tool
from palaver.tools.config import BadToolServer, ServerConfig
from palaver.tools.oauth import SIGN_IN_SECONDS, SignIn, TokenFile, token_auth
from palaver.tools.transports import (
    SESSION_LOST,
    TOO_MANY_MESSAGES,
    StdioProcess,
    ToolLimits,
    TransportClosed,
    http_client,
)

if TYPE_CHECKING:
    from mcp import types
    from mcp.client.session import ClientSession

SEPARATOR = "__"
"""Between the name of the server and that of its tool, in the name that models use."""
MAX_NAME = 64
MAX_DESCRIPTION = 4096
NEEDS_SIGN_IN = "needs you to sign in"
PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
"""The request that a sign-in begins with. Its answer does not matter."""
ACCEPT = {"accept": "application/json, text/event-stream"}
RETRY_SECONDS = 5.0
"""How long a server that could not be connected is not tried again."""
RELOAD_SECONDS = 30.0
"""The age at which a list of tools is read again, for servers that don't announce changes."""


class ToolServerFailed(PalaverError):
    """A server could not be reached, or did not answer a call."""

    def __init__(self, server: str, why: str) -> None:
        super().__init__(f"The tool server {server!r} {why.rstrip('.')}.")
        self.server = server
        self.why = why


class SessionLost(ToolServerFailed):
    """The server was started again and refused a request of the old session: it did not run."""


class ToolServerState(StrEnum):
    IDLE = "idle"
    """Not connected yet."""
    CONNECTING = "connecting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server, under the name that models use."""

    name: str
    server: str
    tool: str
    """Its name at the server."""
    description: str
    parameters: Mapping[str, Any]
    title: str = ""
    read_only: bool = False
    """What the server says: a hint, never a reason to run it without asking."""

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters)


@dataclass(frozen=True, slots=True)
class ServerResource:
    """What a server has to be attached to a message: a resource, or the text of a prompt."""

    kind: Literal["resource", "prompt"]
    name: str
    """Of a prompt; the URI of a resource."""
    title: str = ""
    description: str = ""
    media_type: str = ""
    arguments: tuple[str, ...] = ()
    """The names of a prompt's arguments."""


@dataclass(frozen=True, slots=True)
class ServerCard:
    """A server and its state. It never has secrets, nor its command's arguments."""

    name: str
    transport: str
    state: ToolServerState
    error: str = ""
    tools: tuple[ServerTool, ...] = ()
    notices: tuple[str, ...] = ()
    """Tools that were left out or are offered without their schemas, and why."""
    is_own: bool = False
    """Whether the user added it, and may remove it."""
    needs_sign_in: bool = False
    """Whether it answers only a user who is signed in, by OAuth."""


@dataclass(frozen=True, slots=True)
class ToolFile:
    """A picture, a sound or another file that a tool returned. Its bytes are not checked."""

    data: bytes = field(repr=False)
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What a tool returned: data, whatever it says."""

    text: str
    is_error: bool = False
    files: tuple[ToolFile, ...] = ()


@dataclass(eq=False)
class ToolServerConnection:
    """A connection to one server, made at its first use and made again after it failed."""

    config: ServerConfig
    limits: ToolLimits = field(default_factory=ToolLimits)
    guard: AddressGuard | None = None
    tokens: TokenFile | None = None
    """Of the sign-in to the server, if users can sign in."""
    needs_sign_in: bool = False
    state: ToolServerState = ToolServerState.IDLE
    error: str = ""
    tools: tuple[ServerTool, ...] = ()
    notices: tuple[str, ...] = ()
    _task: asyncio.Task[None] | None = None
    _session: ClientSession | None = None
    _listed_at: float = 0.0
    _retry_at: float = 0.0
    _list_changed: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server does not know the session any more."""
    _flooded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server sends too many messages over HTTP."""

    @property
    def card(self) -> ServerCard:
        return ServerCard(
            self.config.name,
            self.config.transport,
            self.state,
            self.error,
            self.tools,
            self.notices,
            needs_sign_in=self.needs_sign_in,
        )

    async def load_tools(self) -> tuple[ServerTool, ...]:
        """The tools as they are now. Raises ToolServerFailed."""
        session = await self._connect()
        with suppress(SessionLost):
            async with self._lock:
                now = asyncio.get_running_loop().time()
                if self._list_changed or now - self._listed_at > RELOAD_SECONDS:
                    await self._list_tools(session)
        await self._connect()  # again, if the session was lost: this lists the tools
        return self.tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Calls a tool. If the caller is cancelled, the server is told to cancel the call. Raises ToolServerFailed."""
        await self._connect()  # imports the SDK
        from mcp import types

        params = types.CallToolRequestParams(name=tool, arguments=dict(arguments))
        request = types.CallToolRequest(params=params)
        result = await self._send(request, types.CallToolResult, self.limits.call_seconds)
        return _read_result(result, self.limits)

    async def list_resources(self) -> tuple[ServerResource, ...]:
        """The resources and prompts of the server, as many as tools at most. Raises ToolServerFailed."""
        session = await self._connect()
        from mcp import types

        found: list[ServerResource] = []
        capabilities, seconds = session.server_capabilities, self.limits.list_seconds
        if capabilities is not None and capabilities.resources is not None:
            request = types.ListResourcesRequest()
            listed = await self._send(request, types.ListResourcesResult, seconds)
            found += [_resource(one) for one in listed.resources]
        if capabilities is not None and capabilities.prompts is not None:
            prompts = await self._send(types.ListPromptsRequest(), types.ListPromptsResult, seconds)
            found += [_prompt(one) for one in prompts.prompts]
        return tuple(found[: self.limits.tools])

    async def read_resource(self, name: str, arguments: Mapping[str, str]) -> bytes:
        """The contents of a resource, by its URI, or the text of a prompt, by its name. Raises ToolServerFailed."""
        session = await self._connect()
        from mcp import types

        prompts = [one.name for one in await self.list_resources() if one.kind == "prompt"]
        if name in prompts:
            params = types.GetPromptRequestParams(name=name, arguments=dict(arguments))
            request: Any = types.GetPromptRequest(params=params)
            result = await self._send(request, types.GetPromptResult, self.limits.call_seconds)
            return "\n\n".join(_content_text(one.content) for one in result.messages).encode("utf-8", "replace")
        if session.server_capabilities is None or session.server_capabilities.resources is None:
            raise ToolServerFailed(self.config.name, "has no resources")
        request = types.ReadResourceRequest(params=types.ReadResourceRequestParams(uri=name))
        read = await self._send(request, types.ReadResourceResult, self.limits.call_seconds)
        blobs = [one.blob for one in read.contents if hasattr(one, "blob")]
        if blobs:
            try:
                return base64.b64decode(blobs[0], validate=True)
            except ValueError:
                raise ToolServerFailed(self.config.name, "sent an answer that is not of the protocol") from None
        return "\n\n".join(str(one.text) for one in read.contents).encode("utf-8", "replace")

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    def end(self) -> None:
        """Closes the connection soon."""
        self._closing.set()

    async def close(self) -> None:
        self.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _connect(self) -> ClientSession:
        async with self._lock:
            if self._session is None and asyncio.get_running_loop().time() >= self._retry_at:
                if self._task is not None:
                    await asyncio.gather(self._task, return_exceptions=True)
                self.state, self.error = ToolServerState.CONNECTING, ""
                ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._run(ready))
                with suppress(ToolServerFailed):
                    await asyncio.shield(ready)
                if self._session is None:
                    self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS
            if self._session is None:
                raise ToolServerFailed(self.config.name, self.error or "is closed")
            return self._session

    async def _run(self, ready: asyncio.Future[None]) -> None:
        """Connects, and owns the connection until it is closed or the server ends it."""
        why = ""
        self._lost.clear()
        self._flooded.clear()
        process = None if self.config.url else StdioProcess(self.config, self.limits)
        try:
            await asyncio.to_thread(importlib.import_module, "mcp.client.streamable_http")  # takes a second
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(self.limits.connect_seconds):
                        session = await self._open(stack, process)
                        await self._list_tools(session)
                except TimeoutError:
                    why = f"did not answer within {self.limits.connect_seconds:g} s"
                    return
                self._session, self.state, self.needs_sign_in = session, ToolServerState.READY, False
                ready.set_result(None)
                ended = [asyncio.create_task(event.wait()) for event in (self._closing, self._lost, self._flooded)]
                if process is not None:
                    ended.append(asyncio.create_task(process.ended.wait()))
                _, waiting = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
                for task in waiting:
                    task.cancel()
                self._session = None
        except ToolServerFailed as error:
            why = error.why
        except BaseException as error:
            why = _explain(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._session = None
            why = (process.reason if process is not None else "") or why
            why = TOO_MANY_MESSAGES if self._flooded.is_set() else why
            if self.needs_sign_in and why:
                why = NEEDS_SIGN_IN
            closed = self._closing.is_set() or self._lost.is_set()
            self.state = ToolServerState.IDLE if closed and not why else ToolServerState.FAILED
            self.error = why
            if not ready.done():
                ready.set_result(None)

    async def _open(self, stack: AsyncExitStack, process: StdioProcess | None) -> ClientSession:
        from mcp import types
        from mcp.client._probe import negotiate_auto
        from mcp.client.session import ClientSession
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared.exceptions import MCPError

        from palaver import __version__

        async def handle_message(message: object) -> None:
            if isinstance(message, types.ToolListChangedNotification):
                self._list_changed = True

        if process is not None:
            streams = await stack.enter_async_context(process.open())
        else:
            auth = token_auth(self.config, self.tokens)
            client = http_client(self.config, self.limits, self.guard, auth, self._refused, self._flooded.set)
            client = await stack.enter_async_context(client)
            transport = streamable_http_client(
                self.config.endpoint, http_client=client, max_sse_event_size=self.limits.message_bytes
            )
            streams = await stack.enter_async_context(transport)
        info = types.Implementation(name="palaver", version=__version__)
        session = ClientSession(*streams, message_handler=handle_message, client_info=info)
        session = await stack.enter_async_context(session)
        try:
            await session.initialize()
        except MCPError as error:
            if error.code != types.UNSUPPORTED_PROTOCOL_VERSION:
                raise
            await negotiate_auto(session)
        return session

    def _refused(self) -> None:
        """The server answered that the user must sign in."""
        self.needs_sign_in = self.tokens is not None

    def sign_in(self, redirect_uri: str) -> SignIn:
        """Begins a sign-in, which ends with new tokens. Raises ToolServerFailed from its `url` and its `task`."""
        signing = SignIn(redirect_uri)
        signing.task = asyncio.create_task(self._sign_in(signing))
        return signing

    async def _sign_in(self, signing: SignIn) -> None:
        if self.tokens is None:
            signing.url.set_exception(ToolServerFailed(self.config.name, "can't be signed in to: it has no URL"))
            return
        await asyncio.to_thread(importlib.import_module, "mcp.client.auth")  # takes a second
        self.tokens.forget()
        error: ToolServerFailed | None = None
        try:
            auth = signing.provider(self.config, self.tokens)
            client = http_client(self.config, self.limits, self.guard, auth)
            async with asyncio.timeout(SIGN_IN_SECONDS), client:
                asking = asyncio.ensure_future(client.post(self.config.endpoint, json=PING, headers=ACCEPT))
                stored = asyncio.ensure_future(self.tokens.stored.wait())
                try:
                    await asyncio.wait({asking, stored}, return_when=asyncio.FIRST_COMPLETED)
                    if not stored.done():
                        asking.result()
                finally:
                    asking.cancel()
                    stored.cancel()
            if not self.tokens.has_tokens:
                error = ToolServerFailed(self.config.name, "did not ask for a sign-in")
        except TimeoutError:
            error = ToolServerFailed(self.config.name, "was not signed in to in time")
        except Exception as failure:
            error = ToolServerFailed(self.config.name, f"could not be signed in to: {_one_line(str(failure))}")
        if error is not None:
            if not signing.url.done():
                signing.url.set_exception(error)
                return
            raise error
        self.needs_sign_in, self._retry_at = False, 0.0

    async def _list_tools(self, session: ClientSession) -> None:
        from mcp import types

        listed: list[types.Tool] = []
        cursor: str | None = None
        self._list_changed = False
        for _ in range(self.limits.tools):
            params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
            request = types.ListToolsRequest(params=params)
            page = await self._request(session, request, types.ListToolsResult, self.limits.list_seconds)
            listed += page.tools
            cursor = page.next_cursor
            if not cursor or len(listed) > self.limits.tools:
                break
        self.tools, self.notices = _offered(self.config.name, listed, self.limits)
        self._listed_at = asyncio.get_running_loop().time()

    async def _send(self, request: Any, kind: type[Any], seconds: float) -> Any:
        """Sends a request, and once more if the server refused it because it was started again."""
        try:
            return await self._request(await self._connect(), request, kind, seconds)
        except SessionLost:
            return await self._request(await self._connect(), request, kind, seconds)

    async def _request(self, session: ClientSession, request: Any, kind: type[Any], seconds: float) -> Any:
        """Sends a request by the session, without its validation of results by schemas of the server."""
        from mcp.shared.exceptions import MCPError
        from pydantic import ValidationError

        try:
            return await session.send_request(request, kind, request_read_timeout_seconds=seconds)
        except MCPError as error:
            if error.code == SESSION_LOST and self.config.url:
                if self._session is session:
                    self._session = None
                    self._lost.set()
                raise SessionLost(self.config.name, _one_line(str(error))) from None
            raise ToolServerFailed(self.config.name, await self._why(error, seconds)) from None
        except ValidationError:
            raise ToolServerFailed(self.config.name, "sent an answer that is not of the protocol") from None

    async def _why(self, error: Any, seconds: float) -> str:
        from mcp import types

        if self._flooded.is_set():
            await self._wait_until_closed()
            return TOO_MANY_MESSAGES
        if error.code == types.REQUEST_TIMEOUT:
            return f"did not answer within {seconds:g} s"
        if error.code == types.CONNECTION_CLOSED and "SSE stream" in str(error):  # of this answer alone
            return f"broke its answer off: {_one_line(str(error))}"
        if error.code == types.CONNECTION_CLOSED:
            await self._wait_until_closed()
            return self.error or "closed the connection"
        return f"answered with an error: {_one_line(str(error))}"

    async def _wait_until_closed(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._task), 5.0)


class ToolServers:
    """Several servers. Names of tools are unique: they begin with the name of their server."""

    def __init__(
        self,
        configs: Iterable[ServerConfig] = (),
        limits: ToolLimits | None = None,
        guard: AddressGuard | None = None,
        tokens: Path | None = None,
    ) -> None:
        """`tokens`: the folder for those of sign-ins."""
        self._limits = limits or ToolLimits()
        self._guard = guard
        self._tokens = tokens
        self._connections: dict[str, ToolServerConnection] = {}
        self._ended: list[ToolServerConnection] = []
        """Connections that are about to close."""
        for config in configs:
            self.add(config)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._connections)

    def add(self, config: ServerConfig) -> None:
        if config.name in self._connections:
            raise BadToolServer(f"There is a tool server {config.name!r} already: remove it first.")
        tokens = TokenFile(self._tokens, config) if self._tokens is not None and config.url else None
        self._connections[config.name] = ToolServerConnection(config, self._limits, self._guard, tokens)

    async def remove(self, name: str) -> None:
        connection = self._connections.pop(self._connection(name).config.name)
        await connection.close()
        if connection.tokens is not None:
            connection.tokens.forget()

    def update(self, configs: Iterable[ServerConfig]) -> None:
        """Adds the servers that are new, and ends the connections of those that are not there or changed."""
        wanted = {config.name: config for config in configs}
        for name, connection in tuple(self._connections.items()):
            if wanted.get(name) != connection.config:
                connection.end()
                self._ended = [*(one for one in self._ended if one.is_open), self._connections.pop(name)]
        for name, config in wanted.items():
            if name not in self._connections:
                self.add(config)

    def sign_in(self, name: str, redirect_uri: str) -> SignIn:
        return self._connection(name).sign_in(redirect_uri)

    def card(self, name: str) -> ServerCard:
        return self._connection(name).card

    def config(self, name: str) -> ServerConfig:
        return self._connection(name).config

    async def connect(self, names: Iterable[str] | None = None) -> tuple[ServerCard, ...]:
        """Connects to these servers, by default to all, and returns their cards. One that fails says so on its card."""
        wanted = [self._connection(name) for name in (self.names if names is None else names)]
        results = await asyncio.gather(*(one.load_tools() for one in wanted), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ToolServerFailed):
                raise result
        return tuple(one.card for one in wanted)

    async def find_tool(self, name: str) -> ServerTool:
        """The tool by the name that models use. Raises BadToolServer or ToolServerFailed."""
        server = name.partition(SEPARATOR)[0]
        for tool in await self._connection(server).load_tools():
            if tool.name == name:
                return tool
        raise BadToolServer(f"The tool server {server!r} has no tool {name!r} (any more).")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        tool = await self.find_tool(name)
        return await self._connection(tool.server).call(tool.tool, arguments)

    async def list_resources(self, server: str) -> tuple[ServerResource, ...]:
        return await self._connection(server).list_resources()

    async def read_resource(self, server: str, name: str, arguments: Mapping[str, str]) -> bytes:
        return await self._connection(server).read_resource(name, arguments)

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in (*self._connections.values(), *self._ended)))

    def _connection(self, name: str) -> ToolServerConnection:
        try:
            return self._connections[name]
        except KeyError:
            raise BadToolServer(f"There is no tool server {name!r}.") from None


def tool_name(server: str, tool: str) -> str:
    """The name that models use: at most 64 letters, digits, _ and -. A name that had to be changed ends with a hash."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", tool)
    name = f"{server}{SEPARATOR}{plain}"
    if plain == tool and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(tool.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9]}_{digest}"


def _offered(
    server: str, listed: Iterable[types.Tool], limits: ToolLimits
) -> tuple[tuple[ServerTool, ...], tuple[str, ...]]:
    """The tools to offer, and notices about those that are left out or offered without their schemas."""
    offered: dict[str, ServerTool] = {}
    notices: list[str] = []
    for tool in listed:
        shown = _one_line(tool.name, 80)
        name = tool_name(server, tool.name)
        if len(offered) >= limits.tools:
            notices.append(f"Only the first {limits.tools} tools are offered.")
            break
        if not tool.name or name in offered:
            notices.append(f"A second tool {shown!r} was left out: its name is taken.")
            continue
        schema = _without_titles(tool.input_schema)
        if why := _check_schema(schema, limits):
            schema = {"type": "object"}
            notices.append(f"The tool {shown!r} is offered without its schema, which {why}.")
        hints = tool.annotations
        title = tool.title or (hints.title if hints is not None else None) or ""
        offered[name] = ServerTool(
            name,
            server,
            tool.name,
            (tool.description or "")[:MAX_DESCRIPTION],
            schema,
            _one_line(title, 80),
            bool(hints is not None and hints.read_only_hint),
        )
    return tuple(offered.values()), tuple(notices)


def _without_titles(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without the titles that generators add to it and to its properties: they say nothing to a model."""
    plain = {key: value for key, value in schema.items() if key != "title"}
    if isinstance(properties := schema.get("properties"), dict):
        plain["properties"] = {
            name: {key: one for key, one in value.items() if key != "title"} if isinstance(value, dict) else value
            for name, value in properties.items()
        }
    return plain


def _check_schema(schema: Mapping[str, Any], limits: ToolLimits) -> str:
    """Why the schema is not passed on; empty if it is. A model reads it with every prompt."""
    if _depth(schema, limits.schema_depth) > limits.schema_depth:
        return f"is nested more than {limits.schema_depth} deep"
    if len(json.dumps(schema)) > limits.schema_bytes:
        return f"has more than {limits.schema_bytes >> 10} kB"
    return ""


def _depth(value: Any, limit: int) -> int:
    """How deep the value is nested, up to one more than the limit."""
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if limit < 0:
        return 1
    return 1 + max((_depth(child, limit - 1) for child in children), default=0)


def _read_result(result: types.CallToolResult, limits: ToolLimits) -> ToolOutcome:
    pieces: list[str] = []
    files: list[ToolFile] = []
    for block in result.content:
        file = _content_file(block)
        if file is not None and len(files) < limits.files:
            files.append(file)
        elif file is not None:
            pieces.append(f"[A result has at most {limits.files} files: one was left out]")
        else:
            pieces.append(_content_text(block))
    text, limit = "\n".join(piece for piece in pieces if piece), limits.result_chars
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode()  # lone surrogates
    if len(text) > limit:
        text = f"{text[:limit]}\n[{len(text) - limit:,} more characters were left out]"
    return ToolOutcome(text, result.is_error, tuple(files))


def _content_file(block: Any) -> ToolFile | None:
    """The file of a content block; None if it has none, or one that is not in base64."""
    match block.type:
        case "image" | "audio":
            encoded, name = block.data, ""
        case "resource" if hasattr(block.resource, "blob"):
            encoded, name = block.resource.blob, _one_line(str(block.resource.uri).rpartition("/")[2], 80)
        case _:
            return None
    try:
        return ToolFile(base64.b64decode(encoded, validate=True), name)
    except ValueError:
        return None


def _content_text(block: Any) -> str:
    """The text of a content block. A file is described."""
    match block.type:
        case "text":
            return str(block.text)
        case "resource" if hasattr(block.resource, "text"):
            return str(block.resource.text)
        case "resource_link":
            return f"[{block.name}: {block.uri}]"
        case "image" | "audio":
            return f"[{block.type} {block.mime_type}, {len(block.data) * 3 // 4:,} bytes]"
        case other:
            return f"[{other}]"


def _resource(listed: Any) -> ServerResource:
    title, description = _one_line(listed.title or listed.name or "", 80), _one_line(listed.description or "")
    return ServerResource("resource", str(listed.uri)[:2048], title, description, (listed.mime_type or "")[:100])


def _prompt(listed: Any) -> ServerResource:
    arguments = tuple(one.name for one in listed.arguments or ())
    title, description = _one_line(listed.title or "", 80), _one_line(listed.description or "")
    return ServerResource("prompt", listed.name, title, description, arguments=arguments)


def _explain(error: BaseException) -> str:
    """Why a connection failed: the first cause that says something."""
    if isinstance(error, BaseExceptionGroup):
        return _explain(error.exceptions[0])
    if isinstance(error, TransportClosed):
        return str(error)
    text = _one_line(str(error))
    return f"could not be reached: {text}" if text else f"could not be reached ({type(error).__name__})"


def _one_line(text: str, limit: int = 200) -> str:
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())[:limit]
