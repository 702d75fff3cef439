"""The two transports of tool servers, with bounds: a process over stdio, and streamable HTTP.

The SDK's own stdio transport reads lines of any length; this one ends a server that sends too much. The HTTP transport
counts the bytes of responses and, with a guard, connects only to public addresses. Both end a server that sends more
messages than anyone needs, also valid ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palaver.address_guard import PORTS, AddressGuard, BadAddress
from palaver.tools.config import ServerConfig

if TYPE_CHECKING:
    import httpx2
    from mcp.client._transport import TransportStreams

EXIT_SECONDS = 2.0
"""How long a server's process may take to end after its input is closed, and again after SIGTERM."""
WATCHER = 'read -r _; sleep 1; kill -KILL "-$1"'
"""The script of the process that ends a server's process group when this program is gone, however it ended. Its input
is a pipe that nothing writes to: it ends with this program."""
STDERR_BYTES = 4096
MESSAGE_UNIT = 8192
"""The bytes that count as one more message."""
TOO_MANY_MESSAGES = "sent too many messages"
EVENT_END = re.compile(rb"\n\r?\n|\r\r")
"""The empty line after an event of an SSE stream."""
SESSION_HEADER = "mcp-session-id"
SESSION_LOST = -39_404
"""The code of the error of a request that a server refused, and so did not run: it was started again, and does not know
the session. No error of JSON-RPC or MCP has it."""
INHERITED = (
    "HOME", "LANG", "LOGNAME", "PALAVER_DATA", "PATH", "PYTHONPATH", "SHELL", "TERM", "TMPDIR", "USER", "VIRTUAL_ENV",
)  # fmt: skip
"""The environment variables that a server's process gets beside its own. Others, such as keys, are not passed on."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    connect_seconds: float = 30.0
    list_seconds: float = 15.0
    call_seconds: float = 120.0
    message_bytes: int = 8 << 20
    """The longest message of a server. A server that sends more is disconnected."""
    result_chars: int = 100_000
    """The text of a result beyond this is left out."""
    files: int = 8
    """Pictures, sounds and other files of one result."""
    tools: int = 128
    """Tools per server."""
    schema_bytes: int = 64 << 10
    schema_depth: int = 32
    junk_lines: int = 1000
    """Lines of a server's output that are not messages."""
    messages_per_second: float = 500.0
    """Messages of a server over a longer time. One of more than 8 kB counts as several."""
    message_burst: int = 10_000
    """Messages of a server at once."""


class TransportClosed(Exception):
    """Why the connection ended: the end of a sentence that begins with the server."""


class MessageBudget:
    """What a server may still send: a token bucket, refilled each second and full at first."""

    def __init__(self, limits: ToolLimits) -> None:
        self._limits = limits
        self._left = float(limits.message_burst)
        self._filled_at = time.monotonic()

    def spend(self, messages: int, size: int) -> bool:
        """Counts messages of this many bytes together. Returns False if they are too many."""
        now = time.monotonic()
        refill = (now - self._filled_at) * self._limits.messages_per_second
        self._filled_at = now
        self._left = min(self._left + refill, self._limits.message_burst) - messages - size / MESSAGE_UNIT
        return self._left >= 0


class StdioProcess:
    """A server's process: its messages, its last lines on stderr, and why it ended."""

    def __init__(self, config: ServerConfig, limits: ToolLimits) -> None:
        self._config = config
        self._limits = limits
        self._stderr: deque[bytes] = deque(maxlen=8)
        self._process: asyncio.subprocess.Process
        self._watcher: asyncio.subprocess.Process | None = None
        self._lifeline = -1
        """The pipe to the watcher."""
        self._closing = False
        self.ended = asyncio.Event()
        self.reason = ""
        """Why it ended, if it did not end because it was closed."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        import anyio
        from mcp.shared.message import SessionMessage

        self._process = await self._start()
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](64)
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](64)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._watch()
            tasks += [
                asyncio.create_task(self._read(to_session)),
                asyncio.create_task(self._write(from_session)),
                asyncio.create_task(self._read_stderr()),
            ]
            yield from_server, to_server
        finally:
            await asyncio.shield(self._close(tasks))
            for stream in (to_session, from_server, to_server, from_session):
                stream.close()

    def last_words(self) -> str:
        """The last line that the process wrote to stderr."""
        lines = b"".join(self._stderr).decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[:200] if lines else ""

    async def _start(self) -> asyncio.subprocess.Process:
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        try:
            return await asyncio.create_subprocess_exec(
                self._config.command,
                *self._config.args,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**environment, **self._config.env},
                cwd=self._config.cwd,
                start_new_session=True,
                limit=self._limits.message_bytes,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TransportClosed(f"could not be started: {self._config.command}: {why}") from None

    async def _watch(self) -> None:
        """Starts the watcher. Without a shell, a server ends by itself when its input does, as most do."""
        reader, self._lifeline = os.pipe()
        try:
            self._watcher = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", WATCHER, "sh", str(self._process.pid),
                stdin=reader,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._watcher = None
        finally:
            os.close(reader)

    async def _unwatch(self) -> None:
        if self._watcher is not None:
            with suppress(ProcessLookupError):
                self._watcher.kill()
            await self._watcher.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)

    async def _read(self, to_session: Any) -> None:
        """Passes messages on until the output ends. The reason is set before the session notices the end."""
        try:
            self._fail(await self._pass_on(to_session) or await self._describe_end())
        except ValueError:  # a line beyond the limit
            self._fail(f"sent a message of more than {self._limits.message_bytes >> 20} MB")
        except Exception as error:
            self._fail(f"could not be read ({type(error).__name__})")
        finally:
            to_session.close()

    async def _pass_on(self, to_session: Any) -> str:
        """Returns why the server is disconnected; empty at the end of its output."""
        from mcp.shared.message import SessionMessage

        assert self._process.stdout is not None
        junk, budget = 0, MessageBudget(self._limits)
        while line := await self._process.stdout.readline():
            if not budget.spend(1, len(line)):
                return TOO_MANY_MESSAGES
            message = _parse_message(line)
            if message is not None:
                await to_session.send(SessionMessage(message))
                continue
            junk += 1
            if junk > self._limits.junk_lines:
                return "sent output that is not of the protocol"
        return ""

    async def _describe_end(self) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)
        code, words = self._process.returncode, self.last_words()
        ended = "closed its output" if code is None else _describe_exit(code)
        return f"{ended}: {words}" if words else ended

    async def _write(self, from_session: Any) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            async for item in from_session:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._process.stdin.write(text.encode() + b"\n")
                await self._process.stdin.drain()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(STDERR_BYTES):
            self._stderr.append(data)

    def _fail(self, reason: str) -> None:
        if not self._closing:
            self.reason = self.reason or reason
        self.ended.set()

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        """Closes its input, then sends SIGTERM, then SIGKILL to its process group."""
        self._closing = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        patience = 0.0 if self.reason else EXIT_SECONDS
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience)
            if self._process.returncode is not None:
                break
            self._kill(number)
            patience = EXIT_SECONDS
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._kill(signal.SIGKILL)  # children that it left
        await self._unwatch()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)
        self._process._transport.close()  # type: ignore[attr-defined]  # a child may hold the pipes open

    def _kill(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _parse_message(line: bytes) -> Any:
    """The JSON-RPC message of a line; None if it is none. A damaged answer becomes an error, so that its call ends."""
    from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        pass
    try:  # lone surrogates, which the strict parser refuses
        value = json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    try:
        return jsonrpc_message_adapter.validate_python(value, by_name=False)
    except ValueError:
        pass
    if not isinstance(value, dict) or not isinstance(id := value.get("id"), str | int):
        return None
    return JSONRPCError(jsonrpc="2.0", id=id, error=ErrorData(code=INTERNAL_ERROR, message="not of the protocol"))


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def http_client(
    config: ServerConfig,
    limits: ToolLimits,
    guard: AddressGuard | None,
    auth: httpx2.Auth | None = None,
    on_unauthorized: Callable[[], None] | None = None,
    on_flood: Callable[[], None] | None = None,
) -> httpx2.AsyncClient:
    """A client for a server's URL that bounds responses and, with a guard, connects to the address it checked.

    Requests are made to the endpoint of the configuration. The query of its URL, which may hold a key, is added when
    they are sent, so that no log has it. A request that the server refuses because it does not know the session ends
    with the error SESSION_LOST. `on_flood` is called when the server sends too many messages: their stream ends.
    """
    import httpx2

    # No limit of connections: a cancelled call that the server does not end holds one until it times out, and must not
    # keep the next message, which may cancel another call, from being sent.
    inner = httpx2.AsyncHTTPTransport(trust_env=False, limits=httpx2.Limits(max_keepalive_connections=20))

    class BoundedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in self._stream:
                size += len(chunk)
                if size > limits.message_bytes:
                    raise httpx2.ReadError(f"a response of more than {limits.message_bytes >> 20} MB")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    budget, endpoint = MessageBudget(limits), httpx2.URL(config.endpoint)

    class BoundedEvents(BoundedStream):
        """A stream of events. The length of one is bounded by the SDK."""

        async def __aiter__(self) -> AsyncIterator[bytes]:
            tail = b""
            async for chunk in self._stream:
                text = tail + chunk
                ends = [match.end() for match in EVENT_END.finditer(text)]
                tail = text[max([len(text) - 2, 0, *ends]) :]  # an empty line may be cut between two chunks
                if not budget.spend(len(ends), len(chunk)):
                    if on_flood is not None:
                        on_flood()
                    raise httpx2.ReadError(TOO_MANY_MESSAGES)
                yield chunk

    class BoundedTransport(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            url = request.url
            try:
                return await self._send(request)
            finally:
                request.url = url  # the client logs it

        async def _send(self, request: httpx2.Request) -> httpx2.Response:
            if request.url == endpoint:
                request.url = httpx2.URL(config.url)
            if guard is not None:
                port = request.url.port or PORTS.get(request.url.scheme, 443)
                try:
                    address = await asyncio.to_thread(guard.pin, request.url.host, port)
                except BadAddress as error:
                    raise httpx2.ConnectError(str(error)) from None
                request.extensions = {**request.extensions, "sni_hostname": request.url.host}
                request.url = request.url.copy_with(host=str(address))
            response = await inner.handle_async_request(request)
            if response.status_code == 401 and on_unauthorized is not None:
                on_unauthorized()
            if response.status_code == 404 and request.method == "POST" and SESSION_HEADER in request.headers:
                await response.aclose()
                refusal = {"code": SESSION_LOST, "message": "does not know the session (any more)"}
                return httpx2.Response(404, json={"jsonrpc": "2.0", "id": None, "error": refusal}, request=request)
            is_events = response.headers.get("content-type", "").startswith("text/event-stream")
            response.stream = BoundedEvents(response.stream) if is_events else BoundedStream(response.stream)
            return response

        async def aclose(self) -> None:
            await inner.aclose()

    return httpx2.AsyncClient(
        transport=BoundedTransport(),
        auth=auth,
        headers=dict(config.headers),
        timeout=httpx2.Timeout(limits.connect_seconds, read=limits.call_seconds + 30.0),
        follow_redirects=False,
    )
