"""Replicas on a Ray cluster, in a network namespace that has only the loopback.

    python -m benchmarks.cluster --overhead              one replica of sprout beside the same engine without Ray
    python -m benchmarks.cluster --scaling               two replicas beside one: scripted, 2 ms a token, 8 slots
    python -m benchmarks.cluster --affinity              20 turns over 4 replicas of sprout, one of which is killed
    python -m benchmarks.cluster --kills 12              two fronts on PostgreSQL, two replicas, 16 streams:
                                                         a replica, a front, Ray's controller, PostgreSQL, in turn

Needs Ray, `unshare` and `ip`; --kills needs PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from palaver.chat.deployment import EngineDeployment, bind_replicas, build
from palaver.chat.engine_spec import LoadOptions
from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.model_loader import ModelLoader
from palaver.chat.model_pool import ModelPool
from palaver.chat.reply_stream import ReplyRequest
from palaver.chat.service import Service
from palaver.engines.base import Engine
from palaver.engines.cluster.engine import NAMESPACE
from palaver.engines.cluster.replica import LoadEngine
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine, ReportProgress
from palaver.errors import PalaverError
from palaver.events import Finished
from palaver.generation import Prompt, Step
from palaver.messages import user
from palaver.sampling import Sampling
from palaver.store import ReplyStatus, open_store
from tests.chat.scripted_service import TOKENIZER
from tests.chat.scripted_service import model as scripted_model
from tests.engines.cluster_engines import PACE_S, SCRIPT, SLOTS, converse, load_paced, load_with_slots
from tests.engines.test_cluster import LOOPBACK_ONLY
from tests.store.postgres import restart_server, running_server, server_binaries

INSIDE = "PALAVER_BENCHMARK_NAMESPACE"
STREAMS = 16
READ_S = 120.0
KINDS = ("replica", "front", "controller", "database")
_CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=8, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def deploy(name: str, replicas: int, load: LoadEngine | None = None) -> None:
    """`load`: of a scripted engine. Otherwise the name is that of the model."""
    from ray import serve

    settings = EngineDeployment(model=name, min_replicas=replicas, max_replicas=replicas, cpus=0.5, slots=SLOTS)
    serve.run(build(settings) if load is None else bind_replicas(settings, load), name=name, route_prefix=None)


def no_report(fraction: float | None, note: str) -> None: ...


def processes(title: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if title in " ".join(one.info["cmdline"] or ())]


@asynccontextmanager
async def hosted(application: str) -> AsyncIterator[HostedEngine]:
    """An application as a front has it: by a process that is connected to the cluster."""
    spec = EngineSpec("ray", Path(), tuple(TOKENIZER.vocabulary), address=f"ray://auto/{application}")
    async with HostedEngine(spec) as engine:
        yield engine


# overhead and scaling


async def stream(engine: Engine, prompt: Prompt, sampling: Sampling) -> tuple[float, int]:
    """Seconds to the first token, and the tokens."""
    begun, first, tokens = time.perf_counter(), 0.0, 0
    async with engine.generate(prompt, sampling) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                first = first or time.perf_counter() - begun
                tokens += 1
    return first, tokens


async def measure(engine: Engine, prompts: list[Prompt], sampling: Sampling) -> tuple[float, float]:
    """Tokens a second of all prompts at once, and the median of the first token of each alone, in milliseconds."""
    firsts = [(await stream(engine, prompt, Sampling(temperature=0, max_tokens=4)))[0] for prompt in prompts]
    begun = time.perf_counter()
    found = await asyncio.gather(*(stream(engine, prompt, sampling) for prompt in prompts))
    seconds = time.perf_counter() - begun
    return sum(tokens for _, tokens in found) / seconds, statistics.median(firsts) * 1e3


async def overhead(rounds: int) -> None:
    here = await ModelLoader(LoadOptions()).load("sprout", no_report)
    there = await ModelLoader(LoadOptions(engine="ray://auto")).load("sprout", no_report)
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=200)
    requests = [
        ReplyRequest((user(f"Write a long story about the number {n}."),), sampling, conversation=f"{n}")
        for n in range(8)
    ]
    prompts = [here.prompt(request) for request in requests]
    figures: dict[str, list[tuple[float, float]]] = {"without Ray": [], "by Ray": []}
    for _ in range(rounds):
        for name, model in zip(figures, (here, there), strict=True):
            figures[name].append(await measure(model.engine, prompts, sampling))
    for name, found in figures.items():
        pace, first = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"  {name:12} {pace:7.0f} tokens/s in 8 streams, first token {first:5.1f} ms")
    one, two = (statistics.median(pace for pace, _ in found) for found in figures.values())
    print(f"  kept {two / one:.1%}")
    await here.engine.close()
    await there.engine.close()


async def scaling(seconds: float) -> None:
    """Workers that ask again and again, each time in another conversation; only tokens after a second count."""
    paces = {}
    for application in ("one", "two"):
        async with hosted(application) as engine:
            begun, tokens, numbers = time.perf_counter(), 0, itertools.count()

            async def work(engine: HostedEngine, begun: float, numbers: Iterator[int]) -> None:
                nonlocal tokens
                while time.perf_counter() - begun < seconds + 1:
                    prompt = Prompt((1, 2, 3), conversation=f"conversation {next(numbers)}")
                    async with engine.generate(prompt, Sampling(temperature=0, max_tokens=200)) as outputs:
                        async for output in outputs:
                            tokens += isinstance(output, Step) and 1 < time.perf_counter() - begun < seconds + 1

            await asyncio.gather(*(work(engine, begun, numbers) for _ in range(4 * SLOTS)))
            paces[application] = tokens / seconds
            print(f"  {application}: {paces[application]:7.0f} tokens/s, of {SLOTS / PACE_S:.0f} a replica")
    print(f"  two are {paces['two'] / paces['one']:.2f} times one")


# affinity


async def affinity() -> None:
    model = await ModelLoader(LoadOptions(engine="ray://auto")).load("sprout", no_report)

    def kill_home(turn: int) -> None:
        if turn == 19:
            home = max(processes("ray::ServeReplica:sprout:"), key=lambda one: sum(one.children()[0].cpu_times()[:2]))
            home.kill()

    usage = await converse(model, 24, kill_home, "You are a friendly helper who knows a lot about numbers. " * 30)
    print("  turn by turn:", *(f"{one.cached_tokens}/{one.prompt_tokens}" for one in usage))
    for name, turns in (("20 turns", usage[1:20]), ("after a death, from its second turn on", usage[21:])):
        prompt, cached = sum(one.prompt_tokens for one in turns), sum(one.cached_tokens for one in turns)
        print(f"  {name}: {cached} of {prompt} prompt tokens from the cache ({cached / prompt:.1%})")
    await model.engine.close()


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


def run_front(folder: Path, database: str, commands: Connection) -> None:
    async def serve() -> None:
        async with front(folder, database) as (_, chat):
            while count := await asyncio.to_thread(commands.recv):
                commands.send(await ask(chat, count))

    asyncio.run(serve())


class OtherFront:
    """A front in another process, which can be killed."""

    def __init__(self, folder: Path, database: str) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=run_front, args=(folder, database, theirs))
        self._process.start()

    async def ask(self, count: int) -> list[tuple[str, str]]:
        self._pipe.send(count)
        answer: list[tuple[str, str]] = await asyncio.to_thread(self._pipe.recv)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


async def kills(count: int, seed: int, only: str | None) -> None:
    binaries = server_binaries()
    if binaries is None:
        print("PostgreSQL is not installed: not shown")
        return
    chance, done, wrong, continued, begun = random.Random(seed), 0, [], 0, time.monotonic()
    with running_server(binaries, fsync=True) as url, tempfile.TemporaryDirectory() as name:
        folder, database = Path(name), url.render_as_string()
        with open_store(folder, database):
            pass
        other = OtherFront(folder, database)
        async with front(folder, database) as (_, chat):
            for number in range(count):
                kind = only or KINDS[number % len(KINDS)]
                sent = [*await other.ask(STREAMS // 2), *await ask(chat, STREAMS // 2)]
                await asyncio.sleep(chance.uniform(0.1, 2.5))
                kill: dict[str, Callable[[], object]] = {
                    "replica": lambda: chance.choice(processes("ray::ServeReplica:scripted:")).kill(),
                    "front": other.kill,
                    "controller": lambda: processes("ray::ServeController")[0].kill(),
                    "database": lambda: restart_server(url),
                }
                await asyncio.to_thread(kill[kind])
                for message, reply in sent:
                    found, again = await finish(chat, message, reply)
                    wrong += found
                    continued += again
                done += 1
                print(f"  {done} ({kind}): {len(wrong)} wrong, {continued} continued by the client", flush=True)
                if kind == "front":
                    other = OtherFront(folder, database)
        other.kill()
    print(f"{done} kills with {done * STREAMS} replies in {time.monotonic() - begun:.0f} s: {len(wrong)} wrong")
    for line in wrong[:10]:
        print(f"  {line}")


async def finish(chat: Chat, message: str, reply: str) -> tuple[list[str], int]:
    """Reads a reply to its end as a client does: by number, again after an error. Returns what is wrong."""
    last, again, begun, stored, ended = 0, 0, time.monotonic(), None, None
    while time.monotonic() - begun < READ_S:
        with suppress(PalaverError):
            async with chat.events(reply, last) as events:
                async for entry in events:
                    last = max(last, entry.number)
                    ended = entry.event
            stored = (await chat.message(reply)).reply
            if isinstance(ended, Finished) and stored is not None and stored.status is ReplyStatus.DONE:
                ids = [token.token_id for token in await chat.tokens(reply)]
                lost = [] if (await chat.message(message)).text == "Hello" else [f"message {message} is lost"]
                return [*lost, *([] if ids == SCRIPT else [f"reply {reply} is not the uncut one"])], again
            if stored is not None and stored.status is not ReplyStatus.RUNNING:
                await chat.continue_reply(reply)
                again += 1
        await asyncio.sleep(0.2)
    return [f"reply {reply} did not end: {stored}, {ended}"], again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("overhead", "scaling", "affinity"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="with --kills: what is killed each time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if INSIDE not in os.environ:
        if shutil.which("unshare") is None:
            sys.exit("unshare is not installed")
        variables = {INSIDE: "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
        command = [*LOOPBACK_ONLY, sys.executable, "-m", "benchmarks.cluster", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | variables).returncode)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with ray_cluster():
        if given.overhead:
            deploy("sprout", 1)
            asyncio.run(overhead(given.rounds))
        if given.scaling:
            deploy("one", 1, load_with_slots)
            deploy("two", 2, load_with_slots)
            asyncio.run(scaling(given.seconds))
        if given.affinity:
            deploy("sprout", 4)
            asyncio.run(affinity())
        if given.kills:
            deploy("scripted", 2, load_paced)
            asyncio.run(kills(given.kills, given.seed, given.only))


if __name__ == "__main__":
    main()
