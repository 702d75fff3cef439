"""The supervisor of the engine process: starts it, sends requests to it, and starts it again when it dies.

A reply that was running continues from its token ids in the new process. Its reader notices only a pause."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Self

from cachetools import LRUCache

from palaver.engines.base import EngineInfo, EngineState, EngineStatus
from palaver.engines.core.media import MAX_EXPANSIONS
from palaver.engines.host.frames import (
    EngineSpec,
    Frame,
    OutputFrame,
    decode_error_frame,
    encode_error,
    encode_frame,
    read_frame,
)
from palaver.engines.host.process import ChildProcess
from palaver.errors import EngineClosed, EngineError, PalaverError, UnsupportedContent
from palaver.generation import (
    AnswerRequested,
    Draft,
    Ended,
    Finish,
    MediaExpansion,
    MediaItem,
    Output,
    Prefilled,
    Prompt,
    Step,
)
from palaver.sampling import Sampling

_log = logging.getLogger(__name__)
MAX_DEATHS = 3
"""Deaths in a row, without a token in between, after which all requests fail and the next start is delayed."""
MAX_REQUEST_DEATHS = 2
"""Deaths that only one request can have caused, after which that request fails."""
CLEARING_TOKENS = 8
"""Tokens in a new process that clear a request of suspicion. Tokens computed before the death may have been lost."""
MAX_SENDS = 8
"""Processes that one request is sent to at most."""
_CLOSE_S = 10.0
_LOAD_THREADS = 4
_MAX_DELAY_S = 30.0

ReportProgress = Callable[[float | None, str], None]
"""Called with the progress of loading, from 0 to 1 or None if unknown, and a note on the current step."""


class _Progress(Enum):
    """The progress of a request in the current process."""

    UNSENT = auto()
    SENT = auto()
    PREPARING = auto()
    """The process compiles the request's grammars and looks up its banned strings."""
    RUNNING = auto()


class OutputBuffer:
    """The outputs of a request until its one reader takes them. Cheaper for each token than a queue of asyncio."""

    def __init__(self) -> None:
        self.outputs: deque[Output | PalaverError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output | PalaverError) -> None:
        self.outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """A future that is done with the next output."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


@dataclass
class PendingRequest:
    """One generation and its tokens so far, from which it can be sent again."""

    prompt: Prompt
    sampling: Sampling
    choice: int
    generated_ids: list[int] = field(default_factory=list)
    prefilled: bool = False
    stopped: bool = False
    answer_now_requested: bool = False
    progress: _Progress = _Progress.UNSENT
    sends: int = 0
    """How many processes it was sent to."""
    fresh_tokens: int = 0
    """Tokens from the current process."""
    suspect: bool = False
    """Whether it may have caused the last death. Cleared by its first tokens in the next process."""
    deaths: int = 0
    """Deaths that no other request can have caused. Cleared in the same way."""
    outputs: OutputBuffer = field(default_factory=OutputBuffer)

    @property
    def compiles(self) -> bool:
        """Whether the process compiles grammars or looks up strings for it, which can end the process."""
        sampling = self.sampling
        strings = (*sampling.banned_strings, *(sampling.dry_sequence_breakers if sampling.dry_multiplier else ()))
        return bool(self.prompt.phases.held or sampling.constraint or strings)

    def frame(self, number: int) -> Frame:
        reply_ids = (*self.prompt.reply_ids, *self.generated_ids)
        prompt = replace(self.prompt.without_content(), reply_ids=reply_ids)
        return {
            "do": "generate", "number": number, "prompt": prompt, "sampling": self.sampling, "choice": self.choice
        }  # fmt: skip

    def add_output(self, output: Output | PalaverError) -> None:
        if isinstance(output, Step):
            self.generated_ids.append(output.token_id)
            self.fresh_tokens += 1
            if self.fresh_tokens >= CLEARING_TOKENS:
                self.suspect, self.deaths = False, 0
        elif isinstance(output, AnswerRequested):
            self.prompt = replace(self.prompt, answer_at=output.position)
        elif isinstance(output, Prefilled):
            if self.prefilled:
                return
            self.prefilled = True
        self.outputs.put(output)


@dataclass
class _PendingExpansion:
    """An item that is being expanded, and how many processes died meanwhile."""

    item: MediaItem
    expansion: asyncio.Future[MediaExpansion]
    sent: bool = False
    deaths: int = 0


class PendingOutputs:
    """Reads the outputs of a request to its end or its error."""

    def __init__(self, request: PendingRequest) -> None:
        self._request = request
        self.finished = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self.finished:
            raise StopAsyncIteration
        buffer = self._request.outputs
        while not buffer.outputs:
            await buffer.wait()
        output = buffer.outputs.popleft()
        if isinstance(output, PalaverError):
            self.finished = True
            raise output
        self.finished = isinstance(output, Ended)
        return output


class HostedGeneration(PendingOutputs):
    """The outputs of one generation in the engine process."""

    def __init__(self, request: PendingRequest, send: Callable[[Frame], bool], number: int) -> None:
        super().__init__(request)
        self._send = send
        self._number = number

    def stop(self) -> None:
        self._request.stopped = True
        if self._request.progress is _Progress.UNSENT or not self._send({"do": "stop", "number": self._number}):
            self._request.add_output(Ended(Finish.STOPPED))

    def answer_now(self) -> None:
        self._request.answer_now_requested = True
        if self._request.progress is not _Progress.UNSENT:
            self._send({"do": "answer_now", "number": self._number})


class HostedEngine:
    """An engine in a process of its own. Entering the context starts the process, leaving it ends the process."""

    def __init__(
        self, spec: EngineSpec, on_progress: ReportProgress | None = None, child: ChildProcess | None = None
    ) -> None:
        """`on_progress` is called with the progress of loading. `child` is a process that was started ahead."""
        self._spec = spec
        self._on_progress = on_progress
        self._child = child
        self._info: EngineInfo | None = None
        self._status = EngineStatus(EngineState.STARTING, "The engine is starting.")
        self._process: EngineProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._requests: dict[int, PendingRequest] = {}
        self._send_queue: deque[int] = deque()
        """Requests to send. After a death suspects are sent one by one, to find the one that caused it."""
        self._on_trial: int | None = None
        """The suspect that was sent last and is not cleared yet."""
        self._queries: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._expansions: LRUCache[str, MediaExpansion] = LRUCache(MAX_EXPANSIONS)
        self._expansions_lock = threading.Lock()
        self._expanding: dict[int, _PendingExpansion] = {}
        self._load_threads = ThreadPoolExecutor(_LOAD_THREADS, "palaver-media")
        """Threads of its own: those of the event loop may all wait for expansions."""
        self._loads: set[asyncio.Task[None]] = set()
        """Items that are being decoded for the process."""
        self._next_number = 0
        self._deaths = 0
        """In a row, with no token in between."""
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None]

    async def __aenter__(self) -> HostedEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the process and waits until the model is loaded. Raises what loading raised."""
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._supervisor = asyncio.create_task(self._supervise())
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
        """Raises EngineError while the engine can't be started again."""
        if self._closed:
            raise EngineClosed
        if self._status.state is EngineState.FAILED:
            raise EngineError(self._status.reason)
        number, request = self._next_number, PendingRequest(prompt, sampling, choice)
        self._next_number += 1
        self._requests[number] = request
        self._send_queue.append(number)
        self._send_next()
        generation = HostedGeneration(request, self._send, number)
        try:
            yield generation
        finally:
            self._requests.pop(number, None)
            if not generation.finished and request.progress is not _Progress.UNSENT:
                self._send({"do": "cancel", "number": number})
            if self._on_trial == number:
                self._on_trial = None
                self._send_next()

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        """Asks the process, if the expansion is not known yet. Survives the death of the process."""
        assert threading.get_ident() != self._thread, "it blocks, and the event loop has to run meanwhile"
        with self._expansions_lock:
            known = self._expansions.get(item.key)
        return asyncio.run_coroutine_threadsafe(self._expand(item), self._loop).result() if known is None else known

    async def _expand(self, item: MediaItem) -> MediaExpansion:
        if self._closed:
            raise EngineClosed
        number = self._next_number
        self._next_number += 1
        pending = self._expanding[number] = _PendingExpansion(item, self._loop.create_future())
        self._send_expansions()
        try:
            expansion = await pending.expansion
        finally:
            self._expanding.pop(number, None)
        with self._expansions_lock:
            self._expansions[item.key] = expansion
        return expansion

    def _send_expansions(self) -> None:
        for number, pending in self._expanding.items():
            if not pending.sent:
                item = replace(pending.item, load=None)
                pending.sent = self._send({"do": "expand", "number": number, "item": item})

    def _fail_expansions(self, error: PalaverError, deaths: int = 0) -> None:
        """Fails those that saw so many deaths."""
        for pending in self._expanding.values():
            if pending.deaths >= deaths and not pending.expansion.done():
                pending.expansion.set_exception(error)

    async def _send_content(self, number: int, key: str) -> None:
        """Sends what the process lacks for a request or an expansion."""
        item = self._find_item(number, key)
        if item is None or item.load is None:
            return
        frame: Frame = {"do": "content", "number": number, "key": key}
        try:
            self._send({**frame, "content": await self._loop.run_in_executor(self._load_threads, item.load)})
        except PalaverError as error:
            self._send({**frame, "error": encode_error(error)})
        except Exception as error:
            _log.exception("media could not be decoded")
            failed = EngineError(f"The {item.kind} couldn't be decoded ({type(error).__name__}: {error}).")
            self._send({**frame, "error": encode_error(failed)})

    def _find_item(self, number: int, key: str) -> MediaItem | None:
        if number in self._expanding:
            return self._expanding[number].item
        request = self._requests.get(number)
        items = (span.item for span in request.prompt.media) if request is not None else ()
        return next((item for item in items if item.key == key), None)

    async def metrics(self) -> dict[str, float]:
        """The engine's figures; empty while no process runs."""
        return await self._query({"do": "figures"})

    async def forget(self, conversation: str) -> None:
        """Does nothing while no process runs: the next one starts with an empty cache."""
        await self._query({"do": "forget", "conversation": conversation})

    async def close(self) -> None:
        """Ends the process. One that is still loading is killed at once; one that runs may finish its step."""
        if self._closed:
            return
        self._closed = True
        self._load_threads.shutdown(wait=False, cancel_futures=True)
        if self._supervisor is None:
            return
        if self._send({"do": "close"}):
            await asyncio.wait([self._supervisor], timeout=_CLOSE_S)
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])

    async def _query(self, query: Frame) -> dict[str, float]:
        number = self._next_number
        self._next_number += 1
        self._queries[number] = asyncio.get_running_loop().create_future()
        if not self._send({**query, "number": number}):
            del self._queries[number]
            return {}
        future = self._queries[number]
        try:
            await asyncio.wait([future], timeout=_CLOSE_S)
            return future.result() if future.done() and not future.cancelled() else {}
        finally:
            self._queries.pop(number, None)

    def _send(self, frame: Frame) -> bool:
        """Sends a frame to the current process. Returns False if none runs."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(encode_frame(frame))
        return True

    def _send_next(self) -> None:
        """Sends the queued requests: all of them, or up to the next suspect, which is tried alone."""
        while self._send_queue and self._writer is not None and self._on_trial is None:
            number = self._send_queue.popleft()
            request = self._requests.get(number)
            if request is None or request.stopped:
                continue
            request.progress = _Progress.SENT
            request.sends += 1
            request.fresh_tokens = 0
            try:
                self._send(request.frame(number))
            except ValueError:
                unsupported = "A text of the request holds half of a character (a lone surrogate)."
                self._fail_requests([number], UnsupportedContent(unsupported))
                continue
            if request.answer_now_requested and request.prompt.answer_at is None:
                self._send({"do": "answer_now", "number": number})
            if request.suspect:
                self._on_trial = number

    async def _supervise(self) -> None:
        """Runs processes, one after another, until the engine is closed. At its end all requests get an error."""
        reason: PalaverError = EngineClosed()
        try:
            while True:
                process = EngineProcess(self._spec, self._handle_frame, self._child)
                self._child = None
                cause = await self._run(process)
                if self._closed:
                    return
                if not self._ready.done():
                    reason = process.failure or EngineError(_describe_load_failure(process, cause))
                    return
                await asyncio.sleep(self._handle_death(process, cause))
        except Exception as error:
            _log.exception("the engine's supervisor failed")
            reason = EngineError(f"The engine's supervisor failed ({type(error).__name__}: {error}).")
        finally:
            self._closed = True
            self._status = EngineStatus(EngineState.FAILED, str(reason))
            if not self._ready.done():
                self._ready.set_exception(reason)
                self._ready.exception()  # mark it as retrieved: the caller of `start` may be cancelled
            self._fail_requests(list(self._requests), reason)
            self._fail_expansions(reason)

    async def _run(self, process: EngineProcess) -> str:
        """Runs one process from its start to its death. Returns how it ended."""
        if self._on_progress is not None:
            self._on_progress(None, "starting the engine")
        self._process = process
        try:
            return await process.run()
        finally:
            self._writer = None
            for future in self._queries.values():
                future.cancel()

    def _handle_death(self, process: EngineProcess, cause: str) -> float:
        """Fails the requests that can't be sent again. Returns the delay in seconds before the next start."""
        if signal.SIGABRT.name in cause and process.last_words:
            cause = f"{cause} ({process.last_words})"
        _log.error("the engine's process %s%s", cause, "".join(f"\n    {line}" for line in process.last_lines))
        self._deaths += 1
        self._assign_blame(cause)
        for pending in self._expanding.values():
            pending.deaths += pending.sent
            pending.sent = False
        died = EngineError(f"The engine's process {cause} while it processed a picture or a sound.")
        self._fail_expansions(died, MAX_REQUEST_DEATHS)
        if process.failure is None and self._deaths < MAX_DEATHS:
            self._status = EngineStatus(EngineState.STARTING, f"The engine's process {cause} and is started again.")
            return 0.0
        if process.failure is not None:
            why = f"The engine can't be started again: {process.failure}"
        else:
            why = f"The engine died {self._deaths} times in a row (its process {cause}): continue the reply later."
        self._status = EngineStatus(EngineState.FAILED, why)
        self._fail_requests(list(self._requests), EngineError(why))
        delay = min(2.0 ** max(0, self._deaths - MAX_DEATHS), _MAX_DELAY_S)
        _log.error("%s Next attempt in %g s.", why, delay)
        return delay

    def _assign_blame(self, cause: str) -> None:
        """Decides which requests are sent again, and which may have caused the death."""
        sent = [number for number, request in self._requests.items() if request.progress is not _Progress.UNSENT]
        only_suspect = self._on_trial if self._on_trial is not None else sent[0] if len(sent) == 1 else None
        self._on_trial = None
        for number in sent:
            request = self._requests[number]
            if request.stopped:
                request.add_output(Ended(Finish.STOPPED))
                del self._requests[number]
            elif request.progress is _Progress.PREPARING and request.compiles:
                self._blame(number, f"The engine's process {cause} while it prepared this request.")
            elif request.sends >= MAX_SENDS:
                died = f"The engine died {request.sends} times: continue the reply later."
                self._fail_requests([number], EngineError(died))
            elif only_suspect is None or only_suspect == number:
                request.suspect = True
                request.deaths += only_suspect == number
                if request.deaths >= MAX_REQUEST_DEATHS:
                    self._blame(number, f"The engine's process {cause} {request.deaths} times at this request.")
            request.progress = _Progress.UNSENT
        self._send_queue = deque(self._requests)

    def _blame(self, number: int, why: str) -> None:
        """Fails the request that caused the death. The count of deaths in a row starts again."""
        self._deaths = 0
        _log.error("a request is failed alone: %s", why)
        self._fail_requests([number], EngineError(why))

    def _fail_requests(self, numbers: list[int], error: PalaverError) -> None:
        for number in numbers:
            request = self._requests.pop(number, None)
            if request is not None:
                request.outputs.put(error)

    def _handle_frame(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        if "outputs" in frame:
            for number, output in frame["outputs"]:
                self._handle_output(number, output)
        elif "request" in frame:
            request = self._requests.get(frame["request"])
            if request is not None:
                request.progress = _Progress[frame["progress"]]
        elif "ready" in frame:
            self._info = frame["ready"]
            self._writer = writer
            self._status = EngineStatus(EngineState.READY)
            if not self._ready.done():
                self._ready.set_result(None)
            else:
                _log.warning("the engine was started again; %d requests go on", len(self._requests))
            self._send_next()
            self._send_expansions()
        elif "log" in frame:
            level, name, message = frame["log"]
            logging.getLogger(name).log(level, "%s", message)
        elif "wants" in frame:
            load = asyncio.create_task(self._send_content(frame["number"], frame["wants"]))
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)
        elif "expansion" in frame or "refused" in frame:
            self._handle_expansion(frame)
        elif "answer" in frame:
            future = self._queries.pop(frame["number"], None)
            if future is not None and not future.done():
                future.set_result(frame["answer"])
        elif self._on_progress is not None:
            self._on_progress(*frame["loading"])

    def _handle_expansion(self, frame: Frame) -> None:
        pending = self._expanding.get(frame["number"])
        if pending is None or pending.expansion.done():
            return
        if "refused" in frame:
            pending.expansion.set_exception(decode_error_frame(frame["refused"]))
        else:
            pending.expansion.set_result(frame["expansion"])

    def _handle_output(self, number: int, sent: OutputFrame) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        request.add_output(decode_error_frame(sent) if isinstance(sent, dict) else sent)
        if isinstance(sent, Step):
            self._deaths = 0
        if self._on_trial != number:
            return
        if not request.suspect or not isinstance(sent, Step | Draft | Prefilled | AnswerRequested):
            self._on_trial = None
            self._send_next()


def _describe_load_failure(process: EngineProcess, cause: str) -> str:
    last = f": {process.last_words}" if process.last_words else "."
    return f"The engine's process {cause} while it loaded the model{last}"


_CRASH = "Fatal Python error: "
_SOURCE_FOLDER = re.compile(r"^/\S*/(?=\S+:\d+: )")
"""The folder in which a library was compiled, in a message such as "/src/ggml.c:12: GGML_ASSERT(n > 0) failed"."""
OnFrame = Callable[[Frame, asyncio.StreamWriter], None]
_MAX_LINES = 40
_EXIT_S = 2.0
"""How long a process may take to exit after it closed its connection."""


class EngineProcess:
    def __init__(self, spec: EngineSpec, on_frame: OnFrame, child: ChildProcess | None = None) -> None:
        """`on_frame` is called with each frame of the process and the writer to it. `child` is a process that was
        started ahead."""
        self._spec = spec
        self._on_frame = on_frame
        self._child = child
        self.last_lines: deque[str] = deque(maxlen=_MAX_LINES)
        """The last lines of its stderr."""
        self.failure: PalaverError | None = None
        """Why the model couldn't be loaded, if the process reported it."""

    @property
    def id(self) -> int | None:
        return self._child.popen.pid if self._child is not None else None

    async def run(self) -> str:
        """Runs the process until it exits. Returns how it ended, as a verb phrase. Kills the process when cancelled."""
        try:
            child = self._child = self._child or ChildProcess(python=self._spec.python)
        except OSError as error:
            return f"couldn't be started ({error})"
        connection, stderr = child.connect()
        reading = asyncio.create_task(self._read_lines(stderr))
        grace = 0.0
        try:
            problem = await self._read_frames(connection)
            grace = 0.0 if problem else _EXIT_S
        finally:
            code = await asyncio.to_thread(_reap, child.popen, grace)
            child.remove_files()
            await asyncio.wait([reading], timeout=_EXIT_S)
            reading.cancel()
        return problem or _describe_exit(code)

    async def _read_frames(self, connection: socket.socket) -> str:
        """Reads frames until the connection is closed. Returns what went wrong, or an empty string."""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            writer.write(encode_frame({"do": "load", "spec": self._spec}))
            while (frame := await read_frame(reader)) is not None:
                if "failed" in frame:
                    self.failure = decode_error_frame(frame["failed"])
                    return "couldn't load the model"
                self._on_frame(frame, writer)
        except Exception as error:
            return f"sent what couldn't be taken ({type(error).__name__}: {error})"
        finally:
            writer.close()
        return ""

    async def _read_lines(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        rest = b""
        try:
            while data := await reader.read(1 << 16):
                *lines, rest = (rest + data)[-(1 << 16) :].split(b"\n")
                self._add_lines(lines)
        finally:
            self._add_lines([rest])
            transport.close()

    @property
    def last_words(self) -> str:
        """The line of its stderr that says why it ended: the last one, or what a library printed before it aborted.
        The stack that Python prints after an abort doesn't say why."""
        lines = list(self.last_lines)
        crash = next((place for place, line in enumerate(lines) if line.startswith(_CRASH)), None)
        if crash is not None:
            lines = lines[: max(1, crash)]
        return _SOURCE_FOLDER.sub("", lines[-1]).strip() if lines else ""

    def _add_lines(self, lines: list[bytes]) -> None:
        self.last_lines.extend(line.decode(errors="replace")[:500] for line in lines if line.strip())


def _reap(process: subprocess.Popen[bytes], grace: float) -> int:
    """Waits for the process to exit, and kills it after the grace period. Returns its exit code."""
    try:
        return process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
