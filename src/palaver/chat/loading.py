"""From a model's name to a model that can be talked to, its engine in a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from palaver.chat.model import Model
from palaver.chat.models import Load, Told
from palaver.engines.base import Engine
from palaver.engines.host.hosted import HostedEngine, torch_spec
from palaver.errors import BadParameter
from palaver.formats.base import Format
from palaver.formats.loading import load_completion, load_format
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
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
        folder = await asyncio.to_thread(resolve, name)
        told(None, "reading the tokenizer and the template")
        tokenizer, format = await asyncio.to_thread(talk, folder, loading)
        engine = HostedEngine(
            torch_spec(folder, tokenizer.vocabulary, loading.device, loading.dtype, loading.exact), told
        )
        await engine.start()
        return made(name, engine, format, tokenizer)

    return load


def talk(folder: Path, loading: Loading) -> tuple[FastTokenizer, Format]:
    tokenizer = load_tokenizer(folder)
    if loading.raw:
        return tokenizer, load_completion(folder, tokenizer)
    return tokenizer, load_format(folder, tokenizer, loading.template)


def made(name: str, engine: Engine, format: Format, tokenizer: FastTokenizer) -> Model:
    return Model(engine, format, name, tokenizer.fingerprint, tokenizer.vocabulary)
