"""The model in use: none, on its way, or ready; another one may take its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.model import Model
from palaver.engines.base import Engine, EngineState, EngineStatus
from palaver.engines.host.supervisor import HostedEngine, ReportProgress, torch_spec
from palaver.errors import BadParameter, ModelError, ModelLoading, NoModel, NoTemplate, PalaverError
from palaver.formats.base import Format
from palaver.formats.format import TemplateFormat
from palaver.formats.loader import load_completion, load_format, named_tokens, template_text
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
from palaver.models.axolotl import TrainedModel, is_configuration, read_configuration
from palaver.models.catalog import resolve
from palaver.models.templates import TEMPLATES

_log = logging.getLogger(__name__)
Load = Callable[[str, ReportProgress], Awaitable[Model]]
Park = Callable[[], Awaitable[None]]


class ModelSlot:
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


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded."""

    template: Path | None = None
    """A chat template to use instead of the model's."""
    raw: bool = False
    """Complete text as it is, without a chat template."""
    device: str | None = None
    dtype: str | None = None
    exact: bool = False
    compiled: bool | None = None
    """Compiled steps: None where they can be used, True required, False never."""
    cache_bytes: int | None = None
    """The bound on the KV cache. None: a share of the free memory."""
    max_running: int | None = None
    """How many requests are computed at once. None: as many as the engine likes."""

    def __post_init__(self) -> None:
        if self.template is not None and not self.template.is_file():
            raise BadParameter("--template", str(self.template), "there is no such file")


def hosted_loader(loading: LoadOptions) -> Load:
    """Loads models into engine hosts."""

    async def load(name: str, told: ReportProgress) -> Model:
        told(None, "looking for the model")
        trained = await asyncio.to_thread(resolve_source, name)
        folder = await asyncio.to_thread(resolve, trained.model)
        told(None, "reading the tokenizer and the template")
        tokenizer, format = await asyncio.to_thread(load_model_format, folder, loading, trained)
        spec = torch_spec(
            folder,
            tokenizer.vocabulary,
            loading.device,
            loading.dtype,
            loading.exact,
            trained.adapter,
            trained.context,
            loading.compiled,
            loading.cache_bytes,
            loading.max_running,
        )
        engine = HostedEngine(spec, told)
        await engine.start()
        notices = (*trained.notes, *(() if loading.template else missing_template_notices(trained)), engine.info.hint)
        return replace(build_model(name, engine, format, tokenizer), notices=tuple(filter(None, notices)))

    return load


def resolve_source(name: str) -> TrainedModel:
    """What a name stands for: a model, or what a training configuration made."""
    return read_configuration(Path(name).expanduser()) if is_configuration(name) else TrainedModel(name)


def load_model_format(
    folder: Path, loading: LoadOptions, trained: TrainedModel | None = None
) -> tuple[FastTokenizer, Format]:
    """How the model talks: by the template one asks for, by what it was trained with, else by its own."""
    tokenizer = load_tokenizer(folder)
    if loading.raw:
        return tokenizer, load_completion(folder, tokenizer)
    wanted = _trained_with(trained) if trained is not None and loading.template is None else None
    if wanted is not None and wanted != template_text(folder):
        return tokenizer, _talking(wanted, folder, tokenizer)
    try:
        return tokenizer, load_format(folder, tokenizer, loading.template)
    except NoTemplate:
        fallback = TEMPLATES.get(trained.fallback or "") if trained is not None else None
        if fallback is None:
            raise
        return tokenizer, _talking(fallback, folder, tokenizer)


def missing_template_notices(trained: TrainedModel) -> tuple[str, ...]:
    """What a person should know where a template is only named, and not at hand."""
    if trained.name is None or _trained_with(trained) is not None:
        return ()
    return (
        f"The chat template {trained.name!r} is not at hand here: the model's own is used; --template FILE sets one.",
    )


def _trained_with(trained: TrainedModel) -> str | None:
    """The template in the configuration; else the one that was saved with what it trained; else the one it names."""
    if trained.template is not None:
        return trained.template
    saved = template_text(trained.saved) if trained.saved is not None else None
    return saved or TEMPLATES.get(trained.name or "")


def _talking(template: str, folder: Path, tokenizer: FastTokenizer) -> TemplateFormat:
    return TemplateFormat(Template(template, f"chat template for {folder.name}"), tokenizer, named_tokens(folder))


def build_model(name: str, engine: Engine, format: Format, tokenizer: FastTokenizer) -> Model:
    return Model(engine, format, name, tokenizer.fingerprint, tokenizer.vocabulary)
