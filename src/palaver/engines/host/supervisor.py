"""The parent's side of the engine host: starts the process, watches it, and starts it again when it dies.

A reply that was running goes on from its token ids in the new process; whoever reads it sees only a pause."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

from palaver.engines.base import EngineInfo, EngineState, EngineStatus
from palaver.engines.host.frames import encode_frame, pack, unpack, unpack_error
from palaver.engines.host.process import EngineProcess
from palaver.errors import EngineClosed, EngineError, PalaverError
from palaver.generation import AnswerAsked, Ended, Finish, Output, Prefilled, Prompt, Step
from palaver.phases import Vocabulary
from palaver.sampling import Sampling

_log = logging.getLogger(__name__)
MAX_DEATHS = 3
"""In a row, with no token in between: then all requests are failed, and the next process starts after a delay."""
MAX_REQUEST_DEATHS = 2
"""Deaths that no other request can have caused: then this one is failed, and the others go on."""
CLEARING_TOKENS = 8
"""So many tokens of a request clear it of the last death: some that were computed before it may have been lost."""
MAX_SENDS = 8
"""Processes that one request is sent to."""
_GRACE_S = 10.0
_LONGEST_DELAY_S = 30.0


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


ReportProgress = Callable[[float | None, str], None]
"""Takes how far loading is, from 0 to 1 where that is known, and what is being done."""


class _Progress(Enum):
    """How far a request has come in the process that runs now."""

    UNSENT = auto()
    SENT = auto()
    PREPARING = auto()
    """The process compiles its grammars and looks up its strings."""
    BEGUN = auto()


@dataclass
class _PendingRequest:
    """One generation and what has come of it, from which it can be asked for again."""

    prompt: Prompt
    sampling: Sampling
    choice: int
    said: list[int] = field(default_factory=list)
    prefilled: bool = False
    stopped: bool = False
    answers_now: bool = False
    progress: _Progress = _Progress.UNSENT
    sent: int = 0
    """In how many processes it was."""
    tokens: int = 0
    """Of the process that runs now."""
    suspect: bool = False
    """Whether it may have caused the last death of a process. Cleared by the first tokens of the next one."""
    deaths: int = 0
    """Deaths of processes that no other request can have caused. Cleared likewise."""
    arrivals: asyncio.Queue[Output | PalaverError] = field(default_factory=asyncio.Queue)

    def frame(self, number: int) -> dict[str, Any]:
        said = (*self.prompt.reply_ids, *self.said)
        prompt = replace(self.prompt, reply_ids=said, healing=b"" if self.said else self.prompt.healing)
        sent = {"prompt": pack(prompt), "sampling": pack(self.sampling), "choice": self.choice}
        return {"do": "generate", "number": number, **sent}

    def arrive(self, output: Output) -> None:
        if isinstance(output, Step):
            self.said.append(output.token_id)
            self.tokens += 1
            if self.tokens >= CLEARING_TOKENS:
                self.suspect, self.deaths = False, 0
        if isinstance(output, AnswerAsked):
            self.prompt = replace(self.prompt, answer_at=output.position)
        if isinstance(output, Prefilled):
            if self.prefilled:
                return
            self.prefilled = True
        self.arrivals.put_nowait(output)


class HostedGeneration:
    """The outputs of one generation in the host."""

    def __init__(self, request: _PendingRequest, send: Callable[[dict[str, Any]], bool], number: int) -> None:
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
        if self._request.progress is _Progress.UNSENT or not self._send({"do": "stop", "number": self._number}):
            self._request.arrive(Ended(Finish.STOPPED))

    def answer_now(self) -> None:
        self._request.answers_now = True
        if self._request.progress is not _Progress.UNSENT:
            self._send({"do": "answer_now", "number": self._number})


class HostedEngine:
    """An engine in another process. Enter it to start the process, leave it to end it."""

    def __init__(self, spec: dict[str, Any], told: ReportProgress | None = None) -> None:
        """`told` is told how far loading is."""
        self._spec = spec
        self._told = told
        self._info: EngineInfo | None = None
        self._status = EngineStatus(EngineState.STARTING, "The engine is starting.")
        self._process: EngineProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._requests: dict[int, _PendingRequest] = {}
        self._unsent: deque[int] = deque()
        """After a death, requests are sent again one by one, so that the next death shows which one caused it."""
        self._trying: int | None = None
        """The one of those that was sent last and is not cleared yet."""
        self._asked: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._count = 0
        self._deaths = 0
        """In a row, with no token in between."""
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
    def status(self) -> EngineStatus:
        return self._status

    @property
    def process_id(self) -> int | None:
        return self._process.id if self._process is not None else None

    @asynccontextmanager
    async def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> AsyncIterator[HostedGeneration]:
        """Raises EngineError where the engine can't be started again for now."""
        if self._closed:
            raise EngineClosed
        if self._status.state is EngineState.FAILED:
            raise EngineError(self._status.reason)
        number, request = self._count, _PendingRequest(prompt, sampling, choice)
        self._count += 1
        self._requests[number] = request
        self._unsent.append(number)
        self._send_next()
        generation = HostedGeneration(request, self._send, number)
        try:
            yield generation
        finally:
            self._requests.pop(number, None)
            if not generation.over and request.progress is not _Progress.UNSENT:
                self._send({"do": "cancel", "number": number})
            if self._trying == number:
                self._trying = None
                self._send_next()

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
        """A process that is still loading is killed at once; one that runs may end its step first."""
        if self._closed:
            return
        self._closed = True
        if self._watch is None:
            return
        if self._send({"do": "close"}):
            await asyncio.wait([self._watch], timeout=_GRACE_S)
        self._watch.cancel()
        await asyncio.wait([self._watch])

    def _send(self, frame: dict[str, Any]) -> bool:
        """To the process that runs now, if one does."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(encode_frame(frame))
        return True

    def _send_next(self) -> None:
        """Sends what waits to be sent: all of it, unless a request is being tried alone."""
        while self._unsent and self._writer is not None and self._trying is None:
            number = self._unsent.popleft()
            request = self._requests.get(number)
            if request is None or request.stopped:
                continue
            request.progress = _Progress.SENT
            request.sent += 1
            request.tokens = 0
            self._send(request.frame(number))
            if request.answers_now and request.prompt.answer_at is None:
                self._send({"do": "answer_now", "number": number})
            if request.suspect:
                self._trying = number

    async def _supervise(self) -> None:
        """Runs processes, one after another, until the engine is closed. Whatever happens, nobody is left waiting."""
        reason: PalaverError = EngineClosed()
        try:
            while True:
                process = EngineProcess(self._spec, self._take)
                cause = await self._run(process)
                if self._closed:
                    return
                if not self._ready.done():
                    reason = process.failure or EngineError(_died_loading(process, cause))
                    return
                await asyncio.sleep(self._note_death(process, cause))
        except Exception as error:
            _log.exception("the engine's supervisor failed")
            reason = EngineError(f"The engine's supervisor failed ({type(error).__name__}: {error}).")
        finally:
            self._closed = True
            self._status = EngineStatus(EngineState.FAILED, str(reason))
            if not self._ready.done():
                self._ready.set_exception(reason)
                self._ready.exception()  # whoever started it may have left
            self._fail(list(self._requests), reason)

    async def _run(self, process: EngineProcess) -> str:
        """One life of the process, from its start to its death. Returns how it ended."""
        if self._told is not None:
            self._told(None, "starting the engine")
        self._process = process
        try:
            return await process.run()
        finally:
            self._writer = None
            for asked in self._asked.values():
                asked.cancel()

    def _note_death(self, process: EngineProcess, cause: str) -> float:
        """Fails the requests that can't be sent again. Returns after how many seconds the next process starts."""
        _log.error("the engine's process %s%s", cause, "".join(f"\n    {line}" for line in process.last_lines))
        self._deaths += 1
        self._settle_blame(cause)
        if process.failure is None and self._deaths < MAX_DEATHS:
            self._status = EngineStatus(EngineState.STARTING, f"The engine's process {cause} and is started again.")
            return 0.0
        if process.failure is not None:
            why = f"The engine can't be started again: {process.failure}"
        else:
            why = f"The engine died {self._deaths} times in a row (its process {cause}): continue the reply later."
        self._status = EngineStatus(EngineState.FAILED, why)
        self._fail(list(self._requests), EngineError(why))
        delay = min(2.0 ** max(0, self._deaths - MAX_DEATHS), _LONGEST_DELAY_S)
        _log.error("%s Next attempt in %g s.", why, delay)
        return delay

    def _settle_blame(self, cause: str) -> None:
        """Decides which requests are sent again to the next process."""
        sent = [number for number, request in self._requests.items() if request.progress is not _Progress.UNSENT]
        alone = self._trying if self._trying is not None else sent[0] if len(sent) == 1 else None
        self._trying = None
        for number in sent:
            request = self._requests[number]
            if request.stopped:
                request.arrive(Ended(Finish.STOPPED))
                del self._requests[number]
            elif request.progress is _Progress.PREPARING:
                self._blame(number, f"The engine's process {cause} while it prepared this request.")
            elif request.sent >= MAX_SENDS:
                self._fail([number], EngineError(f"The engine died {request.sent} times: continue the reply later."))
            elif alone is None or alone == number:
                request.suspect = True
                request.deaths += alone == number
                if request.deaths >= MAX_REQUEST_DEATHS:
                    self._blame(number, f"The engine's process {cause} {request.deaths} times at this request.")
            request.progress = _Progress.UNSENT
        self._unsent = deque(self._requests)

    def _blame(self, number: int, why: str) -> None:
        """The cause is known, so the process itself is not at fault."""
        self._deaths = 0
        _log.error("a request is failed alone: %s", why)
        self._fail([number], EngineError(why))

    def _fail(self, numbers: list[int], error: PalaverError) -> None:
        for number in numbers:
            request = self._requests.pop(number, None)
            if request is not None:
                request.arrivals.put_nowait(error)

    def _take(self, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "outputs" in frame:
            for number, output in frame["outputs"]:
                self._arrive(number, output)
        elif "request" in frame:
            request = self._requests.get(frame["request"])
            if request is not None:
                request.progress = _Progress[frame["progress"]]
        elif "ready" in frame:
            self._info = unpack(frame["ready"])
            self._writer = writer
            self._status = EngineStatus(EngineState.READY)
            if not self._ready.done():
                self._ready.set_result(None)
            else:
                _log.warning("the engine was started again; %d requests go on", len(self._requests))
            self._send_next()
        elif "answer" in frame:
            waiting = self._asked.pop(frame["number"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame["answer"])
        elif self._told is not None:
            self._told(*frame["loading"])

    def _arrive(self, number: int, packed: Any) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        output = unpack_error(packed) if "error" in packed else unpack(packed)
        if isinstance(output, PalaverError):
            request.arrivals.put_nowait(output)
        else:
            request.arrive(output)
        if isinstance(output, Step):
            self._deaths = 0
        if self._trying == number and (not request.suspect or not isinstance(output, Step | Prefilled | AnswerAsked)):
            self._trying = None
            self._send_next()


def _died_loading(process: EngineProcess, cause: str) -> str:
    last = f": {process.last_lines[-1]}" if process.last_lines else "."
    return f"The engine's process {cause} while it loaded the model{last}"
