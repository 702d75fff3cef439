"""The engine process: loads the engine, runs generations and sends the outputs of each step in one frame."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from palaver.engines.base import EngineGeneration
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import EngineOptions
from palaver.engines.host.frames import (
    EngineSpec,
    Frame,
    LoadProgress,
    OutputFrame,
    decode_error_frame,
    encode_error,
    encode_frame,
    read_frame,
)
from palaver.engines.host.process import shorten_waits
from palaver.errors import BrokenModel, EngineError, PalaverError
from palaver.generation import Ended, Finish, MediaContent, MediaItem
from palaver.memory import collect_seldom

if TYPE_CHECKING:
    from concurrent.futures import Future

    from palaver.engines.cluster.engine import ClusterEngine
    from palaver.engines.core.token_stream import TokenStreamEngine
    from palaver.engines.diffusion.engine import DiffusionEngine
    from palaver.engines.llamacpp.context import LoadedModel

Weights: TypeAlias = "Future[LoadedModel | None]"
ChildEngine: TypeAlias = "LocalEngine | DiffusionEngine | TokenStreamEngine | ClusterEngine"
_RUN_GGUF = ("llamacpp", "compiled")
_OPENED = ("vllm", "remote")
"""Engines whose loading ends in the event loop."""
_PROGRESS_INTERVAL_S = 0.2
"""How often the supervisor gets the progress of loading."""
_WARM_DELAY_S = 1.0
"""How long the warm-up of grammars waits, so that a first request does not share the processor with it."""


def make_engine(spec: EngineSpec, progress: LoadProgress, weights: Weights | None = None) -> ChildEngine:
    """Loads the engine that a spec describes. `weights`: of a GGUF file, which are loaded ahead."""
    loaders: dict[str, Callable[[EngineSpec, LoadProgress], ChildEngine]] = {
        "torch": _load_folder,
        "compiled": partial(_load_gguf, weights=weights),
        "llamacpp": partial(_load_llamacpp, weights=weights),
        "mlx": _load_mlx,
        "diffusion": _load_diffusion,
        "vllm": _load_vllm,
        "remote": _load_remote,
        "ray": _load_ray,
    }
    engine = loaders[spec.engine](spec, progress)
    warming = threading.Timer(_WARM_DELAY_S, engine.warm_grammars)
    warming.daemon = True
    warming.start()
    return engine


def _load_folder(spec: EngineSpec, progress: LoadProgress) -> LocalEngine:
    progress.note = "importing the libraries"
    from palaver.engines.loader import load_engine

    progress.begin(spec.model)
    return load_engine(
        spec.model,
        vocabulary=spec.vocabulary,
        device=spec.device,
        dtype=spec.dtype,
        options=_engine_options(spec),
        adapter=spec.adapter,
        quantize_bits=spec.quantize_bits,
        on_failure=exit_process,
    )


def _load_gguf(spec: EngineSpec, progress: LoadProgress, weights: Weights | None) -> LocalEngine:
    """With compiled steps; with llama.cpp where they can't be used and are not required."""
    from palaver.engines.loader import load_gguf

    progress.begin(spec.model)
    options = _engine_options(spec)
    engine = load_gguf(spec.model, vocabulary=spec.vocabulary, options=options, on_failure=exit_process)
    return _load_llamacpp(spec, progress, weights) if engine is None else engine


def _load_llamacpp(spec: EngineSpec, progress: LoadProgress, weights: Weights | None) -> LocalEngine:
    shorten_waits()
    from palaver.engines.llamacpp.engine import load

    def report(fraction: float) -> None:
        progress.loaded = fraction

    progress.note = "loading the weights"
    return load(
        spec.model,
        vocabulary=spec.vocabulary,
        device=spec.device,
        options=_engine_options(spec),
        adapter=spec.adapter,
        mmproj=spec.mmproj,
        report=report,
        weights=None if weights is None else weights.result(),
        on_failure=exit_process,
    )


def _load_mlx(spec: EngineSpec, progress: LoadProgress) -> LocalEngine:
    progress.note = "importing the libraries"
    from palaver.engines.mlx.engine import load
    from palaver.engines.mlx.loader import import_mlx

    import_mlx()
    progress.begin(spec.model)
    return load(
        spec.model,
        vocabulary=spec.vocabulary,
        device=spec.device,
        dtype=spec.dtype,
        options=_engine_options(spec),
        adapter=spec.adapter,
        on_failure=exit_process,
    )


def _load_diffusion(spec: EngineSpec, progress: LoadProgress) -> DiffusionEngine:
    progress.note = "importing the libraries"
    from palaver.engines.diffusion.engine import load

    progress.begin(spec.model)
    return load(
        spec.model,
        vocabulary=spec.vocabulary,
        trained=spec.diffusion,
        device=spec.device,
        dtype=spec.dtype,
        options=_engine_options(spec),
        adapter=spec.adapter,
        quantize_bits=spec.quantize_bits,
        on_failure=exit_process,
    )


def _load_vllm(spec: EngineSpec, progress: LoadProgress) -> TokenStreamEngine:
    progress.note = "starting vLLM"
    from palaver.engines.vllm.engine import load

    return load(
        spec.model,
        vocabulary=spec.vocabulary,
        device=spec.device,
        dtype=spec.dtype,
        context=spec.context,
        cache_bytes=spec.cache_bytes,
        max_running=spec.max_running,
        compiled=spec.compiled,
        adapter=spec.adapter,
        native_sampling=spec.native_sampling,
        on_failure=exit_process,
    )


def _load_remote(spec: EngineSpec, progress: LoadProgress) -> TokenStreamEngine:
    progress.note = "connecting to the server"
    from palaver.engines.remote.engine import load

    assert spec.address is not None
    return load(
        spec.model,
        address=spec.address,
        vocabulary=spec.vocabulary,
        key=spec.key,
        context=spec.context,
        max_running=spec.max_running,
    )


def _load_ray(spec: EngineSpec, progress: LoadProgress) -> ClusterEngine:
    progress.note = "connecting to the cluster"
    from palaver.engines.cluster.engine import load

    assert spec.address is not None
    return load(spec.address, spec.vocabulary)


def _engine_options(spec: EngineSpec) -> EngineOptions:
    return EngineOptions(
        exact=spec.exact,
        context=spec.context,
        compiled=spec.compiled,
        cache_bytes=spec.cache_bytes,
        max_running=spec.max_running,
        gpu_layers=spec.gpu_layers,
        threads=spec.threads,
        draft_model=spec.draft_model,
        drafts=spec.drafts,
        states=spec.states,
        approximate_cache=spec.approximate_cache,
        search_tiles=True,
    )


def exit_process(error: BaseException) -> None:
    """Ends the process at once, from any thread. The supervisor starts another one and sends the requests again."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(os.EX_SOFTWARE)


def _as_model_error(error: Exception) -> PalaverError:
    if isinstance(error, PalaverError):
        return error
    return BrokenModel(f"The model couldn't be loaded ({type(error).__name__}: {error}).")


class LogFrames(logging.Handler):
    """Sends what this package logs in the process to the supervisor, whose log has it."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        super().__init__(logging.INFO)
        self._send = send
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        frame: Frame = {"log": (record.levelno, record.name, self.format(record))}
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, frame)


class EngineHost:
    """Serves one connection to the supervisor. Ends all generations and the engine when it is closed."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, weights: Weights | None = None
    ) -> None:
        self._weights = weights
        self._reader = reader
        self._writer = writer
        self._engine: ChildEngine | None = None
        self._generations: dict[int, EngineGeneration] = {}
        self._preparing: dict[int, bool] = {}
        """Requests whose generations have not begun, and whether they answer from their first token on."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outputs: list[tuple[int, OutputFrame]] = []
        self._flushing = False
        self._contents: dict[tuple[int, str], asyncio.Future[MediaContent]] = {}
        """The content of items that was asked for, by the number of the request and the key of the item."""
        self._commands: dict[str, Callable[[Frame], None]] = {
            "generate": self._start_generation,
            "cancel": self._cancel,
            "stop": self._stop,
            "figures": lambda frame: self._answer(frame, self._metrics()),
            "forget": lambda frame: self._answer(frame, self._forget(frame["conversation"])),
            "answer_now": self._answer_now,
            "expand": self._start_expansion,
            "content": self._take_content,
        }

    async def run(self) -> None:
        log, handler = logging.getLogger("palaver"), LogFrames(self._send)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            await self._serve()
        finally:
            log.removeHandler(handler)

    async def _serve(self) -> None:
        while (frame := await read_frame(self._reader)) is not None:
            if frame["do"] == "load":
                await self._load(frame)
            elif frame["do"] == "close":
                break
            else:
                self._commands[frame["do"]](frame)
        await self._close()

    async def _load(self, frame: Frame) -> None:
        progress = LoadProgress()
        reporting = asyncio.create_task(self._report_progress(progress))
        make = partial(make_engine, frame["spec"], progress, self._weights)
        try:
            if frame["spec"].engine in _RUN_GGUF:  # other engines start processes, which end with the thread
                with ThreadPoolExecutor(1) as loader:  # it ends, and its OpenMP threads no longer count as busy
                    self._engine = await asyncio.get_running_loop().run_in_executor(loader, make)
            else:
                self._engine = await asyncio.to_thread(make)
            if frame["spec"].engine in _OPENED:
                await cast("TokenStreamEngine", self._engine).open()
        except Exception as error:
            traceback.print_exception(error)
            self._send({"failed": encode_error(_as_model_error(error))})
            return
        finally:
            reporting.cancel()
        collect_seldom()
        self._send({"ready": self._engine.info})

    async def _report_progress(self, progress: LoadProgress) -> None:
        while True:
            self._send({"loading": (progress.fraction, progress.note)})
            await asyncio.sleep(_PROGRESS_INTERVAL_S)

    def _answer(self, frame: Frame, result: Awaitable[dict[str, float]]) -> None:
        """Answers a query that is no generation with one frame."""

        async def answer() -> None:
            try:
                self._send({"answer": await result, "number": number})
            except Exception as error:  # the query gets no figures; requests report the error
                self._send({"answer": {}, "number": number})
                print(f"A question failed ({type(error).__name__}: {error}).", file=sys.stderr)

        number = frame["number"]
        self._start_task(number, answer())

    async def _metrics(self) -> dict[str, float]:
        assert self._engine is not None
        return await self._engine.metrics()

    async def _forget(self, conversation: str) -> dict[str, float]:
        assert self._engine is not None
        await self._engine.forget(conversation)
        return {}

    def _start_expansion(self, frame: Frame) -> None:
        number = frame["number"]
        self._start_task(number, self._expand(number, frame["item"]))

    async def _expand(self, number: int, item: MediaItem) -> None:
        assert self._engine is not None
        try:
            expansion = await asyncio.to_thread(self._engine.expand_media, self._with_content(number, item))
            self._send({"expansion": expansion, "number": number})
        except PalaverError as error:
            self._send({"refused": encode_error(error), "number": number})
        except Exception as error:
            failed = EngineError(f"The engine failed on this {item.kind} ({type(error).__name__}: {error}).")
            self._send({"refused": encode_error(failed), "number": number})

    def _with_content(self, number: int, item: MediaItem) -> MediaItem:
        """The item with a function that asks the supervisor for its content. The function is called in threads."""
        loop = asyncio.get_running_loop()

        def load() -> MediaContent:
            return asyncio.run_coroutine_threadsafe(self._fetch(number, item.key), loop).result()

        return replace(item, load=load)

    async def _fetch(self, number: int, key: str) -> MediaContent:
        future: asyncio.Future[MediaContent] = asyncio.get_running_loop().create_future()
        self._contents[number, key] = future
        self._send({"wants": key, "number": number})
        try:
            return await future
        finally:
            self._contents.pop((number, key), None)

    def _take_content(self, frame: Frame) -> None:
        future = self._contents.get((frame["number"], frame["key"]))
        if future is None or future.done():
            return
        if "error" in frame:
            future.set_exception(decode_error_frame(frame["error"]))
        else:
            future.set_result(frame["content"])

    def _start_generation(self, frame: Frame) -> None:
        number = frame["number"]
        self._preparing[number] = False
        self._start_task(number, self._generate(number, frame))

    def _start_task(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[number] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))  # `work` may be cancelled before it begins

    async def _generate(self, number: int, frame: Frame) -> None:
        assert self._engine is not None
        self._send({"request": number, "progress": "PREPARING"})
        try:
            prompt = frame["prompt"]
            spans = tuple(replace(span, item=self._with_content(number, span.item)) for span in prompt.media)
            generation = self._engine.generate(replace(prompt, media=spans), frame["sampling"], frame["choice"])
            await generation.prepare()
            self._send({"request": number, "progress": "RUNNING"})  # before a step with it can end this process
            async with generation as outputs:
                self._generations[number] = outputs
                if self._preparing.pop(number, False):
                    outputs.answer_now()
                async for output in outputs:
                    self._put((number, output))
        except PalaverError as error:
            self._put((number, encode_error(error)))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # fails the request, not the engine
            self._put((number, encode_error(EngineError(f"The engine failed: {error}"))))
        finally:
            self._generations.pop(number, None)
            self._preparing.pop(number, None)

    def _put(self, item: tuple[int, OutputFrame]) -> None:
        """Collects the outputs of one iteration of the event loop into one frame."""
        self._outputs.append(item)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        outputs, self._outputs = self._outputs, []
        self._send({"outputs": outputs})

    def _cancel(self, frame: Frame) -> None:
        number = frame["number"]
        self._preparing.pop(number, None)
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()

    def _stop(self, frame: Frame) -> None:
        number = frame["number"]
        if number in self._generations:
            self._generations[number].stop()
        elif number in self._preparing:
            self._cancel(frame)
            self._put((number, Ended(Finish.STOPPED)))

    def _answer_now(self, frame: Frame) -> None:
        number = frame["number"]
        if number in self._generations:
            self._generations[number].answer_now()
        elif number in self._preparing:
            self._preparing[number] = True

    def _send(self, frame: Frame) -> None:
        self._writer.write(encode_frame(frame))

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()


async def serve(descriptor: int, weights: Weights | None) -> None:
    connection = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=connection)
    await EngineHost(reader, writer, weights).run()
    writer.close()


def main(descriptor: int, weights: Weights | None) -> None:
    """`weights`: of a GGUF file, which is loaded while the supervisor prepares the spec."""
    asyncio.run(serve(descriptor, weights))
    os._exit(0)  # the engine is closed: don't wait for a library's threads
