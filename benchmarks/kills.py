"""kill -9, many times: the whole program under load, and the engine's process in mid-reply.

python -m benchmarks.kills --program 1000              # on the scripted engine
python -m benchmarks.kills --program 50 --model sprout
python -m benchmarks.kills --program 10 --model sprout-omni      # a picture in every message
python -m benchmarks.kills --fronts 50 [--database postgresql]   # one of two servers on a store
python -m benchmarks.kills --host 50                   # the engine host, eight streams, sprout
python -m benchmarks.kills --host 50 --model sprout.gguf [--engine llamacpp]   # by default compiled steps run it
python -m benchmarks.kills --host 10 --engine vllm --engine-python ~/vllm/bin/python --no-compile
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.fronts import databases
from palaver.chat.continuation import replay
from palaver.chat.engine_choice import LoadOptions
from palaver.chat.interface import Chat
from palaver.chat.service import Service
from palaver.chat.turn_log import LogEntry
from palaver.engines.host.supervisor import HostedEngine
from palaver.events import Finished
from palaver.messages import user
from palaver.store import open_store
from tests.chat.process_kills import QUESTIONS, Count, run, run_fronts, served

STREAMS = 8
EVERY = 25
"""Kills between two words of how far it is."""


def program(kills: int, kind: str, seconds: float) -> None:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        count = run(Path(folder), kind, kills, seconds, after_each=lambda so_far: _tell(so_far, begun))
    print(f"{count.kills} kills of the program ({kind}) in {time.monotonic() - begun:.0f} s")
    _report(count)


def fronts(kills: int, seconds: float, database: str) -> None:
    """One of two servers on a store is killed: its turns and their readers go on at the other one."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, databases(database) as places:
        ((name, url),) = places.items()
        address = None if url is None else url.render_as_string()
        count = asyncio.run(run_fronts(Path(folder), kills, seconds, address, after_each=lambda it: _tell(it, begun)))
    print(f"{count.kills} kills of one of two servers ({name}) in {time.monotonic() - begun:.0f} s")
    _report(count)


def _report(count: Count) -> None:
    print(f"  acknowledged messages     {count.messages}")
    print(f"  events that readers saw   {count.events}")
    print(f"  replies cut and continued {count.continued}")
    print(f"  lost, changed or not the uncut one: {len(count.wrong)}")
    for line in count.wrong[:20]:
        print(f"    {line}")


def _tell(count: Count, begun: float) -> None:
    """How far it is, now and then: a long run that is cut short has shown what it got to."""
    if count.kills % EVERY == 0:
        passed = f"{count.kills} kills after {time.monotonic() - begun:.0f} s"
        print(f"{passed}: {count.messages} messages, {count.continued} continued, {len(count.wrong)} wrong", flush=True)


async def host(kills: int, model: str, options: LoadOptions | None = None) -> None:
    """Eight replies at a time, half of them greedy; the host is killed at random moments until all kills are done."""
    moments, done, replies, wrong = random.Random(0), 0, 0, 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder))
        async with served(store, model, options=options) as service:
            chat = service.chat(store.users.ensure().id)
            while done < kills:
                ids = [await _begun(chat, number) for number in range(STREAMS)]
                readers = [asyncio.create_task(_read(chat, id)) for id in ids]
                done += await _kill_while(service, readers, moments)
                begun_again = time.monotonic()
                for id, reader in zip(ids, readers, strict=True):
                    replies += 1
                    wrong += not await _right(service, id, await reader)
                passed = f"{time.monotonic() - begun:.0f} s, the last round {time.monotonic() - begun_again:.0f} s"
                print(f"{done} kills, {replies} replies, {wrong} wrong after {passed}", flush=True)
        store.close()
    print(f"{done} kills of the engine host in {time.monotonic() - begun:.0f} s, {STREAMS} streams at a time ({model})")
    print(f"  replies that completed by themselves: {replies}; not the uncut one, or not to their end: {wrong}")


async def _begun(chat: Chat, number: int) -> str:
    talk = await chat.create_conversation()
    how = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}
    said = await chat.send_message(talk.id, None, user(QUESTIONS[number % len(QUESTIONS)]), parameters=how)
    return said.reply.id


async def _read(chat: Chat, id: str) -> list[LogEntry]:
    async with chat.events(id) as stream:
        return [entry async for entry in stream]


async def _kill_while(service: Service, readers: list[asyncio.Task[list[LogEntry]]], moments: random.Random) -> int:
    """Kills the host once, while at least one reply runs."""
    engine = service.models.engine()
    assert isinstance(engine, HostedEngine)
    await asyncio.wait(readers, timeout=moments.uniform(0.01, 0.5), return_when=asyncio.FIRST_COMPLETED)
    if all(reader.done() for reader in readers) or engine.process_id is None:
        return 0
    os.kill(engine.process_id, signal.SIGKILL)
    return 1


async def _right(service: Service, id: str, told: list[LogEntry]) -> bool:
    numbers = [entry.number for entry in told if not isinstance(entry.event, Finished)]
    whole = numbers == sorted(numbers) and isinstance(told[-1].event, Finished)
    return whole and (await replay(service.store, service.models.current(), id)).same


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", type=int, default=0)
    parser.add_argument("--model", help="a name or a path; by default a scripted engine, or sprout for --host")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--fronts", type=int, default=0)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--engine", default="auto", help="of --host, as `palaver serve` has it")
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--no-compile", action="store_true", help="the engine of --host starts sooner")
    given = parser.parse_args()
    if given.program:
        program(given.program, given.model or "scripted", given.seconds)
    if given.fronts:
        fronts(given.fronts, given.seconds, given.database)
    if given.host:
        compiled = False if given.no_compile else None
        options = LoadOptions(engine=given.engine, engine_python=given.engine_python, compiled=compiled)
        asyncio.run(host(given.host, given.model or "sprout", options))


if __name__ == "__main__":
    main()
