"""From a model's name to a model that can be talked to, its engine in a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from palaver.chat.model import Model
from palaver.chat.models import Load, Told
from palaver.engines.base import Engine
from palaver.engines.host.hosted import HostedEngine, torch_spec
from palaver.errors import BadParameter
from palaver.formats.base import Format
from palaver.formats.loading import load_completion, load_format, named_strings
from palaver.formats.template import Template
from palaver.formats.templated import TemplateFormat
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
from palaver.models.axolotl import Trained, is_configuration, read
from palaver.models.catalog import resolve


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
        tokenizer, format = await asyncio.to_thread(talk, folder, loading, trained.template)
        spec = torch_spec(
            folder,
            tokenizer.vocabulary,
            loading.device,
            loading.dtype,
            loading.exact,
            trained.adapter,
            trained.context,
        )
        engine = HostedEngine(spec, told)
        await engine.start()
        return replace(made(name, engine, format, tokenizer), notices=trained.notes)

    return load


def found(name: str) -> Trained:
    """What a name stands for: a model, or what a training configuration made."""
    return read(Path(name).expanduser()) if is_configuration(name) else Trained(name)


def talk(folder: Path, loading: Loading, template: str | None = None) -> tuple[FastTokenizer, Format]:
    """How the model talks. `template` is the text of a chat template that is not the model's own."""
    tokenizer = load_tokenizer(folder)
    if loading.raw:
        return tokenizer, load_completion(folder, tokenizer)
    if template is not None and loading.template is None:
        source = Template(template, f"chat template for {folder.name}")
        return tokenizer, TemplateFormat(source, tokenizer, named_strings(folder))
    return tokenizer, load_format(folder, tokenizer, loading.template)


def made(name: str, engine: Engine, format: Format, tokenizer: FastTokenizer) -> Model:
    return Model(engine, format, name, tokenizer.fingerprint, tokenizer.vocabulary)
