"""Several servers on one store, with scripted engines: how soon a command reaches a turn in another process, and how
many tokens a second one server stores.

    python -m benchmarks.fronts --latency [--rounds 5] [--milliseconds 5] [--database postgresql]
    python -m benchmarks.fronts --pace [--streams 64] [--milliseconds 0] [--database sqlite]

A latency is the time from the call to the event that a reader in the process of the call gets. It includes the
engine's own tokens: a stop waits for the token that is being computed, a continue for the first one or two that have
text, and an answer now for seven: that one, four that close the thought, and two until the answer has text.
PostgreSQL is started for the benchmark, with its defaults (also fsync), and is skipped where it is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from sqlalchemy import URL

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.host.supervisor import ReportProgress
from palaver.events import Event, Finished, PhaseOpened, ReadEvent
from palaver.messages import user
from palaver.phases import Phase
from palaver.server.app import favour_latency
from palaver.store import Store, TokenFrame, open_store
from tests.chat.scripted_service import TOKENIZER, model, reply
from tests.scripted_engine import PacedEngine
from tests.store.postgres import running_server, server_binaries

SCRIPT = reply("1 2 3 4 5 6 7 8 9 " * 40, "a word and another " * 60)
STREAMS = 16
_CONTEXT = multiprocessing.get_context("spawn")


@asynccontextmanager
async def front(store: Store, seconds: float) -> AsyncIterator[Service]:
    async def load(name: str, report: ReportProgress) -> Model:
        built = model([SCRIPT], name)
        engine = PacedEngine([SCRIPT], TOKENIZER.vocabulary, seconds)
        return Model(engine, built.format, name, built.tokenizer, built.vocabulary)

    models = ModelPool(load, ("scripted",))
    models.load("scripted")
    async with Service(store, models) as service:
        await models.ready()
        await service.recovered.wait()
        favour_latency()
        yield service


async def start(chat: Chat) -> str:
    talk = await chat.create_conversation()
    return (await chat.send_message(talk.id, None, user("Hello"))).reply.id


# latency


def run_owner(folder: Path, database: str | None, seconds: float, commands: Connection) -> None:
    asyncio.run(_own(folder, database, seconds, commands))


async def _own(folder: Path, database: str | None, seconds: float, commands: Connection) -> None:
    with open_store(folder, database) as store:
        async with front(store, seconds) as service:
            chat = service.chat(store.users.ensure().id)
            while count := await asyncio.to_thread(commands.recv):
                commands.send([await start(chat) for _ in range(count)])


class Reader:
    """Reads a turn and remembers when each event came."""

    def __init__(self, chat: Chat, reply_id: str, after: int = 0) -> None:
        self._chat = chat
        self._id = reply_id
        self._seen: list[Event] = []
        self._after = self.number = after
        """The number of the last event."""
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._chat.events(self._id, self._after) as stream:
            async for entry in stream:
                self._seen.append(entry.event)
                self.number = entry.number
                self._changed.set()

    async def wait_after(self, begun: float, number: int) -> float:
        """Milliseconds from `begun` to the first event after that number."""
        while self.number <= number:
            self._changed.clear()
            await self._changed.wait()
        return (time.perf_counter() - begun) * 1e3

    async def wait(self, begun: float, found: type[Event] | Phase) -> float:
        """Milliseconds from `begun` to the first such event."""
        while True:
            for event in self._seen:
                if isinstance(event, PhaseOpened) and event.phase is found:
                    return (time.perf_counter() - begun) * 1e3
                if not isinstance(found, Phase) and isinstance(event, found):
                    return (time.perf_counter() - begun) * 1e3
            self._changed.clear()
            await self._changed.wait()


async def latencies(folder: Path, database: str | None, rounds: int, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    mine, theirs = _CONTEXT.Pipe()
    with open_store(folder, database) as store:
        owner = store.users.ensure()
        process = _CONTEXT.Process(target=run_owner, args=(folder, database, seconds, theirs))
        process.start()
        try:
            async with front(store, seconds) as service:
                for _ in range(rounds):
                    await asyncio.to_thread(mine.send, STREAMS)
                    ids = await asyncio.to_thread(mine.recv)
                    await asyncio.gather(*(_use(service.chat(owner.id), id, found) for id in ids))
        finally:
            mine.send(0)
            process.join()
    return found


async def _use(chat: Chat, id: str, found: dict[str, list[float]]) -> None:
    await asyncio.sleep(random.uniform(0.2, 0.6))
    begun = time.perf_counter()
    reader = Reader(chat, id)
    found["attach"].append(await reader.wait(begun, PhaseOpened))
    await asyncio.sleep(random.uniform(0.2, 0.8))
    begun = time.perf_counter()
    await chat.answer_now(id)
    found["answer now"].append(await reader.wait(begun, Phase.ANSWER))
    await asyncio.sleep(random.uniform(0.2, 0.8))
    begun = time.perf_counter()
    await chat.stop_reply(id)
    found["stop"].append(await reader.wait(begun, Finished))
    await reader.task
    await asyncio.sleep(random.uniform(0.1, 0.3))
    begun = time.perf_counter()
    await chat.continue_reply(id)
    again = Reader(chat, id, reader.number)
    found["continue"].append(await again.wait_after(begun, reader.number))
    await chat.stop_reply(id)
    await again.task


# pace


async def pace(folder: Path, database: str | None, streams: int, seconds: float) -> tuple[float, float]:
    """Tokens and commits a second of one server whose turns all have a reader."""
    with open_store(folder, database) as store:
        commits = _count_commits(store)
        async with front(store, seconds) as service:
            chat = service.chat(store.users.ensure().id)
            ids = [await start(chat) for _ in range(streams)] if not seconds else []
            for id in ids:  # without a pace they are through soon: they are run again together
                await _read_to_end(chat, id)
            talks = [await chat.create_conversation() for _ in range(streams)]
            first = commits[0]
            begun = time.perf_counter()
            sent = await asyncio.gather(*(chat.send_message(talk.id, None, user("Hello")) for talk in talks))
            await asyncio.gather(*(_read_to_end(chat, one.reply.id) for one in sent))
            passed = time.perf_counter() - begun
    return streams * len(SCRIPT) / passed, (commits[0] - first) / passed


async def _read_to_end(chat: Chat, id: str) -> None:
    async with chat.events(id) as stream:
        events = [entry.event async for entry in stream]
    assert isinstance(events[-1], Finished), events[-1]
    assert any(isinstance(event, ReadEvent) for event in events)


def _count_commits(store: Store) -> list[int]:
    append, count = store.replies.append, [0]

    def counted(lease: object, frames: Sequence[TokenFrame]) -> frozenset[str]:
        count[0] += 1
        return append(lease, frames)  # type: ignore[arg-type]

    store.replies.append = counted  # type: ignore[method-assign]
    return count


# databases


@contextmanager
def databases(only: str) -> Iterator[dict[str, URL | None]]:
    binaries = server_binaries()
    if only == "sqlite" or binaries is None:
        if only != "sqlite":
            print("PostgreSQL is not installed: not measured")
        yield {"SQLite": None}
        return
    with running_server(binaries, fsync=True) as url:
        yield {"PostgreSQL": url} if only == "postgresql" else {"SQLite": None, "PostgreSQL": url}


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--pace", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--milliseconds", type=float, help="of the engine for each token: 5 and 0 by default")
    parser.add_argument("--database", choices=["sqlite", "postgresql", "both"], default="both")
    given = parser.parse_args()
    with databases(given.database) as places:
        addresses = {name: None if url is None else url.render_as_string() for name, url in places.items()}
        if given.latency:
            report_latencies(addresses, given.rounds, (5.0 if given.milliseconds is None else given.milliseconds) / 1e3)
        if given.pace:
            report_paces(addresses, given.rounds, given.streams, (given.milliseconds or 0.0) / 1e3)


def report_latencies(addresses: dict[str, str | None], rounds: int, seconds: float) -> None:
    for name, address in addresses.items():
        print(f"{name}, load {os.getloadavg()[0]:.1f}")
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(latencies(Path(folder), address, rounds, seconds))
        for kind, values in found.items():
            middle, high = statistics.median(values), _percentile(values, 0.99)
            print(f"  {kind:12} {len(values):4} times: {middle:6.1f} ms, 99% within {high:6.1f} ms")


def report_paces(addresses: dict[str, str | None], rounds: int, streams: int, seconds: float) -> None:
    """In turn, since a round takes two seconds and the machine's own speed changes in as many."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in addresses}
    print(f"load {os.getloadavg()[0]:.1f}")
    for _ in range(rounds):
        for name, address in addresses.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(asyncio.run(pace(Path(folder), address, streams, seconds)))
    medians = {name: statistics.median(tokens for tokens, _ in values) for name, values in found.items()}
    for name, values in found.items():
        commits = statistics.median(commits for _, commits in values)
        each = ", ".join(f"{tokens:,.0f}" for tokens, _ in values)
        print(f"{name:10} {streams} streams: {medians[name]:8,.0f} tokens/s in {commits:6.0f} commits/s ({each})")
    if len(medians) == 2:
        first, second = medians
        ratios = [b[0] / a[0] for a, b in zip(found[first], found[second], strict=True)]
        whole = medians[second] / medians[first]
        print(f"{second} {whole:.0%} of {first}; by round {min(ratios):.0%} to {max(ratios):.0%}")


if __name__ == "__main__":
    main()
