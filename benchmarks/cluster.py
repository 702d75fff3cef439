"""Replicas on a Ray cluster, in a network namespace that has only the loopback.

    python -m benchmarks.cluster --overhead              one replica of sprout beside the same engine without Ray
    python -m benchmarks.cluster --scaling               two replicas beside one: scripted, 2 ms a token, 8 slots
    python -m benchmarks.cluster --affinity              20 turns over 4 replicas of sprout, one of which is killed
    python -m benchmarks.cluster --autoscaling           scripted replicas: the load rises, and falls
    python -m benchmarks.cluster --kills 12              two fronts on PostgreSQL, two replicas, 16 streams:
                                                         a replica, a front, Ray's controller, PostgreSQL, in turn
    python -m benchmarks.cluster --rolling 2             every front and every replica is replaced under load, twice

Needs Ray, `unshare` and `ip`; --kills and --rolling need PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cluster_faults import KINDS, kills, processes, rolling
from palaver.chat.deployment import EngineDeployment, bind_replicas, build
from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model_loader import ModelLoader
from palaver.chat.reply_stream import ReplyRequest
from palaver.engines.base import Engine
from palaver.engines.cluster.engine import NAMESPACE, running_replicas
from palaver.engines.cluster.replica import LoadEngine
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.generation import Prompt, Step
from palaver.messages import user
from palaver.sampling import Sampling
from tests.chat.scripted_service import TOKENIZER
from tests.engines.cluster_engines import PACE_S, SCRIPT, SLOTS, converse, load_paced, load_with_slots
from tests.engines.test_cluster import LOOPBACK_ONLY

INSIDE = "PALAVER_BENCHMARK_NAMESPACE"


@contextmanager
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=8, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def deploy(name: str, replicas: int, load: LoadEngine | None = None, **more: Any) -> None:
    """`load`: of a scripted engine. Otherwise the name is that of the model. `more`: other settings."""
    from ray import serve

    values = {"min_replicas": replicas, "max_replicas": replicas, "cpus": 0.5, "slots": SLOTS, **more}
    settings = EngineDeployment(model=name, **values)
    serve.run(build(settings) if load is None else bind_replicas(settings, load), name=name, route_prefix=None)


def no_report(fraction: float | None, note: str) -> None: ...


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


async def measure(engine: Engine, prompts: list[Prompt], sampling: Sampling, seconds: float) -> tuple[float, float]:
    """Tokens a second of as many streams as there are prompts, each of which asks again and again, and the median of
    the first token of each prompt alone, in milliseconds. Without `seconds` each asks once, all at the same moment."""
    firsts = [(await stream(engine, prompt, Sampling(temperature=0, max_tokens=4)))[0] for prompt in prompts]
    begun, tokens = time.perf_counter(), 0

    async def work(prompt: Prompt) -> None:
        nonlocal tokens
        while True:
            async with engine.generate(prompt, sampling) as outputs:
                async for output in outputs:
                    tokens += isinstance(output, Step)
                    if seconds and time.perf_counter() - begun > seconds:
                        return
            if not seconds:
                return

    await asyncio.gather(*map(work, prompts))
    return tokens / (time.perf_counter() - begun), statistics.median(firsts) * 1e3


async def overhead(rounds: int) -> None:
    here = await ModelLoader(LoadOptions()).load("sprout", no_report)
    there = await ModelLoader(LoadOptions(engine="ray://auto")).load("sprout", no_report)
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=200)
    requests = [
        ReplyRequest((user(f"Write a long story about the number {n}."),), sampling, conversation=f"{n}")
        for n in range(8)
    ]
    prompts = [here.prompt(request) for request in requests]
    print("sprout, replies of 200 tokens again and again")
    await compare(here.engine, there.engine, prompts, replace(sampling, min_tokens=200), rounds, seconds=4)
    print("sprout, its short replies, all at the same moment")
    await compare(here.engine, there.engine, prompts, sampling, rounds)
    await here.engine.close()
    await there.engine.close()
    print(f"scripted, {PACE_S * 1e3:g} ms a token")
    prompts = [Prompt((1, 2, 3), conversation=f"{n}") for n in range(8)]
    paced, _ = await load_paced()
    async with hosted("paced") as engine:
        await compare(paced, engine, prompts, Sampling(temperature=0, max_tokens=len(SCRIPT)), rounds)


async def compare(
    here: Engine, there: Engine, prompts: list[Prompt], sampling: Sampling, rounds: int, seconds: float = 0
) -> None:
    figures: dict[str, list[tuple[float, float]]] = {"without Ray": [], "by Ray": []}
    for _ in range(rounds):
        for found, engine in zip(figures.values(), (here, there), strict=True):
            found.append(await measure(engine, prompts, sampling, seconds))
    for name, found in figures.items():
        pace, first = (statistics.median(column) for column in zip(*found, strict=True))
        every = " ".join(f"{pace:.0f}" for pace, _ in found)
        print(f"  {name:12} {pace:7.0f} tokens/s in 8 streams ({every}), first token {first:5.1f} ms")
    without, by_ray = ([statistics.median(column) for column in zip(*found, strict=True)] for found in figures.values())
    print(f"  kept {by_ray[0] / without[0]:.1%}, first token {by_ray[1] - without[1]:+.1f} ms")


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


# autoscaling


async def autoscaling(seconds: float) -> None:
    """More conversations than one replica has slots for, then a single one. Prints how many replicas run."""
    async with hosted("scaled") as engine:
        begun, tokens, wrong, most = time.monotonic(), 0, 0, 0
        busy = asyncio.Event()
        busy.set()

        async def work(number: int) -> None:
            nonlocal tokens, wrong
            while busy.is_set() or (number == 0 and not idle.is_set()):
                prompt = Prompt((1, 2, 3), conversation=f"conversation {number} {time.monotonic()}")
                ids = []
                async with engine.generate(prompt, Sampling(temperature=0)) as outputs:
                    async for output in outputs:
                        if isinstance(output, Step):
                            ids.append(output.token_id)
                tokens += len(ids)
                wrong += ids != SCRIPT

        idle = asyncio.Event()
        working = [asyncio.create_task(work(number)) for number in range(3 * SLOTS)]
        last = 0
        while time.monotonic() - begun < seconds:
            running = await asyncio.to_thread(running_replicas, "scaled")
            if running != last:
                load = 3 * SLOTS if busy.is_set() else 1
                print(f"  {time.monotonic() - begun:5.0f} s: {running} replicas, {load} streams", flush=True)
            last, most = running, max(most, running)
            if busy.is_set() and (running == 3 or time.monotonic() - begun > seconds / 2):
                busy.clear()
            if not busy.is_set() and running == 1:
                break
            await asyncio.sleep(0.5)
        idle.set()
        await asyncio.gather(*working)
    print(f"  from 1 to {most} and back to {last} replicas, {tokens} tokens, {wrong} replies not the uncut ones")


async def replace_replicas(number: int) -> None:
    """Another size of the cache is another version of the engine: Ray starts new replicas, and drains the old ones."""
    await asyncio.to_thread(deploy, "sprout", 2, options={"cache_bytes": (number + 2) << 28})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("overhead", "scaling", "affinity", "autoscaling"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--rolling", type=int, default=0, metavar="ROUNDS")
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
            deploy("paced", 1, load_paced)
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
        if given.autoscaling:
            deploy("scaled", 1, load_with_slots, max_replicas=3, upscale_seconds=2.0, downscale_seconds=5.0)
            asyncio.run(autoscaling(given.seconds))
        if given.rolling:
            deploy("sprout", 2)
            asyncio.run(rolling(given.rolling, replace_replicas))


if __name__ == "__main__":
    main()
