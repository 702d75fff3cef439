"""The hosted side: makes the engine, runs generations, and sends what each step produced in one frame."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from palaver.engines.base import Engine, EngineGeneration
from palaver.engines.host.frames import LoadProgress, encode_frame, pack, pack_error, read_frame, unpack
from palaver.engines.processes import die_with_parent
from palaver.errors import BrokenModel, EngineError, PalaverError

OPTIONS = ("exact", "context", "compiled", "cache_bytes", "max_running")
"""The engine's options that a specification sets."""
_TELL_S = 0.2
"""How often the parent is told how far loading is."""


def make_engine(spec: dict[str, Any], progress: LoadProgress) -> Engine:
    """The engine a specification asks for."""
    progress.note = "importing the libraries"
    from palaver.engines.torch import EngineOptions, load

    progress.begin(Path(spec["model"]))
    vocabulary = unpack(spec["vocabulary"])
    adapter = Path(spec["adapter"]) if spec["adapter"] else None
    engine = load(
        Path(spec["model"]),
        vocabulary=vocabulary,
        device=spec["device"],
        dtype=spec["dtype"],
        options=EngineOptions(**{name: spec[name] for name in OPTIONS}),
        adapter=adapter,
        on_failure=die,
    )
    threading.Thread(target=engine.warm_grammars, name="palaver-warm", daemon=True).start()
    return engine


def die(error: BaseException) -> None:
    """Ends the process at once, from any thread: the parent starts another one, in which requests go on."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(os.EX_SOFTWARE)


def _as_model_error(error: Exception) -> PalaverError:
    if isinstance(error, PalaverError):
        return error
    return BrokenModel(f"The model couldn't be loaded ({type(error).__name__}: {error}).")


class EngineHost:
    """One connection to the parent. Everything ends with it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._engine: Engine | None = None
        self._running: dict[int, EngineGeneration] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outputs: list[Any] = []
        self._flushing = False
        self._commands: dict[str, Callable[[dict[str, Any]], None]] = {
            "generate": self._generate,
            "cancel": self._cancel,
            "stop": lambda frame: self._ask(frame, "stop"),
            "figures": lambda frame: self._answer(frame, self._counted()),
            "forget": lambda frame: self._answer(frame, self._forgotten(frame["conversation"])),
            "answer_now": lambda frame: self._ask(frame, "answer_now"),
        }

    async def run(self) -> None:
        while (frame := await read_frame(self._reader)) is not None:
            if frame["do"] == "load":
                await self._load(frame)
            elif frame["do"] == "close":
                break
            else:
                self._commands[frame["do"]](frame)
        await self._end()

    async def _load(self, frame: dict[str, Any]) -> None:
        progress = LoadProgress()
        telling = asyncio.create_task(self._tell(progress))
        try:
            self._engine = await asyncio.to_thread(make_engine, frame["spec"], progress)
        except Exception as error:
            traceback.print_exception(error)
            self._send({"failed": pack_error(_as_model_error(error))})
            return
        finally:
            telling.cancel()
        self._send({"ready": pack(self._engine.info)})

    async def _tell(self, progress: LoadProgress) -> None:
        while True:
            self._send({"loading": [progress.share, progress.note]})
            await asyncio.sleep(_TELL_S)

    def _answer(self, frame: dict[str, Any], found: Awaitable[dict[str, float]]) -> None:
        """A question that is no generation: one answer, under its number."""

        async def answer() -> None:
            try:
                self._send({"answer": await found, "number": number})
            except Exception as error:  # who asked gets no figures, and requests say what is wrong
                self._send({"answer": {}, "number": number})
                print(f"A question failed ({type(error).__name__}: {error}).", file=sys.stderr)
            finally:
                self._tasks.pop(number, None)

        number = frame["number"]
        self._tasks[number] = asyncio.create_task(answer())

    async def _counted(self) -> dict[str, float]:
        assert self._engine is not None
        return await self._engine.counted()

    async def _forgotten(self, conversation: str) -> dict[str, float]:
        assert self._engine is not None
        await self._engine.forget(conversation)
        return {}

    def _generate(self, frame: dict[str, Any]) -> None:
        number = frame["number"]
        self._tasks[number] = asyncio.create_task(self._run(number, frame))

    async def _run(self, number: int, frame: dict[str, Any]) -> None:
        assert self._engine is not None
        self._send({"request": number, "progress": "PREPARING"})
        try:
            prompt, sampling = unpack(frame["prompt"]), unpack(frame["sampling"])
            async with self._engine.generate(prompt, sampling, frame["choice"]) as outputs:
                self._send({"request": number, "progress": "BEGUN"})
                self._running[number] = outputs
                async for output in outputs:
                    self._put([number, pack(output)])
        except PalaverError as error:
            self._put([number, pack_error(error)])
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it was, the request ends with an error and the engine lives
            self._put([number, pack_error(EngineError(f"The engine failed: {error}"))])
        finally:
            self._running.pop(number, None)
            self._tasks.pop(number, None)

    def _put(self, item: Any) -> None:
        """What becomes known in one turn of the loop goes into one frame."""
        self._outputs.append(item)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        outputs, self._outputs = self._outputs, []
        self._send({"outputs": outputs})

    def _cancel(self, frame: dict[str, Any]) -> None:
        task = self._tasks.get(frame["number"])
        if task is not None:
            task.cancel()

    def _ask(self, frame: dict[str, Any], what: str) -> None:
        running = self._running.get(frame["number"])
        if running is not None:
            getattr(running, what)()

    def _send(self, frame: dict[str, Any]) -> None:
        self._writer.write(encode_frame(frame))

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()


async def serve(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=connection)
    await EngineHost(reader, writer).run()
    writer.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the front-end
    die_with_parent()
    faulthandler.enable(all_threads=False)
    asyncio.run(serve(int(sys.argv[1])))
    os._exit(0)  # the engine is closed; nothing of torch's own threads is worth waiting for


if __name__ == "__main__":
    main()
