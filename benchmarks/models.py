"""Three models behind one server with room for two: requests at random, none lost, none cut, memory below the bound.

    python benchmarks/models.py [--requests 200] [--memory 1000MB] [--alone 3]

Then one request at a time goes round the models, so that each one has to be loaded from the disk and waits for nothing
else. The exit status is 1 if a request was lost, a reply was cut or the memory went over the bound, and if nothing was
ever evicted: then there was room for all. Prints the time from a request to the first token by whether its model was
loaded, and the most memory that the engine processes took together (proportional set size: pages that processes share
count once).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.service import Service
from palaver.commands.options import make_pool, parse_size
from palaver.models.resolver import embedded_models
from palaver.server.settings import ServerSettings
from palaver.store import open_store
from tests.client.live import served

AT_ONCE = 6


class MemoryWatch:
    """The most memory that the children of this process took."""

    def __init__(self) -> None:
        self.most = 0

    async def run(self) -> None:
        while True:
            self.most = max(self.most, await asyncio.to_thread(_engine_bytes))
            await asyncio.sleep(0.2)


def _engine_bytes() -> int:
    total = 0
    for child in psutil.Process().children(recursive=True):
        try:
            if "palaver.engines.host" in child.cmdline():
                total += child.memory_full_info().pss
        except psutil.Error:
            continue
    return total


async def measure(requests: int, memory: int, rounds: int) -> list[str]:
    """Returns what went wrong."""
    numbers, names = random.Random(1), embedded_models()
    times: dict[bool, list[float]] = {True: [], False: []}
    alone: dict[str, list[float]] = {name: [] for name in names}
    ends: list[str] = []
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder)) as store:
        pool = make_pool(LoadOptions(), Path(folder), names[0], memory=memory)
        pool.load(names[0])
        watch, most_counted = MemoryWatch(), 0
        async with Service(store, pool) as service, served(service, ServerSettings()) as url:
            await pool.ready()
            watching = asyncio.create_task(watch.run())
            places = asyncio.Semaphore(AT_ONCE)
            async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:

                async def ask(name: str, number: int) -> tuple[float, str]:
                    """The time to the first token, and how the reply ended."""
                    first, last, begun = 0.0, "", time.monotonic()
                    messages = [{"role": "user", "content": f"What is {number} + 5?"}]
                    body = {"model": name, "messages": messages, "stream": True, "max_tokens": 48}
                    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                        async for line in answer.aiter_lines():
                            last = line.partition('"finish_reason":"')[2].partition('"')[0] or last
                            if not first and ('content":"' in line and 'content":""' not in line):
                                first = time.monotonic() - begun
                    return first, last if answer.status_code == 200 else str(answer.status_code)

                async def one(number: int) -> None:
                    nonlocal most_counted
                    name = names[numbers.randrange(len(names))]
                    async with places:
                        was_loaded = pool.card(name).state == "ready"
                        first, end = await ask(name, number)
                        ends.append(end)
                        times[was_loaded].append(first)
                        most_counted = max(most_counted, pool.used_bytes)

                begun = time.monotonic()
                await asyncio.gather(*(one(number) for number in range(requests)))
                seconds = time.monotonic() - begun
                for number, name in enumerate(names * rounds):
                    on_disk = pool.card(name).state != "ready"
                    first, end = await ask(name, number)
                    ends.append(end)
                    if on_disk:
                        alone[name].append(first)
            watching.cancel()
    print(f"{requests} requests at random to {', '.join(names)}, {AT_ONCE} at once: {seconds:.0f} s")
    requests, good = len(ends), sum(end in ("stop", "length") for end in ends)
    print(f"complete: {good} of {requests}, lost or cut: {requests - good}")
    counted, measured = f"{most_counted / 1e6:.0f} MB", f"{watch.most / 1e6:.0f} MB"
    print(f"memory: bound {memory / 1e6:.0f} MB, counted at most {counted}, measured at most {measured}")
    for was_loaded, found in times.items():
        if found:
            state = "loaded" if was_loaded else "on disk"
            print(
                f"first token, model {state}: median {statistics.median(found):.2f} s, most {max(found):.2f} s,"
                f" {len(found)} requests"
            )
    for name, found in alone.items():
        if found:
            print(
                f"first token of {name} from the disk, one request at a time: median {statistics.median(found):.2f} s,"
                f" most {max(found):.2f} s, {len(found)} requests"
            )
    wrong = [f"{requests - good} of {requests} requests were lost or cut: {sorted(set(ends))}"] * (good < requests)
    for what, found_bytes in (("counted", most_counted), ("measured", watch.most)):
        if found_bytes > memory:
            wrong.append(f"the memory that was {what} is over the bound by {(found_bytes - memory) / 1e6:.0f} MB")
    if len(times[False]) <= len(names):
        wrong.append("no model was loaded twice: --memory has room for all of them")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--memory", default="1000MB")
    parser.add_argument("--alone", type=int, default=3, help="rounds of one request at a time")
    given = parser.parse_args()
    wrong = asyncio.run(measure(given.requests, parse_size("--memory", given.memory) or 0, given.alone))
    print(*wrong, sep="\n")
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
