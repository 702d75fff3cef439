"""The model slot of a service: loads, swaps and unloads models, each in an engine process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from palaver.chat.engine_spec import LoadOptions, check_engine_options, make_spec
from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.model import Model, build_model, load_model_format
from palaver.engines.base import EngineState, EngineStatus
from palaver.engines.host.process import ChildProcess
from palaver.engines.host.supervisor import HostedEngine, ReportProgress
from palaver.errors import ModelError, ModelLoading, NoModel, PalaverError
from palaver.models.resolver import ResolvedModel, resolve_model

_log = logging.getLogger(__name__)
Load = Callable[[str, ReportProgress], Awaitable[Model]]
Check = Callable[[str, ReportProgress], Awaitable[None]]
Park = Callable[[], Awaitable[None]]


class ModelSlot:
    """The model in use. Another one replaces it: the current model stays until the other is checked, and is loaded
    again if the other fails to start. Both are never in memory at once."""

    def __init__(self, load: Load, names: Sequence[str] = (), check: Check | None = None) -> None:
        """`load` loads a model by name; `names` are the available models. `check` raises if a model can't be loaded,
        as far as that shows without its engine."""
        self._load = load
        self._check = check
        self.names = tuple(names)
        self.park: Park | None = None
        """Called before a model is unloaded, to park its turns."""
        self._model: Model | None = None
        self._in_use = ""
        """The name of the model in use, or of the one to load again if a load fails."""
        self._name = ""
        """The name that was requested last."""
        self._progress: float | None = None
        self._note = ""
        self._error: PalaverError | None = None
        """The error of the last load."""
        self._loading: asyncio.Task[None] | None = None

    def current(self) -> Model:
        if self._model is not None:
            return self._model
        if self._loading is not None:
            raise ModelLoading(self._name)
        raise self._error or NoModel()

    def card(self) -> ModelCard:
        """The model in use; without one, the model that is being loaded or failed to load."""
        if self._model is None:
            return self.loading_card()
        note = "" if self._error is None else str(self._error)
        return _with_status(replace(_card(self._model), note=note), self._model.engine.status)

    def loading_card(self) -> ModelCard:
        """The model that is being loaded; without one, the model in use."""
        if self._loading is not None:
            return ModelCard(self._name, ModelState.LOADING, self._progress, self._note)
        if self._model is not None:
            return self.card()
        if self._error is not None:
            return ModelCard(self._name, ModelState.FAILED, note=str(self._error))
        return ModelCard(self._name, ModelState.NONE)

    async def use(self, model: Model) -> None:
        """Puts a model into use that is loaded already."""
        await self.unload()
        self._model, self._name, self._in_use = model, model.name, model.name

    def load(self, name: str) -> None:
        """Starts loading. The turns of the current model are parked when it is replaced."""
        previous, self._name = self._loading, name
        self._error, self._progress, self._note = None, None, ""
        self._loading = asyncio.create_task(self._replace(name, previous))

    async def ready(self) -> Model:
        """The model in use. Waits for one only if there is none."""
        while self._model is None and self._loading is not None:
            await self._settle(self._loading)
        return self.current()

    async def settled(self) -> Model:
        """The model in use when no model is being loaded any more, whether or not the last load succeeded."""
        while self._loading is not None:
            await self._settle(self._loading)
        return self.current()

    async def loaded(self) -> Model:
        """The model that was loaded last. Raises the error of its load, even if another model is in use."""
        model = await self.settled()
        if self._error is not None:
            raise self._error
        return model

    async def forget(self, conversation: str) -> None:
        """Frees the conversation's cache; does nothing if no model is loaded."""
        if self._model is not None:
            await self._model.engine.forget(conversation)

    async def unload(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading])
            self._loading = None
        await self._close_model()
        self._name, self._in_use, self._error = "", "", None

    async def _settle(self, loading: asyncio.Task[None]) -> None:
        await asyncio.wait([loading])
        if self._loading is loading:
            self._loading = None

    async def _replace(self, name: str, previous: asyncio.Task[None] | None) -> None:
        try:
            if previous is not None:
                previous.cancel()
                await asyncio.wait([previous])
            self._error = await self._try_to_load(name, replaces=self._model is not None)
            if self._error is not None:
                await self._fall_back(self._error)
        finally:
            if self._loading is asyncio.current_task():
                self._loading = None

    async def _try_to_load(self, name: str, replaces: bool = False) -> PalaverError | None:
        """Puts the model into use. Returns the error if that fails."""
        try:
            if replaces and self._check is not None:
                await self._check(name, self._report)
            await self._close_model()
            self._model = await self._load(name, self._report)
            self._in_use = name
        except PalaverError as error:
            return error
        except Exception as error:
            _log.exception("the model %r could not be loaded", name)
            return ModelError(f"Can't load the model {name!r} ({type(error).__name__}: {error}).")
        return None

    async def _fall_back(self, error: PalaverError) -> None:
        """After a load that failed: the previous model stays in use, and the error says so."""
        if not self._in_use:
            return
        if self._model is None and await self._try_to_load(self._in_use) is not None:
            self._in_use = ""
            return
        error.args = (f"{error} {self._in_use} is still in use.",)

    async def _close_model(self) -> None:
        model, self._model = self._model, None
        if model is None:
            return
        try:
            if self.park is not None:
                await self.park()
        except Exception:  # its turns end with the engine
            _log.exception("the turns of %r could not be parked", model.name)
        finally:
            await model.engine.close()

    def _report(self, progress: float | None, note: str) -> None:
        self._progress, self._note = progress, note


def _with_status(card: ModelCard, status: EngineStatus) -> ModelCard:
    """The card with the engine's state: a loaded model is ready only while its engine is."""
    match status.state:
        case EngineState.READY:
            return card
        case EngineState.STARTING:
            return replace(card, state=ModelState.LOADING, progress=None, note=status.reason)
        case EngineState.FAILED:
            return replace(card, state=ModelState.FAILED, progress=None, note=status.reason)


def _card(model: Model) -> ModelCard:
    info = model.engine.info
    return ModelCard(
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
        defaults=info.defaults,
        thinks=model.format.thinks,
        switches=model.format.switches,
        takes_tools=model.format.takes_tools,
        notices=model.notices,
    )


def hosted_loader(loading: LoadOptions) -> Load:
    """Loads models into engine hosts."""

    async def load(name: str, report: ReportProgress) -> Model:
        resolved = await _resolve(name, report)
        check_engine_options(resolved, loading)
        with ChildProcess() as child:  # it imports its libraries meanwhile
            report(None, "reading the tokenizer and the template")
            tokenizer, format = await asyncio.to_thread(load_model_format, resolved, loading)
            engine = HostedEngine(make_spec(resolved, tokenizer.vocabulary, loading), report, child)
            await engine.start()
        notices = (*resolved.notes, engine.info.hint)
        return replace(build_model(name, engine, format, tokenizer), notices=tuple(filter(None, notices)))

    return load


async def _resolve(name: str, report: ReportProgress) -> ResolvedModel:
    """Finds or downloads a model."""
    loop = asyncio.get_running_loop()

    def report_download(progress: float | None) -> None:
        loop.call_soon_threadsafe(report, progress, "downloading")

    report(None, "looking for the model")
    return await asyncio.to_thread(resolve_model, name, report_download)


def model_checker(loading: LoadOptions) -> Check:
    """Finds (or downloads) a model and reads its tokenizer and template, without starting an engine."""

    async def check(name: str, report: ReportProgress) -> None:
        resolved = await _resolve(name, report)
        await asyncio.to_thread(load_model_format, resolved, loading)

    return check
