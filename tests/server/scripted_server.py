"""A server over a scripted engine, for outputs that no model produces on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.host.supervisor import ReportProgress
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.server.settings import ServerSettings
from palaver.store import open_store
from tests.chat.scripted_service import CONTROL, TOKENIZER
from tests.client.live import served
from tests.scripted_engine import Script, ScriptedEngine
from tests.tiny import STRINGS

THINK, ANSWER, END = CONTROL["<think>"], CONTROL["</think>"], CONTROL["<|im_end|>"]


def say(*parts: str | int) -> list[int]:
    """The token ids of texts and control tokens."""
    return [id for part in parts for id in ([part] if isinstance(part, int) else TOKENIZER.encode([part]))]


@asynccontextmanager
async def scripted_client(
    folder: Path,
    template: str,
    *scripts: Script,
    context: int = 4096,
    settings: ServerSettings | None = None,
    engine: type[ScriptedEngine] = ScriptedEngine,
    made: list[ScriptedEngine] | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the server. `made` collects the engine, to look at what it was called with."""

    async def load(name: str, report: ReportProgress) -> Model:
        one = engine(list(scripts), TOKENIZER.vocabulary, context_length=context)
        if made is not None:
            made.append(one)
        format = TemplateFormat(Template(template), TOKENIZER, STRINGS)
        return Model(one, format, name, TOKENIZER.fingerprint, TOKENIZER.vocabulary)

    with open_store(folder) as store:
        models = ModelPool(load, ("scripted",))
        models.load("scripted")
        async with Service(store, models) as service, served(service, settings) as url:
            await models.ready()
            async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
                yield http
