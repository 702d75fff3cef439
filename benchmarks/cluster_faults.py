"""Kills and rolling restarts of a cluster's parts, for `benchmarks.cluster`.

`kills`: two fronts on PostgreSQL and two scripted replicas; a part is killed while 16 replies run. `rolling`: two
`palaver serve` behind a balancer and two replicas of sprout; each is replaced while clients converse over HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.client.http_chat import HttpChat
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine, ReportProgress
from palaver.errors import PalaverError
from palaver.events import Event, Finished, ReadEvent
from palaver.messages import user
from palaver.store import ReplyStatus, open_store
from tests.chat.scripted_service import TOKENIZER
from tests.chat.scripted_service import model as scripted_model
from tests.engines.cluster_engines import SCRIPT
from tests.store.postgres import restart_server, running_server, server_binaries

STREAMS = 16
READ_S = 120.0
KINDS = ("replica", "front", "controller", "database")
FLUSH_S = 0.1
"""How often the other front's reader tells what it has read."""
GRACE_S = 1
CLIENTS = 6
_CONTEXT = multiprocessing.get_context("spawn")


def processes(title: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if title in " ".join(one.info["cmdline"] or ())]


# kills


@asynccontextmanager
async def front(folder: Path, database: str) -> AsyncIterator[tuple[Service, Chat]]:
    async def load(name: str, report: ReportProgress) -> Model:
        built = scripted_model([SCRIPT], name)
        engine = HostedEngine(EngineSpec("ray", Path(), tuple(TOKENIZER.vocabulary), address="ray://auto/scripted"))
        await engine.start()
        return Model(engine, built.format, name, built.tokenizer, built.vocabulary)

    with open_store(folder, database) as store:
        models = ModelPool(load, ("scripted",))
        models.load("scripted")
        async with Service(store, models, resume=True) as service:
            await models.ready()
            yield service, service.chat(store.users.ensure().id)


async def ask(chat: Chat, count: int) -> list[tuple[str, str]]:
    """Starts turns. Returns the ids of the messages and of the replies."""
    sent = []
    for _ in range(count):
        talk = await chat.create_conversation()
        one = await chat.send_message(talk.id, None, user("Hello"))
        sent.append((one.message.id, one.reply.id))
    return sent


def run_front(folder: Path, database: str, pipe: Connection) -> None:
    """Starts turns on command, and reads them: what was read is sent, with the numbers of the events."""
    read: list[tuple[str, int, Event]] = []

    async def follow(chat: Chat, reply: str) -> None:
        async with chat.events(reply) as entries:
            async for entry in entries:
                if isinstance(entry.event, ReadEvent):
                    read.append((reply, entry.number, entry.event))

    async def flush() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            if read:
                pipe.send(("read", list(read)))
                read.clear()

    async def serve() -> None:
        async with front(folder, database) as (_, chat), asyncio.TaskGroup() as tasks:
            tasks.create_task(flush())
            while count := await asyncio.to_thread(pipe.recv):
                sent = await ask(chat, count)
                pipe.send(("sent", sent))
                for _, reply in sent:
                    tasks.create_task(follow(chat, reply))

    asyncio.run(serve())


class OtherFront:
    """A front in another process, which can be killed, with readers there."""

    def __init__(self, folder: Path, database: str) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=run_front, args=(folder, database, theirs))
        self._process.start()
        theirs.close()
        self._sent: queue.Queue[list[tuple[str, str]]] = queue.Queue()
        self.read: dict[str, dict[int, Event]] = {}
        """The events that its readers got, by reply and number."""
        self._receiving = threading.Thread(target=self._receive, daemon=True)
        self._receiving.start()

    async def ask(self, count: int) -> list[tuple[str, str]]:
        self._pipe.send(count)
        return await asyncio.to_thread(self._sent.get)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._receiving.join()

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                kind, what = self._pipe.recv()
                if kind == "sent":
                    self._sent.put(what)
                    continue
                for reply, number, event in what:
                    self.read.setdefault(reply, {})[number] = event


async def kills(count: int, seed: int, only: str | None) -> None:
    binaries = server_binaries()
    if binaries is None:
        print("PostgreSQL is not installed: not shown")
        return
    chance, wrong, actions, begun = random.Random(seed), list[str](), Counter[str](), time.monotonic()
    resumed = 0
    with running_server(binaries, fsync=True) as url, tempfile.TemporaryDirectory() as name:
        folder, database = Path(name), url.render_as_string()
        with open_store(folder, database):
            pass
        other = OtherFront(folder, database)
        async with front(folder, database) as (_, chat):
            for number in range(count):
                kind = only or KINDS[number % len(KINDS)]
                sent = [*await other.ask(STREAMS // 2), *await ask(chat, STREAMS // 2)]
                ends = [asyncio.create_task(finish(chat, *one)) for one in sent[STREAMS // 2 :]]
                await asyncio.sleep(chance.uniform(0.1, 2.5))
                kill: dict[str, Callable[[], object]] = {
                    "replica": lambda: chance.choice(processes("ray::ServeReplica:scripted:")).kill(),
                    "front": other.kill,
                    "controller": lambda: processes("ray::ServeController")[0].kill(),
                    "database": lambda: restart_server(url),
                }
                await asyncio.to_thread(kill[kind])
                if kind != "front":  # its readers go on by themselves, and so do those here
                    await asyncio.sleep(FLUSH_S)
                received = [dict(other.read.get(reply, {})) for _, reply in sent[: STREAMS // 2]]
                resumed += sum(map(bool, received))
                ends += [
                    asyncio.create_task(finish(chat, *one, read))
                    for one, read in zip(sent[: STREAMS // 2], received, strict=True)
                ]
                for found, did in await asyncio.gather(*ends):
                    wrong += found
                    actions += did
                print(
                    f"  {number + 1} ({kind}): {len(wrong)} wrong, clients had to: {dict(actions) or 'nothing'}",
                    flush=True,
                )
                if kind == "front":
                    other = OtherFront(folder, database)
        other.kill()
    print(
        f"{count} kills with {count * STREAMS} replies in {time.monotonic() - begun:.0f} s: {len(wrong)} wrong; "
        f"{resumed} readers went on by number at another front; clients had to: {dict(actions) or 'nothing'}"
    )
    for line in wrong[:10]:
        print(f"  {line}")


async def finish(
    chat: Chat, message: str, reply: str, received: dict[int, Event] | None = None
) -> tuple[list[str], Counter[str]]:
    """Reads a reply to its end as a client does: after what it received elsewhere, and again after an error. Returns
    what is wrong, and what the client had to do."""
    events, did, begun = dict(received or {}), Counter[str](), time.monotonic()
    stored, ended = None, None
    while time.monotonic() - begun < READ_S:
        try:
            async with chat.events(reply, max(events, default=0)) as entries:
                async for entry in entries:
                    ended = entry.event
                    if isinstance(ended, ReadEvent):
                        events[entry.number] = ended
            stored = (await chat.message(reply)).reply
            if isinstance(ended, Finished) and stored is not None and stored.status is ReplyStatus.DONE:
                return await check(chat, message, reply, events), did
            if stored is not None and stored.status is not ReplyStatus.RUNNING:
                await chat.continue_reply(reply)
                did["continue"] += 1
            else:
                did["read again"] += 1
        except PalaverError as error:
            did[f"read again after {type(error).__name__}"] += 1
        await asyncio.sleep(0.2)
    return [f"reply {reply} did not end: {stored}, {ended}"], did


async def check(chat: Chat, message: str, reply: str, events: dict[int, Event]) -> list[str]:
    wrong = []
    if (await chat.message(message)).text != "Hello":
        wrong.append(f"message {message} is lost")
    if [token.token_id for token in await chat.tokens(reply)] != SCRIPT:
        wrong.append(f"reply {reply} is not the uncut one")
    async with chat.events(reply) as entries:
        whole = {entry.number: entry.event async for entry in entries if isinstance(entry.event, ReadEvent)}
    if events != whole:
        wrong.append(f"a reader of {reply} got other events: {len(events)} of {len(whole)}")
    return wrong


# rolling restarts


class Balancer(httpx.AsyncBaseTransport):
    """What a proxy does: each request goes to the next server, or to another one if it can't be connected to."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._count = len(ports)
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for attempt in range(self._count):
            request.url = request.url.copy_with(port=next(self._ports))
            try:
                return await self._inner.handle_async_request(request)
            except httpx.ConnectError:
                if attempt == self._count - 1:
                    raise
        raise AssertionError

    async def aclose(self) -> None:
        await self._inner.aclose()


class FrontProcess:
    """A `palaver serve` on the cluster."""

    def __init__(self, folder: Path, database: str, port: int) -> None:
        self._port = port
        self._command = [
            sys.executable, "-m", "palaver", "serve", "sprout", "--engine", "ray://auto", "--port", str(port),
            "--grace", str(GRACE_S), "--no-titles", "--data", str(folder), "--database", database,
        ]  # fmt: skip
        self._log = (folder / f"{port}.log").open("ab")

    async def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert self._process.poll() is None, "a server ended by itself"
                with suppress(httpx.TransportError):
                    if (await client.get(f"http://127.0.0.1:{self._port}/ready")).is_success:
                        return
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.wait)


async def converse(chat: HttpChat, number: int, replies: dict[int, list[int]], found: Counter[str]) -> None:
    """One question and its reply, which must be that of the first time. Every exception reaches a client."""
    parameters = {"temperature": 1.0, "seed": number, "max_tokens": 150}
    try:
        talk = await chat.create_conversation(parameters=parameters)
        sent = await chat.send_message(talk.id, None, user(f"Write a long story about the number {number}."))
        ended = None
        async with chat.events(sent.reply.id) as entries:
            async for entry in entries:
                ended = entry.event
        ids = [token.token_id for token in await chat.tokens(sent.reply.id)]
    except Exception as error:
        found[f"error {type(error).__name__}: {error}"[:200]] += 1
        return
    if not isinstance(ended, Finished):
        found[f"ended with {ended}"[:200]] += 1
    elif replies.setdefault(number, ids) != ids:
        found["another reply than the uncut one"] += 1
    else:
        found["right"] += 1


async def rolling(rounds: int, replace_replicas: Callable[[int], Awaitable[None]]) -> None:
    """`replace_replicas`: replaces all replicas, one by one, with those of another version."""
    binaries = server_binaries()
    if binaries is None:
        print("PostgreSQL is not installed: not shown")
        return
    ports = [_free_port(), _free_port()]
    with running_server(binaries, fsync=True) as url, tempfile.TemporaryDirectory() as name:
        folder, database = Path(name), url.render_as_string()
        with open_store(folder, database):
            pass
        servers = [FrontProcess(folder, database, port) for port in ports]
        for server in servers:
            await server.start()
        found, replies, done = Counter[str](), dict[int, list[int]](), asyncio.Event()
        try:
            async with HttpChat(f"http://127.0.0.1:{ports[0]}", transport=Balancer(ports)) as chat:
                for number in range(CLIENTS):
                    await converse(chat, number, replies, found)

                async def work(number: int) -> None:
                    while not done.is_set():
                        await converse(chat, number, replies, found)

                working = [asyncio.create_task(work(number)) for number in range(CLIENTS)]
                for number in range(rounds):
                    for place, server in enumerate(servers):
                        await server.stop()
                        await server.start()
                        print(f"  front {place + 1} replaced: {dict(found)}", flush=True)
                    await replace_replicas(number)
                    print(f"  replicas replaced: {dict(found)}", flush=True)
                done.set()
                await asyncio.gather(*working)
        finally:
            for server in servers:
                await server.stop()
            if found.total() != found["right"] and "KEEP_LOGS" in os.environ:
                subprocess.run(["tail", "-n", "40", *map(str, folder.glob("*.log"))])
    print(f"{rounds} rounds: {found['right']} replies right, {found.total() - found['right']} errors reached clients")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address: Any = listening.getsockname()
        return int(address[1])
