"""From a model's name to a model that can be talked to, its engine in a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from palaver.chat.model import Model
from palaver.chat.models import Load, Told
from palaver.engines.base import Engine
from palaver.engines.host.supervisor import HostedEngine, torch_spec
from palaver.errors import BadParameter, NoTemplate
from palaver.formats.base import Format
from palaver.formats.format import TemplateFormat
from palaver.formats.loader import load_completion, load_format, named_tokens, template_text
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
from palaver.models.axolotl import TrainedModel, is_configuration, read_configuration
from palaver.models.catalog import resolve
from palaver.models.templates import TEMPLATES


@dataclass(frozen=True, slots=True)
class Loading:
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


def hosted(loading: Loading) -> Load:
    """Loads models into engine hosts."""

    async def load(name: str, told: Told) -> Model:
        told(None, "looking for the model")
        trained = await asyncio.to_thread(found, name)
        folder = await asyncio.to_thread(resolve, trained.model)
        told(None, "reading the tokenizer and the template")
        tokenizer, format = await asyncio.to_thread(talk, folder, loading, trained)
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
        notices = (*trained.notes, *(() if loading.template else untold(trained)), engine.info.hint)
        return replace(made(name, engine, format, tokenizer), notices=tuple(filter(None, notices)))

    return load


def found(name: str) -> TrainedModel:
    """What a name stands for: a model, or what a training configuration made."""
    return read_configuration(Path(name).expanduser()) if is_configuration(name) else TrainedModel(name)


def talk(folder: Path, loading: Loading, trained: TrainedModel | None = None) -> tuple[FastTokenizer, Format]:
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


def untold(trained: TrainedModel) -> tuple[str, ...]:
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


def made(name: str, engine: Engine, format: Format, tokenizer: FastTokenizer) -> Model:
    return Model(engine, format, name, tokenizer.fingerprint, tokenizer.vocabulary)
