"""Loads models into engine processes: from a name to a `Model`, the memory that it will take, and its card."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from palaver.chat.engine_choice import (
    ELSEWHERE,
    RAY_ADDRESS,
    LoadOptions,
    check_engine_options,
    engine_python,
    make_spec,
)
from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.model import Model, build_model, check_draft_model, load_model_format
from palaver.engines.base import Engine, EngineState, EngineStatus
from palaver.engines.core.options import RUNTIME_FACTOR
from palaver.engines.host.process import ChildProcess
from palaver.engines.host.supervisor import HostedEngine, ReportProgress
from palaver.models.catalog import Catalog, CatalogEntry
from palaver.models.disk import read_facts, weights_bytes
from palaver.models.resolver import ResolvedModel, resolve_model

Load = Callable[[str, ReportProgress], Awaitable[Model]]
Measure = Callable[[str, ReportProgress], Awaitable[int]]
Describe = Callable[[str], Coroutine[None, None, ModelCard]]
T = TypeVar("T")
PROCESS_BYTES = 400 << 20
"""The memory of an engine process beside its weights and its cache, before it is measured."""
_THREADS = 2


class ModelLoader:
    """Loads the models of a catalog into engine processes.

    It has threads of its own: those of the event loop may all wait for a model.
    """

    def __init__(self, options: LoadOptions, catalog: Catalog | None = None) -> None:
        """Only what the catalog's owner asked to load is downloaded; without a catalog, every model."""
        self._options = options
        self._catalog = catalog
        self._threads = ThreadPoolExecutor(_THREADS, "palaver-load")

    async def load(self, name: str, report: ReportProgress) -> Model:
        entry, options = self._lookup(name)
        resolved = await self._resolve(entry, report)
        check_engine_options(resolved, options)
        with ChildProcess(python=engine_python(options)) as child:  # it imports its libraries meanwhile
            report(None, "reading the tokenizer and the template")
            tokenizer, format = await self._run(lambda: load_model_format(resolved, options))
            if (draft_model := options.draft_model) is not None:
                await self._run(lambda: check_draft_model(draft_model, tokenizer))
            engine = HostedEngine(make_spec(resolved, tokenizer.vocabulary, options), report, child)
            await engine.start()
        notices = (*resolved.notes, engine.info.hint)
        return replace(build_model(name, engine, format, tokenizer), notices=tuple(filter(None, notices)))

    async def measure(self, name: str, report: ReportProgress) -> int:
        """The memory that the model will take, by the sizes of its files. Downloads the model if it is not on disk, and
        raises what shows without its engine."""
        entry, options = self._lookup(name)
        resolved = await self._resolve(entry, report)
        if check_engine_options(resolved, options) in ELSEWHERE:
            return PROCESS_BYTES
        size = await self._run(lambda: weights_bytes(resolved))
        if (draft_model := options.draft_model) is not None:
            size += await self._run(lambda: weights_bytes(resolve_model(str(draft_model), download=False)))
        return int(size * RUNTIME_FACTOR) + PROCESS_BYTES + (options.cache_bytes or 0)

    async def describe(self, name: str) -> ModelCard:
        """What the files of a model on disk say: its context, and what it takes."""

        def read() -> ModelCard:
            entry, options = self._lookup(name)
            resolved = resolve_model(entry.source, download=False)
            facts = read_facts(replace(resolved, mmproj=options.mmproj or resolved.mmproj))
            _, format = load_model_format(resolved, options)
            return ModelCard(
                name,
                ModelState.AVAILABLE,
                context_length=facts.context_length,
                media=facts.media,
                thinks=format.thinks,
                switches=format.switches,
                takes_tools=format.takes_tools,
            )

        return await self._run(read)

    def _lookup(self, name: str) -> tuple[CatalogEntry, LoadOptions]:
        entry = CatalogEntry(name, name) if self._catalog is None else self._catalog.entry(name)
        options = replace(self._options, **entry.options)
        if (match := RAY_ADDRESS.fullmatch(options.engine)) and match[1] is None:
            from palaver.engines.cluster.engine import application_name

            options = replace(options, engine=f"{options.engine}/{application_name(name)}")
        return entry, options

    async def _resolve(self, entry: CatalogEntry, report: ReportProgress) -> ResolvedModel:
        """Finds or downloads a model."""
        loop = asyncio.get_running_loop()
        download = self._catalog is None or entry.name in self._catalog.downloads

        def report_download(progress: float | None) -> None:
            loop.call_soon_threadsafe(report, progress, "downloading")

        report(None, "looking for the model")
        return await self._run(lambda: resolve_model(entry.source, report_download, download))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def resident_bytes(engine: Engine, cache_bytes: int) -> int:
    """The memory of a loaded engine's process, with its cache at its largest. 0 if it can't be measured: the engine is
    in this process, or its weights are in the memory of a device."""
    if not isinstance(engine, HostedEngine) or engine.process_id is None or engine.info.device != "cpu":
        return 0
    try:
        import psutil

        process = psutil.Process(engine.process_id)
        processes = (process, *process.children(recursive=True))
        return sum(one.memory_info().rss for one in processes) + cache_bytes
    except (ImportError, psutil.Error):
        return 0


def model_card(model: Model, status: EngineStatus) -> ModelCard:
    """The card of a loaded model: it is ready only while its engine is."""
    info = model.engine.info
    card = ModelCard(
        model.name,
        ModelState.READY,
        1.0,
        context_length=info.context_length,
        device=info.device,
        dtype=info.dtype,
        reuse=info.reuse,
        exactness=info.exactness,
        steps=info.steps,
        fingerprint=info.fingerprint,
        media=info.media,
        lacks={capability.value: why for capability, why in info.lacks.items()},
        block_length=info.block_length,
        defaults=info.defaults,
        thinks=model.format.thinks,
        switches=model.format.switches,
        takes_tools=model.format.takes_tools,
        notices=model.notices,
    )
    match status.state:
        case EngineState.READY:
            return card
        case EngineState.STARTING:
            return replace(card, state=ModelState.LOADING, progress=None, note=status.reason)
        case EngineState.FAILED:
            return replace(card, state=ModelState.FAILED, progress=None, note=status.reason)
