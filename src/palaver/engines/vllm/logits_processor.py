"""Palaver's sampling inside of vLLM: a logits processor of vLLM's V1 interface, in each of vLLM's worker processes.

For each row that belongs to a registered reply it chooses the token by the rules of `core/sampler.py`: all other tokens
get minus infinity, and vLLM takes the likeliest one. The replies are registered over a socket, in a thread of its own:
their grammars are compiled and their tokens replayed there, not between two steps."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cachetools import LRUCache
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from palaver.engines.core.generation import PendingStep
from palaver.engines.core.logits_processor import LogitsProcessor as ReplyProcessor
from palaver.engines.core.logits_processor import ProcessorFactory
from palaver.engines.core.sampler import HostLogits, Logits, SampledStep
from palaver.engines.host.frames import Frame, OutputFrame, encode_error, encode_frame, read_frame
from palaver.errors import EngineError, PalaverError
from palaver.generation import Step

SOCKET_VARIABLE = "PALAVER_SAMPLING_SOCKET"
"""The environment variable with the path of the engine process's socket."""
REQUEST, SENTINEL = "palaver_request", "palaver_sentinel"
"""Names in a request's `extra_args`: its number, and a token id that ends it in vLLM."""
MAX_REPLIES = 8192
"""Replies that are registered at once. More than an engine has open."""
REPLAY_TOKENS = 256


class WorkerReply:
    """A registered reply, and how many of the tokens that vLLM generated for it its processor has seen."""

    def __init__(self, processor: ReplyProcessor) -> None:
        self.processor = processor
        self.reported = processor.sampling.logprobs > 0
        """Whether its steps are sent to the engine process, with their alternatives."""
        self._seen = 0

    def follow(self, output_ids: Sequence[int]) -> None:
        for token_id in output_ids[self._seen :]:
            self.processor.append_token(token_id)
            self._seen += 1


class ReplyRegistry:
    """The replies by the numbers of their requests. A thread reads them from the socket."""

    def __init__(self, path: str) -> None:
        self._replies: LRUCache[int, WorkerReply] = LRUCache(MAX_REPLIES)
        self._factory: ProcessorFactory | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        threading.Thread(target=self._run, args=(connection,), name="palaver-replies", daemon=True).start()

    def get(self, number: int) -> WorkerReply | None:
        return self._replies.get(number)

    def report(self, number: int, output: OutputFrame) -> None:
        """Sends an output to the engine process. Called in the thread of the model."""
        if self._loop is not None:
            frame: Frame = {"outputs": [(number, output)]}
            self._loop.call_soon_threadsafe(self._send, frame)

    def _run(self, connection: socket.socket) -> None:
        try:
            asyncio.run(self._serve(connection))
        except BaseException as error:
            traceback.print_exception(error)
        os._exit(0)  # the engine process is gone

    async def _serve(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        while (frame := await read_frame(reader)) is not None:
            match frame["do"]:
                case "load":
                    self._factory = ProcessorFactory(frame["ready"], frame["spec"].vocabulary)
                    threading.Thread(target=self._factory.warm, daemon=True).start()
                case "generate":
                    task = asyncio.create_task(self._register(frame))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case _:
                    self._replies.pop(frame["number"], None)

    async def _register(self, frame: Frame) -> None:
        number, prompt, sampling = frame["number"], frame["prompt"], frame["sampling"]
        assert self._factory is not None
        try:
            grammars = await self._factory.prepare(prompt, sampling)
            processor = self._factory.build(prompt, sampling, frame["choice"], grammars)
            for position, token_id in enumerate(prompt.reply_ids, 1):
                processor.append_token(token_id)
                if position % REPLAY_TOKENS == 0:
                    await asyncio.sleep(0)
            processor.start_healing(self._factory.token_healing(prompt))
        except Exception as error:
            self._send({"outputs": [(number, encode_error(_as_palaver_error(error)))]})
            return
        self._replies[number] = WorkerReply(processor)
        self._send({"request": number, "progress": "RUNNING"})

    def _send(self, frame: Frame) -> None:
        assert self._writer is not None
        self._writer.write(encode_frame(frame))


class PalaverLogitsProcessor(LogitsProcessor):
    """vLLM makes one in each worker. An exception here would end vLLM: an error fails its own request alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        path = os.environ.get(SOCKET_VARIABLE)
        self._registry = None if path is None else ReplyRegistry(path)
        self._rows: dict[int, tuple[dict[str, Any], Sequence[int]]] = {}
        """By row of the batch: the request's `extra_args` and its output ids, a list that vLLM appends to."""
        self._logits = _logits_on(device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Output ids are not read here: vLLM may have placeholders in them until just before it samples."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, output_ids in batch_update.added:
            self._rows.pop(row, None)
            if params.extra_args and REQUEST in params.extra_args:
                self._rows[row] = (params.extra_args, output_ids)
        for one, two, direction in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(two, None)
            if first is not None:
                self._rows[two] = first
            if second is not None and direction is MoveDirectionality.SWAP:
                self._rows[one] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows: list[int] = []
        chosen: list[int] = []
        pending: list[tuple[int, dict[str, Any], WorkerReply]] = []
        for row, (arguments, output_ids) in self._rows.items():
            reply = self._registry.get(arguments[REQUEST]) if self._registry is not None else None
            if reply is None:  # it was aborted
                continue
            try:
                reply.follow(output_ids)
            except Exception as error:
                self._fail(arguments, error)
                rows.append(row)
                chosen.append(arguments[SENTINEL])
                continue
            if reply.processor.reply.ended is None:
                pending.append((row, arguments, reply))
            else:
                rows.append(row)
                chosen.append(arguments[SENTINEL])
        for (row, arguments, reply), step in zip(pending, self._sample(logits, pending), strict=True):
            rows.append(row)
            chosen.append(self._choose(arguments, reply, step))
        if rows:
            logits[rows] = -torch.inf
            logits[rows, chosen] = 0.0
        return logits

    def _choose(self, arguments: dict[str, Any], reply: WorkerReply, step: SampledStep | Exception) -> int:
        """The token of a row; the sentinel if it has none. A sentinel that is a token is reported as a step."""
        try:
            if isinstance(step, PendingStep):
                step = step.build()
            if isinstance(step, Step):
                ends = step.token_id == arguments[SENTINEL]
                if (reply.reported or ends) and self._registry is not None:
                    self._registry.report(arguments[REQUEST], step)
                return step.token_id
        except Exception as error:
            step = error
        self._fail(arguments, step)
        return int(arguments[SENTINEL])

    def _sample(
        self, logits: torch.Tensor, pending: Sequence[tuple[int, dict[str, Any], WorkerReply]]
    ) -> Sequence[SampledStep | Exception]:
        """All rows together; if that fails, each alone."""
        if not pending:
            return []
        processors = [reply.processor for _, _, reply in pending]
        rows = [row for row, _, _ in pending]
        batch = self._logits(logits if rows == list(range(len(logits))) else logits[rows])
        try:
            return batch.sample(processors)
        except Exception:
            return [_sample_alone(batch.row(place), processor) for place, processor in enumerate(processors)]

    def _fail(self, arguments: dict[str, Any], error: Exception) -> None:
        if self._registry is not None:
            self._registry.report(arguments[REQUEST], encode_error(_as_palaver_error(error)))


def _sample_alone(logits: Logits, processor: ReplyProcessor) -> SampledStep | Exception:
    try:
        return logits.sample([processor])[0]
    except Exception as error:
        return error


def _as_palaver_error(error: Exception) -> PalaverError:
    if isinstance(error, PalaverError):
        return error
    traceback.print_exception(error, file=sys.stderr)
    return EngineError(f"The sampler failed ({type(error).__name__}: {error}).")


def _logits_on(device: torch.device) -> Callable[[torch.Tensor], Logits]:
    """On CUDA a batch is sampled where it is."""
    if device.type == "cuda":
        from palaver.engines.torch.device_sampler import DeviceSampler

        return DeviceSampler(device).logits
    return lambda tensor: HostLogits(tensor.detach().float().cpu().numpy())
