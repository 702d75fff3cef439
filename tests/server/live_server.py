"""A listening server in a thread of its own, with the embedded model in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn

from palaver.chat.engine_choice import DIFFUSION, LoadOptions, file_kind, make_spec
from palaver.chat.model import Model, build_model, load_model_format
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.base import Engine
from palaver.engines.diffusion.engine import load as load_diffusion
from palaver.engines.host.supervisor import HostedEngine, ReportProgress
from palaver.engines.torch import EngineOptions, load
from palaver.models.catalog import Catalog
from palaver.models.resolver import resolve_model
from palaver.server.app import Server, socket_options
from palaver.server.limits import limited_protocol
from palaver.server.settings import ServerSettings
from palaver.store import open_store
from palaver.tools.toolbox import Toolbox

TOKEN = "the-token-of-the-data-folder"
ADMIN = {"authorization": f"Bearer {TOKEN}"}


async def sprout(name: str, report: ReportProgress) -> Model:
    """Loads the model as the server does, but without a process for the engine, except for GGUF files."""
    model = resolve_model(name)
    tokenizer, format = load_model_format(model, LoadOptions())
    if model.gguf is not None:
        hosted = HostedEngine(make_spec(model, tokenizer.vocabulary, LoadOptions()), report)
        await hosted.start()
        return build_model(name, hosted, format, tokenizer)
    loader: Callable[..., Engine] = load_diffusion if file_kind(model) == DIFFUSION else load
    engine = await asyncio.to_thread(
        loader, model.folder, vocabulary=tokenizer.vocabulary, options=EngineOptions(threads=1)
    )
    return build_model(name, engine, format, tokenizer)


class LiveServer:
    """A context manager: the server runs inside."""

    def __init__(
        self,
        folder: Path,
        settings: ServerSettings | None = None,
        model: str | None = "sprout",
        resume: bool = False,
        transcriber: str = "",
        toolbox: Toolbox | None = None,
        catalog: Catalog | None = None,
        load_model: Callable[[str, ReportProgress], Awaitable[Model]] = sprout,
    ) -> None:
        """`catalog`: the models that are offered; sprout alone without one."""
        self._folder = folder
        self._load_model = load_model
        self._catalog = catalog or Catalog(("sprout",))
        self._resume = resume
        self._transcriber = transcriber
        self._toolbox = toolbox
        self._settings = replace(settings or ServerSettings(), secret=TOKEN)
        self._model = model
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop
        self.server: Server
        self.service: Service
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._started.wait(60), "the server did not start"
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not end"

    def run_in_loop(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Runs a coroutine function in the event loop of the server."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(60)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            self._started.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        with open_store(self._folder) as store:
            models = ModelPool(self._load_model, self._catalog)
            service = Service(store, models, resume=self._resume, transcriber=self._transcriber, toolbox=self._toolbox)
            async with service as self.service:
                if self._model is not None:
                    models.load(self._model)
                    await models.ready()
                self.server = Server(self.service, self._settings)
                config = uvicorn.Config(
                    self.server.asgi,
                    log_config=None,
                    lifespan="off",
                    http=limited_protocol(self._settings.limits),
                    **socket_options(self._settings),
                )
                self._uvicorn = uvicorn.Server(config)
                serving = asyncio.create_task(self._uvicorn.serve(sockets=[listening]))
                while not self._uvicorn.started and not serving.done():
                    await asyncio.sleep(0.005)
                self._started.set()
                await serving
