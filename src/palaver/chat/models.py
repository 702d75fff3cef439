"""The model in use: none, on its way, or ready; another one may take its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.model import Model
from palaver.engines.base import EngineState, EngineStatus
from palaver.engines.host.supervisor import Told
from palaver.errors import ModelError, ModelLoading, NoModel, PalaverError

_log = logging.getLogger(__name__)
Load = Callable[[str, Told], Awaitable[Model]]
Park = Callable[[], Awaitable[None]]


class Models:
    def __init__(self, load: Load, names: Sequence[str] = ()) -> None:
        """`load` makes a model by its name; `names` are those at hand."""
        self._load = load
        self.names = tuple(names)
        self.park: Park | None = None
        """What is done before a model goes: its turns are put aside."""
        self._model: Model | None = None
        self._leaving: Model | None = None
        """The one that another takes the place of, until it is closed."""
        self._name = ""
        self._progress: float | None = None
        self._note = ""
        self._error: PalaverError | None = None
        self._loading: asyncio.Task[None] | None = None

    def current(self) -> Model:
        if self._model is not None:
            return self._model
        if self._error is not None:
            raise self._error
        raise ModelLoading(self._name) if self._loading is not None else NoModel

    def card(self) -> ModelCard:
        if self._model is not None:
            return _with_status(_card(self._model), self._model.engine.status)
        if self._error is not None:
            return ModelCard(self._name, ModelState.FAILED, note=str(self._error))
        state = ModelState.LOADING if self._loading is not None else ModelState.NONE
        return ModelCard(self._name, state, self._progress, self._note)

    async def use(self, model: Model) -> None:
        """A model that is loaded already."""
        await self.unload()
        self._model, self._name = model, model.name

    def load(self, name: str) -> None:
        """Begins to load; the model that was in use is parked and closed first."""
        previous, self._name = self._loading, name
        if self._model is not None:
            self._leaving, self._model = self._model, None
        self._error, self._progress, self._note = None, None, ""
        self._loading = asyncio.create_task(self._replace(name, previous))

    async def ready(self) -> Model:
        while self._loading is not None:
            loading = self._loading
            await asyncio.wait([loading])
            if self._loading is loading:
                self._loading = None
        return self.current()

    async def forget(self, conversation: str) -> None:
        """Frees what the model keeps of it; where there is none, there is nothing."""
        if self._model is not None:
            await self._model.engine.forget(conversation)

    async def unload(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading])
            self._loading = None
        await self._let_go()
        self._name, self._error = "", None

    async def _replace(self, name: str, previous: asyncio.Task[None] | None) -> None:
        try:
            if previous is not None:
                previous.cancel()
                await asyncio.wait([previous])
            await self._let_go()
            self._model = await self._load(name, self._told)
        except PalaverError as error:
            self._error = error
        except Exception as error:
            _log.exception("the model %r could not be loaded", name)
            self._error = ModelError(f"The model {name!r} could not be loaded ({type(error).__name__}: {error}).")
        finally:
            if self._loading is asyncio.current_task():
                self._loading = None

    async def _let_go(self) -> None:
        model = self._model or self._leaving
        if model is None:
            return
        self._model = None
        try:
            if self.park is not None:
                await self.park()
        finally:
            self._leaving = None
            await model.engine.close()

    def _told(self, progress: float | None, note: str) -> None:
        self._progress, self._note = progress, note


def _with_status(card: ModelCard, status: EngineStatus) -> ModelCard:
    """A loaded model is ready only while its engine can make a reply."""
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
        defaults=info.defaults,
        thinks=model.format.thinks,
        switches=model.format.switches,
        takes_tools=model.format.takes_tools,
        notices=model.notices,
    )
