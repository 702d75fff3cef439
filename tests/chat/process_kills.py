"""Kills a process in the middle of its replies and checks that everything it acknowledged is stored.

The client process holds several conversations at once and logs, line by line, the messages that were acknowledged and
the events that it received. Used by the tests and, for longer, by benchmarks/kills.py.
"""

from __future__ import annotations

import asyncio
import json
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

from palaver.chat.continuation import replay
from palaver.chat.engine_choice import STATES, LoadOptions
from palaver.chat.interface import Chat
from palaver.chat.model_loader import ModelLoader
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.chat.turn_log import LogEntry
from palaver.events import DraftBlock, Failed, Finished, Snapshot, Started, Waiting
from palaver.messages import Image, Message, Role, Text, user
from palaver.store import NotFound, ReplyStatus, Store, open_store
from palaver.store.store import DATABASE
from tests import forkserver, media_files
from tests.chat.scripted_service import reply, run_service

STREAMS = 6
QUESTIONS = ["Count from 1 to 60.", "What is 417 + 385?", "Tell me about yourself.", "Write the alphabet."]
SCRIPTS = [reply(f"{number} " * 40 + "think 👋", f"{number} says " + "a word 👋🏽 " * 30) for number in range(8)]
_CONTEXT = forkserver.preload("tests.chat.process_kills")


@asynccontextmanager
async def served(
    store: Store, kind: str, resume: bool = False, options: LoadOptions | None = None
) -> AsyncIterator[Service]:
    if kind == "scripted":
        async with run_service(store, SCRIPTS, resume=resume) as stage:
            yield stage.service
        return
    models = ModelPool(ModelLoader(options or LoadOptions(states=store.folder / STATES)).load)
    models.load(kind)
    async with Service(store, models, resume=resume) as service:
        await models.ready()
        yield service


def run_client(folder: Path, received: Path, kind: str, streams: int, database: str | None = None) -> None:
    file = os.open(received, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def log(*row: Any) -> None:
        os.write(file, (json.dumps(row) + "\n").encode())

    asyncio.run(_run_conversations(open_store(folder, database), log, kind, streams))


async def _run_conversations(store: Store, log: Callable[..., Any], kind: str, streams: int) -> None:
    owner = store.users.ensure()
    async with served(store, kind) as service, asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(_converse(service.chat(owner.id), log, number))


def _question(text: str, number: int, sees: bool) -> Message:
    """With a picture of another colour for each number, for a model that sees."""
    if not sees:
        return user(text)
    colour = (number * 40 % 256, number * 90 % 256, 200)
    return Message(Role.USER, (Image("image/png", media_files.picture(size=(64, 64), colour=colour)), Text(text)))


async def _converse(chat: Chat, log: Callable[..., Any], number: int) -> None:
    sees = "image" in (await chat.model()).media
    while True:
        conversation = await chat.create_conversation(title=f"Talk {number}")
        log("conversation", conversation.id)
        parent = None
        for turn in range(3):
            text = QUESTIONS[(number + turn) % len(QUESTIONS)]
            sent = await chat.send_message(conversation.id, parent, _question(text, 3 * number + turn, sees))
            log("message", sent.message.id, text)
            async with chat.events(sent.reply.id) as stream:
                async for entry in stream:
                    log("seen", sent.reply.id, entry.number, event_text(entry))
            parent = sent.reply.id


def event_text(entry: LogEntry) -> str | None:
    """The event of a number as text; None for a status, which has no number of its own."""
    is_status = isinstance(entry.event, Waiting | Started | DraftBlock | Snapshot | Finished | Failed)
    return None if is_status else repr(entry.event)


@dataclass
class Count:
    """The result of the checks. `wrong` must stay empty."""

    kills: int = 0
    messages: int = 0
    events: int = 0
    interrupted: int = 0
    continued: int = 0
    wrong: list[str] = field(default_factory=list)


def run_and_kill(
    folder: Path, received: Path, kind: str, seconds: float, streams: int = STREAMS, database: str | None = None
) -> list[list[Any]]:
    """Kills a client process that many seconds after its first event, and returns its log."""
    client = _CONTEXT.Process(target=run_client, args=(folder, received, kind, streams, database))
    client.start()
    while not received.exists() or not _has_numbered_event(received):
        if not client.is_alive():
            raise RuntimeError("the client ended by itself")
        time.sleep(0.002)
    time.sleep(seconds)
    client.kill()
    client.join()
    lines = received.read_bytes()
    complete = lines[: lines.rfind(b"\n") + 1].decode().splitlines()
    return [json.loads(line) for line in complete]


def _has_numbered_event(received: Path) -> bool:
    """Statuses and drafts have no number: their last field is null."""
    return any(b'"seen"' in line and not line.endswith(b"null]") for line in received.read_bytes().splitlines())


async def check(folder: Path, received: list[list[Any]], kind: str, resume: bool, count: Count) -> None:
    """Compares the log with the store, and continues every reply that was cut."""
    with sqlite3.connect(folder / DATABASE) as connection:
        if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
            count.wrong.append("the database is damaged")
    connection.close()
    store = open_store(folder)
    try:
        async with served(store, kind, resume) as service:
            await _recovered(service)
            chat = service.chat(store.users.ensure().id)
            await _check_messages(chat, received, count)
            for reply_id, events in _seen(received).items():
                await _check_reply(service, chat, reply_id, events, kind, count)
    finally:
        store.close()
    count.kills += 1


def _seen(received: list[list[Any]]) -> dict[str, dict[int, str]]:
    """The numbered events that the client received, by reply."""
    seen: dict[str, dict[int, str]] = defaultdict(dict)
    for row in received:
        if row[0] == "seen" and row[3] is not None:
            seen[row[1]][row[2]] = row[3]
    return seen


async def _recovered(service: Service) -> None:
    await service.recovered.wait()


async def _check_messages(chat: Chat, received: list[list[Any]], count: Count) -> None:
    for kind, id, *rest in (row for row in received if row[0] in ("conversation", "message")):
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
            await chat.continue_reply(reply_id)
        count.continued += 1
    await _compare(chat, reply_id, seen, "at the end", count)
    ended = await chat.message(reply_id)
    if ended.reply is None or ended.reply.status is not ReplyStatus.DONE:
        count.wrong.append(f"reply {reply_id} did not come to its end")
    if not await _is_uncut(service, chat, reply_id, kind):
        count.wrong.append(f"reply {reply_id} is not the uncut one")


async def _compare(chat: Chat, reply_id: str, seen: dict[int, str], when: str, count: Count) -> None:
    async with chat.events(reply_id) as stream:
        now = {entry.number: text async for entry in stream if (text := event_text(entry)) is not None}
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
    streams: int = STREAMS,
) -> Count:
    """Kills clients at random moments of the first `seconds`; every second time the replies are resumed."""
    moments, count = random.Random(seed), Count()
    for number in range(kills):
        received = folder / f"told-{number}.jsonl"
        rows = run_and_kill(folder / "store", received, kind, moments.uniform(0, seconds), streams)
        asyncio.run(check(folder / "store", rows, kind, number % 2 == 1, count))
        received.unlink()
        if after_each is not None:
            after_each(count)
    return count


async def run_fronts(
    folder: Path,
    kills: int,
    seconds: float,
    database: str | None = None,
    seed: int = 0,
    after_each: Callable[[Count], None] | None = None,
) -> Count:
    """Kills one of two servers on a store, again and again: its turns go on at the other one, and so do its readers."""
    moments, count = random.Random(seed), Count()
    with open_store(folder / "store", database) as store:
        async with served(store, "scripted", resume=True) as service:
            await service.recovered.wait()
            chat = service.chat(store.users.ensure().id)
            for number in range(kills):
                received = folder / f"fronts-{number}.jsonl"
                rows = await asyncio.to_thread(
                    run_and_kill, store.folder, received, "scripted", moments.uniform(0, seconds), STREAMS, database
                )
                await _check_messages(chat, rows, count)
                for reply_id, events in _seen(rows).items():
                    await _go_on(service, chat, reply_id, events, count)
                received.unlink()
                count.kills += 1
                if after_each is not None:
                    after_each(count)
    return count


async def _go_on(service: Service, chat: Chat, reply_id: str, seen: dict[int, str], count: Count) -> None:
    """Reads a reply on, after the last number that a reader at the other server had."""
    count.events += len(seen)
    last = max(seen)
    async with chat.events(reply_id, last) as stream:
        rest = [entry async for entry in stream]
    if not isinstance(rest[-1].event, Finished):
        count.wrong.append(f"reply {reply_id} ended with {rest[-1].event}")
    numbers = [entry.number for entry in rest if event_text(entry) is not None]
    count.continued += bool(numbers)
    if numbers != list(range(last + 1, last + 1 + len(numbers))):
        count.wrong.append(f"reply {reply_id} went on after {last} with {numbers[:5]}")
    await _compare(chat, reply_id, seen, "at the other server", count)
    if not await _is_uncut(service, chat, reply_id, "scripted"):
        count.wrong.append(f"reply {reply_id} is not the uncut one")
