"""The connections to vLLM's workers, in which Palaver's sampling runs (`logits_processor.py`)."""

from __future__ import annotations

import asyncio
import math
import socket
from pathlib import Path

from palaver.engines.base import EngineInfo
from palaver.engines.core.token_stream import SourceDied, TokenRequest
from palaver.engines.host.frames import (
    EngineSpec,
    Frame,
    OutputFrame,
    decode_error_frame,
    encode_frame,
    read_frame,
)
from palaver.errors import PalaverError
from palaver.generation import Step

SAME_LOGPROB = 1e-3
"""How much the log-probabilities of one token may differ between vLLM's computation and ours."""
REPORT_TIMEOUT_S = 10.0


class _RegisteredRequest:
    def __init__(self, workers: int) -> None:
        self.missing = workers
        """Workers that have not registered it yet."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: PalaverError | None = None
        """Why it failed in a worker."""
        self.steps: list[Step] = []
        self.changed = asyncio.Event()


class SamplingWorkers:
    """Registers replies in all workers and receives the steps of those that report alternatives."""

    def __init__(self, path: Path, spec: EngineSpec) -> None:
        """Workers connect to the socket at `path` while vLLM starts; `start` accepts them."""
        self._spec = spec
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(256)
        self._writers: list[asyncio.StreamWriter] = []
        self._reading: list[asyncio.Task[None]] = []
        self._requests: dict[int, _RegisteredRequest] = {}
        self._starting: asyncio.Task[None] | None = None
        self._died = False

    async def start(self, count: int, info: EngineInfo) -> None:
        """Accepts all workers, once. They have connected when vLLM is ready."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._accept(count, info))
        await asyncio.shield(self._starting)

    async def _accept(self, count: int, info: EngineInfo) -> None:
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        for _ in range(count):
            connection, _address = await loop.sock_accept(self._listener)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            writer.write(encode_frame({"do": "load", "spec": self._spec, "ready": info}))
            self._writers.append(writer)
            self._reading.append(asyncio.create_task(self._read(reader)))

    async def register(self, request: TokenRequest) -> None:
        """Raises a PalaverError if a worker refuses the request."""
        entry = self._requests[request.number] = _RegisteredRequest(len(self._writers))
        if self._died:
            raise SourceDied("a worker of vLLM has ended.")
        self._broadcast(
            {
                "do": "generate",
                "number": request.number,
                "prompt": request.prompt.without_content(),
                "sampling": request.sampling,
                "choice": request.choice,
            }
        )
        try:
            await entry.ready
        except BaseException:
            self.release(request)
            raise

    async def reported_step(self, request: TokenRequest, token_id: int, logprob: float) -> Step:
        """The step of this token with its alternatives. A worker may report steps before it that vLLM dropped: while
        a prompt is computed in chunks each chunk has one. Raises the error that a worker reports instead."""
        entry = self._requests[request.number]
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            while True:
                while entry.steps:
                    step = entry.steps.pop(0)
                    same = step.token_id == token_id and math.isclose(step.logprob, logprob, abs_tol=SAME_LOGPROB)
                    if same:
                        return step
                if entry.error is not None:
                    raise entry.error
                entry.changed.clear()
                await entry.changed.wait()

    def release(self, request: TokenRequest) -> None:
        if self._requests.pop(request.number, None) is not None:
            self._broadcast({"do": "cancel", "number": request.number})

    def close(self) -> None:
        self._listener.close()
        for task in self._reading:
            task.cancel()
        for writer in self._writers:
            writer.close()

    def _broadcast(self, frame: Frame) -> None:
        data = encode_frame(frame)
        for writer in self._writers:
            writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await read_frame(reader)) is not None:
            if "request" in frame:
                self._count_ready(frame["request"])
            else:
                for number, output in frame["outputs"]:
                    self._handle_output(number, output)
        self._died = True
        for entry in self._requests.values():
            if not entry.ready.done():
                entry.ready.set_exception(SourceDied("a worker of vLLM has ended."))

    def _count_ready(self, number: int) -> None:
        entry = self._requests.get(number)
        if entry is None:
            return
        entry.missing -= 1
        if not entry.missing and not entry.ready.done():
            entry.ready.set_result(None)

    def _handle_output(self, number: int, output: OutputFrame) -> None:
        entry = self._requests.get(number)
        if entry is None:
            return
        if isinstance(output, Step):
            entry.steps.append(output)
        elif isinstance(output, dict):
            entry.error = decode_error_frame(output)
            if not entry.ready.done():
                entry.ready.set_exception(entry.error)
        entry.changed.set()
