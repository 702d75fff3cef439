"""The parent's side of the engine host: starts the process, watches it, and starts it again when it dies.

A reply that was running goes on from its token ids in the new process; whoever reads it sees only a pause.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palaver.engines.base import EngineInfo
from palaver.engines.host.wire import frame_bytes, pack, read_frame, unpack, unpack_error
from palaver.errors import EngineClosed, EngineError, PalaverError
from palaver.generation import AnswerAsked, Ended, Finish, Output, Prefilled, Prompt, Step
from palaver.phases import Vocabulary
from palaver.sampling import Sampling

MAX_DEATHS = 3
"""In a row, with no token in between."""
_GRACE_S = 10.0
_SPINS = {"GOMP_SPINCOUNT": "20000"}
"""For about a millisecond the threads of a pass look out for more work; unless told so they would keep a core from
everybody else for a long while, and the token that was computed from its readers."""


def environment() -> dict[str, str]:
    """What the process starts with, for libraries read it when they are loaded. A user's own settings go first."""
    return _SPINS | os.environ


def torch_spec(
    model: Path,
    vocabulary: Vocabulary,
    device: str | None = None,
    dtype: str | None = None,
    exact: bool = False,
    adapter: Path | None = None,
    context: int | None = None,
    compiled: bool | None = None,
    cache_bytes: int | None = None,
    max_running: int | None = None,
) -> dict[str, Any]:
    return {
        "model": str(model),
        "vocabulary": pack(tuple(vocabulary)),
        "device": device,
        "dtype": dtype,
        "exact": exact,
        "adapter": str(adapter) if adapter else None,
        "context": context,
        "compiled": compiled,
        "cache_bytes": cache_bytes,
        "max_running": max_running,
    }


Told = Callable[[float | None, str], None]
"""Takes how far loading is, from 0 to 1 where that is known, and what is being done."""


@dataclass
class _Request:
    """One generation and what has come of it, from which it can be asked for again."""

    prompt: Prompt
    sampling: Sampling
    choice: int
    said: list[int] = field(default_factory=list)
    prefilled: bool = False
    stopped: bool = False
    answers_now: bool = False
    arrivals: asyncio.Queue[Output | PalaverError] = field(default_factory=asyncio.Queue)

    def frame(self, number: int) -> dict[str, Any]:
        said = (*self.prompt.reply_ids, *self.said)
        prompt = replace(self.prompt, reply_ids=said, healing=b"" if self.said else self.prompt.healing)
        sent = {"prompt": pack(prompt), "sampling": pack(self.sampling), "choice": self.choice}
        return {"do": "generate", "number": number, **sent}

    def arrive(self, output: Output) -> None:
        if isinstance(output, Step):
            self.said.append(output.token_id)
        if isinstance(output, AnswerAsked):
            self.prompt = replace(self.prompt, answer_at=output.position)
        if isinstance(output, Prefilled):
            if self.prefilled:
                return
            self.prefilled = True
        self.arrivals.put_nowait(output)


class HostedGeneration:
    """The outputs of one generation in the host."""

    def __init__(self, request: _Request, send: Callable[[dict[str, Any]], bool], number: int) -> None:
        self._request = request
        self._send = send
        self._number = number
        self.over = False

    def __aiter__(self) -> HostedGeneration:
        return self

    async def __anext__(self) -> Output:
        if self.over:
            raise StopAsyncIteration
        arrival = await self._request.arrivals.get()
        if isinstance(arrival, PalaverError):
            self.over = True
            raise arrival
        self.over = isinstance(arrival, Ended)
        return arrival

    def stop(self) -> None:
        self._request.stopped = True
        if not self._send({"do": "stop", "number": self._number}):
            self._request.arrive(Ended(Finish.STOPPED))

    def answer_now(self) -> None:
        self._request.answers_now = True
        self._send({"do": "answer_now", "number": self._number})


class HostedEngine:
    """An engine in another process. Enter it to start the process, leave it to end it."""

    def __init__(self, spec: dict[str, Any], told: Told | None = None) -> None:
        """`told` is told how far loading is."""
        self._spec = spec
        self._told = told
        self._info: EngineInfo | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._requests: dict[int, _Request] = {}
        self._asked: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._count = 0
        self._deaths = 0
        self._closed = False
        self._watch: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None]

    async def __aenter__(self) -> HostedEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the process and waits until the model is loaded. Raises what loading raised."""
        self._ready = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._supervise())
        try:
            await asyncio.shield(self._ready)
        except BaseException:
            await self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine is asked before it was started"
        return self._info

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @asynccontextmanager
    async def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> AsyncIterator[HostedGeneration]:
        if self._closed:
            raise EngineClosed
        number, request = self._count, _Request(prompt, sampling, choice)
        self._count += 1
        self._requests[number] = request
        self._send(request.frame(number))
        generation = HostedGeneration(request, self._send, number)
        try:
            yield generation
        finally:
            self._requests.pop(number, None)
            if not generation.over:
                self._send({"do": "cancel", "number": number})

    async def counted(self) -> dict[str, float]:
        """The engine's figures; none while its process is away."""
        return await self._answered({"do": "figures"})

    async def forget(self, conversation: str) -> None:
        """A process that is away has nothing to forget: the next one begins empty."""
        await self._answered({"do": "forget", "conversation": conversation})

    async def _answered(self, question: dict[str, Any]) -> dict[str, float]:
        number = self._count
        self._count += 1
        self._asked[number] = asyncio.get_running_loop().create_future()
        if not self._send({**question, "number": number}):
            del self._asked[number]
            return {}
        asked = self._asked[number]
        try:
            await asyncio.wait([asked], timeout=_GRACE_S)
            return asked.result() if asked.done() and not asked.cancelled() else {}
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._send({"do": "close"})
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        self._fail_all(EngineClosed())

    def _send(self, frame: dict[str, Any]) -> bool:
        """To the process that runs now, if one does; one that starts again is sent all requests when it is ready."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(frame_bytes(frame))
        return True

    async def _supervise(self) -> None:
        while not self._closed:
            await self._run_once()
            if self._closed:
                return
            self._deaths += 1
            if self._deaths >= MAX_DEATHS or not self._ready.done():
                self._give_up()

    def _give_up(self) -> None:
        """The replies end with an error and can be continued; the next death starts the count anew."""
        code = self._process.poll() if self._process is not None else None
        error = EngineError(f"The engine died {self._deaths} times in a row (status {code}): continue the reply later.")
        self._deaths = 0
        if not self._ready.done():
            self._closed = True
            self._ready.set_exception(error)
        self._fail_all(error)

    def _fail_all(self, error: PalaverError) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.arrivals.put_nowait(error)

    async def _run_once(self) -> None:
        """One life of the process, from its start to its death."""
        if self._told is not None:
            self._told(None, "starting the engine")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "palaver.engines.host.child", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment()
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(frame_bytes({"do": "load", "spec": self._spec}))
            while (frame := await read_frame(reader)) is not None:
                self._take(frame, writer)
        finally:
            self._writer = None
            writer.close()
            for asked in self._asked.values():
                asked.cancel()
            await asyncio.to_thread(_end, self._process)

    def _take(self, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "outputs" in frame:
            for number, output in frame["outputs"]:
                self._arrive(number, output)
        elif "ready" in frame:
            self._info = unpack(frame["ready"])
            self._writer = writer
            for number, request in self._requests.items():
                self._ask_again(number, request)
            if not self._ready.done():
                self._ready.set_result(None)
        elif "answer" in frame:
            waiting = self._asked.pop(frame["number"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame["answer"])
        elif "progress" in frame:
            if self._told is not None:
                self._told(*frame["progress"])
        elif not self._ready.done():
            self._closed = True
            self._ready.set_exception(unpack_error(frame["failed"]))

    def _ask_again(self, number: int, request: _Request) -> None:
        """The rest of a reply that was running when the last process died."""
        if request.stopped:
            request.arrive(Ended(Finish.STOPPED))
            return
        self._send(request.frame(number))
        if request.answers_now and request.prompt.answer_at is None:
            self._send({"do": "answer_now", "number": number})

    def _arrive(self, number: int, packed: Any) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        if "error" in packed:
            request.arrivals.put_nowait(unpack_error(packed))
            return
        output = unpack(packed)
        if isinstance(output, Step):
            self._deaths = 0
        request.arrive(output)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process that was told to end, and ends it where it does not."""
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
