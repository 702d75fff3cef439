"""A service with a scripted engine, and helpers to read its turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.chat.turn_log import LogEntry
from palaver.engines.host.supervisor import ReportProgress
from palaver.errors import UnknownModel
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.store import Store, open_store
from tests.scripted_engine import HoldScript, Script, ScriptedEngine
from tests.tiny import CHATML, MERGES, STRINGS, byte_level

TOKENIZER = FastTokenizer(byte_level(merges=MERGES))
CONTROL = TOKENIZER.control


def reply(thought: str, answer: str) -> list[int]:
    opened = [CONTROL["<think>"], *TOKENIZER.encode([f"\n{thought}\n"]), CONTROL["</think>"]]
    return [*opened, *TOKENIZER.encode([f"\n\n{answer}"]), CONTROL["<|im_end|>"]]


WAVE = reply("think 👋", "Wave: 👋🏽 <think")
OTHER = reply("no", "Another answer.")


def model(scripts: Sequence[Script] = (WAVE,), name: str = "scripted", context: int = 4096) -> Model:
    engine = ScriptedEngine(scripts, TOKENIZER.vocabulary, context_length=context)
    format = TemplateFormat(Template(CHATML), TOKENIZER, STRINGS)
    return Model(engine, format, name, TOKENIZER.fingerprint, TOKENIZER.vocabulary)


@dataclass
class Stage:
    """A chat under test, its service, and the event that releases held replies."""

    chat: Chat
    service: Service
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """Replies of a held stage stop after four tokens until it is set."""


@asynccontextmanager
async def open_stage(
    folder: Path,
    scripts: Sequence[Script] = (WAVE, OTHER),
    *,
    held: bool = False,
    resume: bool = False,
    context: int = 4096,
) -> AsyncIterator[Stage]:
    store = await asyncio.to_thread(open_store, folder)
    try:
        async with run_service(store, scripts, held=held, resume=resume, context=context) as stage:
            yield stage
    finally:
        await asyncio.to_thread(store.close)


@asynccontextmanager
async def run_service(
    store: Store,
    scripts: Sequence[Script] = (WAVE, OTHER),
    *,
    held: bool = False,
    resume: bool = False,
    context: int = 4096,
) -> AsyncIterator[Stage]:
    hold = asyncio.Event()
    if held:
        scripts = [[*script[:4], HoldScript(hold), *script[4:]] for script in scripts]

    async def load(name: str, report: ReportProgress) -> Model:
        report(0.5, "halfway")
        if name == "test/missing":
            raise UnknownModel(name, "there is none.")
        return model(scripts, name, context)

    models = ModelPool(load, ("scripted",))
    models.load("scripted")
    async with Service(store, models, resume=resume) as service:
        owner = await asyncio.to_thread(store.users.ensure)
        yield Stage(service.chat(owner.id), service, hold)


async def read_entries(chat: Chat, reply_id: str, after: int = 0) -> list[LogEntry]:
    async with chat.events(reply_id, after) as stream:
        return [entry async for entry in stream]


async def read_until(chat: Chat, reply_id: str, count: int, after: int = 0) -> list[LogEntry]:
    """The entries up to that count of numbered events."""
    seen: list[LogEntry] = []
    async with chat.events(reply_id, after) as stream:
        async for entry in stream:
            seen.append(entry)
            if entry.number >= after + count:
                return seen
    return seen
