"""A talker that is killed, and the count of what somebody had been told and is not so afterwards.

The talker holds several conversations at once and writes down, line by line, what it was told: messages that were
acknowledged, events that a reader saw. Used by the tests and, for longer, by benchmarks/kills.py.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaver.chat.interface import Chat
from palaver.chat.model_loader import LoadOptions, ModelSlot, hosted_loader
from palaver.chat.replay import replay
from palaver.chat.service import Service
from palaver.chat.turn_log import LogEntry
from palaver.events import Failed, Finished, Snapshot, Started, Waiting
from palaver.messages import user
from palaver.store import NotFound, ReplyStatus, Store, open_store
from palaver.store.store import DATABASE
from tests.chat.making import reply, serving

STREAMS = 6
QUESTIONS = ["Count from 1 to 60.", "What is 417 + 385?", "Tell me about yourself.", "Write the alphabet."]
SCRIPTS = [reply(f"{number} " * 40 + "think 👋", f"{number} says " + "a word 👋🏽 " * 30) for number in range(8)]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.chat.killing"])


@asynccontextmanager
async def served(store: Store, kind: str, resume: bool = False) -> AsyncIterator[Service]:
    if kind == "scripted":
        async with serving(store, SCRIPTS, resume=resume) as stage:
            yield stage.service
        return
    models = ModelSlot(hosted_loader(LoadOptions()))
    models.load("sprout")
    async with Service(store, models, resume=resume) as service:
        await models.ready()
        yield service


def talk_for_ever(folder: Path, told: Path, kind: str) -> None:
    file = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    asyncio.run(_talk(folder, lambda *row: os.write(file, (json.dumps(row) + "\n").encode()), kind))


async def _talk(folder: Path, tell: Callable[..., Any], kind: str) -> None:
    store = open_store(folder)
    owner = store.users.ensure()
    async with served(store, kind) as service, asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(_converse(service.chat(owner.id), tell, number))


async def _converse(chat: Chat, tell: Callable[..., Any], number: int) -> None:
    while True:
        talk = await chat.create(title=f"Talk {number}")
        tell("conversation", talk.id)
        parent = None
        for turn in range(3):
            text = QUESTIONS[(number + turn) % len(QUESTIONS)]
            said = await chat.say(talk.id, parent, user(text))
            tell("message", said.message.id, text)
            async with chat.events(said.reply.id) as stream:
                async for entry in stream:
                    tell("seen", said.reply.id, entry.number, written(entry))
            parent = said.reply.id


def written(entry: LogEntry) -> str | None:
    """What a number must always mean; None for how the turn stands, which has no number of its own."""
    standing = isinstance(entry.event, Waiting | Started | Snapshot | Finished | Failed)
    return None if standing else repr(entry.event)


@dataclass
class Count:
    """What was found after the kills. Everything in `wrong` should never be."""

    kills: int = 0
    messages: int = 0
    events: int = 0
    interrupted: int = 0
    continued: int = 0
    wrong: list[str] = field(default_factory=list)


def killed(folder: Path, told: Path, kind: str, seconds: float) -> list[list[Any]]:
    """Lets a talker run for so long after its first words, kills it, and gives what it had been told."""
    talker = _CONTEXT.Process(target=talk_for_ever, args=(folder, told, kind))
    talker.start()
    while not told.exists() or b'"seen"' not in told.read_bytes():
        if not talker.is_alive():
            raise RuntimeError("the talker ended by itself")
        time.sleep(0.002)
    time.sleep(seconds)
    talker.kill()
    talker.join()
    lines = told.read_bytes()
    whole = lines[: lines.rfind(b"\n") + 1].decode().splitlines()
    return [json.loads(line) for line in whole]


async def check(folder: Path, told: list[list[Any]], kind: str, resume: bool, count: Count) -> None:
    """Compares what was told with what is there, and goes on with every reply that was cut."""
    with sqlite3.connect(folder / DATABASE) as connection:
        if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
            count.wrong.append("the database is damaged")
    connection.close()
    store = open_store(folder)
    try:
        async with served(store, kind, resume) as service:
            await _recovered(service)
            chat = service.chat(store.users.ensure().id)
            await _check_messages(chat, told, count)
            seen: dict[str, dict[int, str]] = defaultdict(dict)
            for row in told:
                if row[0] == "seen" and row[3] is not None:
                    seen[row[1]][row[2]] = row[3]
            for reply_id, events in seen.items():
                await _check_reply(service, chat, reply_id, events, kind, count)
    finally:
        store.close()
    count.kills += 1


async def _recovered(service: Service) -> None:
    await service.recovered.wait()


async def _check_messages(chat: Chat, told: list[list[Any]], count: Count) -> None:
    for kind, id, *rest in (row for row in told if row[0] in ("conversation", "message")):
        count.messages += kind == "message"
        try:
            if kind == "conversation":
                await chat.conversation(id)
            elif (await chat.message(id)).text != rest[0]:
                count.wrong.append(f"message {id} reads otherwise")
        except NotFound:
            count.wrong.append(f"{kind} {id} is lost")


async def _check_reply(
    service: Service, chat: Chat, reply_id: str, seen: dict[int, str], kind: str, count: Count
) -> None:
    count.events += len(seen)
    stored = await chat.message(reply_id)
    assert stored.reply is not None
    if stored.reply.status is not ReplyStatus.DONE:
        count.interrupted += 1
        if stored.reply.status is not ReplyStatus.RUNNING:
            await _compare(chat, reply_id, seen, "after the kill", count)
            await chat.go_on(reply_id)
        count.continued += 1
    await _compare(chat, reply_id, seen, "at the end", count)
    ended = await chat.message(reply_id)
    if ended.reply is None or ended.reply.status is not ReplyStatus.DONE:
        count.wrong.append(f"reply {reply_id} did not come to its end")
    if not await _is_uncut(service, chat, reply_id, kind):
        count.wrong.append(f"reply {reply_id} is not the uncut one")


async def _compare(chat: Chat, reply_id: str, seen: dict[int, str], when: str, count: Count) -> None:
    async with chat.events(reply_id) as stream:
        now = {entry.number: text async for entry in stream if (text := written(entry)) is not None}
    for number, text in seen.items():
        if now.get(number) != text:
            count.wrong.append(f"event {number} of {reply_id} was {text} and is {now.get(number)} {when}")


async def _is_uncut(service: Service, chat: Chat, reply_id: str, kind: str) -> bool:
    if kind == "scripted":
        return [token.token_id for token in await chat.tokens(reply_id)] in SCRIPTS
    return (await replay(service.store, service.models.current(), reply_id)).same


def run(
    folder: Path,
    kind: str,
    kills: int,
    seconds: float,
    seed: int = 0,
    after_each: Callable[[Count], None] | None = None,
) -> Count:
    """So many kills, each at a random moment of the first `seconds`; every second time the replies are resumed."""
    moments, count = random.Random(seed), Count()
    for number in range(kills):
        told = folder / f"told-{number}.jsonl"
        rows = killed(folder / "store", told, kind, moments.uniform(0, seconds))
        asyncio.run(check(folder / "store", rows, kind, number % 2 == 1, count))
        told.unlink()
        if after_each is not None:
            after_each(count)
    return count
