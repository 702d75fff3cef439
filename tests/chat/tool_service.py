"""A service whose model calls the tools that the user's message names, and the tool servers for it.

A message is a JSON list of rounds, each a list of [tool, arguments]: the model calls them round by round, then answers.
The script depends on the prompt alone, so that it is the same in every process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from palaver.chat.interface import CallDecision, Chat, Remember
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.chat.tool_loop import LoopLimits, ToolLoop
from palaver.engines.host.supervisor import ReportProgress
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.generation import Prompt
from palaver.messages import Message, user
from palaver.store import StoredMessage, open_store
from palaver.store.tool_rounds import UNDECIDED, RoundState, ToolRound
from palaver.tools.config import ServerConfig
from palaver.tools.toolbox import OperatorServers, Toolbox
from tests.formats.families import FAMILIES, STRINGS, TURNS, Family
from tests.scripted_engine import Script, ScriptedEngine
from tests.tiny import byte_level
from tests.tools import misbehaving_server

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TOKENIZER = FastTokenizer(byte_level(special=TURNS, added=MARKERS))
ANSWER = "All done."
BOTH = {"tool_servers": ["bad"]}


class CallingEngine(ScriptedEngine):
    def choose_script(self, prompt: Prompt, own_ids: list[int]) -> Script:
        text = b"".join(TOKENIZER.vocabulary[id] for id in prompt.context_ids).decode()
        question, *replies = text.rpartition("<|user|>")[2].split("<|bot|>")
        rounds = json.loads(question.partition("<|done|>")[0])
        done = len(replies) - 1
        return [*_spoken(rounds[done] if done < len(rounds) else []), TOKENIZER.control["<|done|>"]]


class RecitingEngine(ScriptedEngine):
    """Its replies in the order of a loop: one after the user's message, one after each round of calls."""

    replies: tuple[list[int], ...] = ()
    result_marker: int = 0

    def choose_script(self, prompt: Prompt, own_ids: list[int]) -> Script:
        return self.replies[list(prompt.context_ids).count(self.result_marker)]


def reciting_model(family: Family, result_marker: str, *replies: str) -> Model:
    """A model of this format that replies as told, each reply after one more result."""
    tokenizer = FastTokenizer(byte_level(special=(*family.turns, *family.markers), added=()))
    format = TemplateFormat(Template(family.source), tokenizer, family.strings)
    engine = RecitingEngine([[0]], tokenizer.vocabulary, context_length=16_384)
    engine.replies = tuple(tokenizer.encode(format._runs(text)) for text in replies)
    engine.result_marker = tokenizer.control[result_marker]
    return Model(engine, format, "calling", tokenizer.fingerprint, tokenizer.vocabulary)


def _spoken(calls: list[tuple[str, dict[str, Any]]]) -> list[int]:
    tokens: list[int] = [] if calls else [*TOKENIZER.encode([ANSWER])]
    for name, arguments in calls:
        text = json.dumps({"name": name, "arguments": arguments})
        tokens += [
            TOKENIZER.control["<tool_call>"],
            *TOKENIZER.encode([f"\n{text}\n"]),
            TOKENIZER.control["</tool_call>"],
        ]
    return tokens


def question(*rounds: list[Any]) -> Message:
    return user(json.dumps([[[one, {}] if isinstance(one, str) else one for one in calls] for calls in rounds]))


def misbehaving(record: Path) -> ServerConfig:
    return ServerConfig("bad", sys.executable, (misbehaving_server.__file__, "", str(record)))


def make_model(name: str = "calling") -> Model:
    family = FAMILIES["JSON in tags"]
    engine = CallingEngine([[0]], TOKENIZER.vocabulary, context_length=16_384)
    format = TemplateFormat(Template(family.source), TOKENIZER, STRINGS)
    return Model(engine, format, name, TOKENIZER.fingerprint, TOKENIZER.vocabulary)


@asynccontextmanager
async def open_tools(
    folder: Path,
    *servers: ServerConfig,
    resume: bool = False,
    limits: LoopLimits | None = None,
    model: Model | None = None,
) -> AsyncIterator[Service]:
    async def load(name: str, report: ReportProgress) -> Model:
        return model or make_model(name)

    store = await asyncio.to_thread(open_store, folder)
    models = ModelPool(load, ("calling",))
    models.load("calling")
    toolbox = Toolbox(OperatorServers(servers or (misbehaving(folder / "record"),)), folder / "tools")
    service = Service(store, models, resume=resume, toolbox=toolbox)
    if limits is not None:
        service.loop = ToolLoop(service, toolbox, limits)
        service.turns.on_calls = service.loop.reply_ended
    try:
        async with service:
            await service.recovered.wait()
            yield service
    finally:
        await asyncio.to_thread(store.close)


async def send(chat: Chat, *rounds: list[Any], **parameters: Any) -> StoredMessage:
    """The reply to a question that makes the model call tools."""
    conversation = await chat.create_conversation(parameters={**BOTH, **parameters})
    return (await chat.send_message(conversation.id, None, question(*rounds))).reply


async def finished(chat: Chat, reply_id: str) -> StoredMessage:
    async with chat.events(reply_id) as stream:
        async for _ in stream:
            pass
    return await chat.message(reply_id)


async def wait_for_round(chat: Chat, reply_id: str, *states: RoundState) -> ToolRound:
    """The round of a reply once it waits for a decision, or is in one of these states."""
    await finished(chat, reply_id)
    async with asyncio.timeout(100):
        while True:
            round = await chat.tool_round(reply_id)
            if round is not None and (round.state in states or (not states and _waits(round))):
                return round
            await asyncio.sleep(0.01)


def _waits(round: ToolRound) -> bool:
    decided = [call for call in round.calls if call.state not in UNDECIDED]
    return round.state is RoundState.OPEN and len(decided) < len(round.calls) and all(one.result for one in decided)


def approve(round: ToolRound, allowed: bool = True, remember: Remember = Remember.ONCE) -> list[CallDecision]:
    return [CallDecision(one.position, allowed, None, remember) for one in round.calls if one.state in UNDECIDED]


async def next_reply(chat: Chat, round: ToolRound) -> StoredMessage:
    ended = await wait_for_round(chat, round.reply_id, RoundState.DONE, RoundState.FAILED)
    assert ended.next_id is not None, ended.error
    return await finished(chat, ended.next_id)
