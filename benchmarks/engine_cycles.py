"""Long runs: stop and continue under load, and many requests in bounded memory.

    python benchmarks/engine_cycles.py [--cycles 1000] [--requests 10000] [--exact] [--no-compile] [--dtype KIND]

Each reply is generated uncut first; then again, stopped at random points and continued, in a batch of such replies.
A token that differs is a mismatch unless the sampled number, or the two likeliest tokens, were within the margin.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, load
from palaver.generation import Prefilled, Prompt, Step
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.reference import reference

LENGTH = 40


@dataclass
class Tally:
    cycles: int = 0
    recomputed: int = 0
    """Prompt tokens that were computed again beyond the last one."""
    mismatches: int = 0
    close: int = 0


async def generate_ids(
    engine: TorchEngine, prompt: Prompt, sampling: Sampling, stop_after: int | None
) -> tuple[list[int], int]:
    """The tokens up to the stop, and how many prompt tokens had to be computed."""
    ids, computed = [], 0
    async with engine.generate(prompt, sampling) as outputs:
        async for output in outputs:
            match output:
                case Step():
                    ids.append(output.token_id)
                case Prefilled():
                    computed = output.prompt_tokens - output.cached_tokens
            if len(ids) == stop_after:
                break
    return ids, computed


def conversation(number: int) -> tuple[Prompt, Sampling]:
    rng = random.Random(number)
    prompt = Prompt(tuple(rng.randrange(256) for _ in range(rng.randint(1, 80))))
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.2]),
        top_p=rng.choice([1.0, 0.95]),
        repetition_penalty=rng.choice([1.0, 1.1]),
        seed=number,
        max_tokens=LENGTH,
        banned_ids=(tiny.END,),
    )
    return prompt, sampling


async def stop_and_continue(engine: TorchEngine, number: int, tally: Tally, uncut: list[int], model: Any) -> None:
    rng = random.Random(-number)
    prompt, sampling = conversation(number)
    reply: list[int] = []
    while len(reply) < LENGTH:
        continued = replace(prompt, reply_ids=tuple(reply))
        more, computed = await generate_ids(engine, continued, sampling, rng.randint(1, 8))
        if reply:
            tally.cycles += 1
            tally.recomputed += max(0, computed - 1)
        reply += more
    if reply != uncut:
        near = reference(model, prompt, sampling).agrees(reply)
        tally.close += near
        tally.mismatches += not near


async def cycles(engine: TorchEngine, count: int, model: Any) -> Tally:
    tally, number = Tally(), 0
    while tally.cycles < count:
        batch = range(number, number + 8)
        number += 8
        uncut = [(await generate_ids(engine, *conversation(i), None))[0] for i in batch]
        await asyncio.gather(*(stop_and_continue(engine, i, tally, uncut[i - batch[0]], model) for i in batch))
    return tally


async def requests(folder: Path, count: int) -> None:
    """Short requests, most of them new, some cancelled: the memory of cache and process must stay bounded."""
    engine = load(
        folder,
        vocabulary=tiny.VOCABULARY,
        options=EngineOptions(cache_bytes=1 << 22, limits=SchedulerLimits(max_running=8)),
    )
    rng = random.Random(5)
    highest, marks = 0, []

    async def one(number: int) -> None:
        prompt = Prompt(tuple(rng.randrange(256) for _ in range(rng.randint(1, 60))))
        await generate_ids(engine, prompt, Sampling(temperature=0, max_tokens=3), rng.choice([None, None, 1]))

    for start in range(0, count, 50):
        await asyncio.gather(*(one(i) for i in range(start, min(count, start + 50))))
        highest = max(highest, engine.statistics.cache.used_bytes)
        if start % max(50, count // 10) == 0:
            marks.append(resident())
    cache = engine.statistics.cache
    print(
        f"{count} requests: cache at most {highest / 1e6:.2f} MB of {cache.limit_bytes / 1e6:.2f} MB,"
        f" {cache.evictions} evictions; process MB: {' '.join(f'{mark:.0f}' for mark in marks)}"
    )
    await engine.close()


def resident() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="require or avoid compiled steps")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; by default what the engine picks for the device")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = tiny.make("qwen3", Path(name))
        options = EngineOptions(exact=arguments.exact, compiled=arguments.compile, threads=1)
        engine = load(folder, vocabulary=tiny.VOCABULARY, options=options, dtype=arguments.dtype)
        began = time.perf_counter()
        tally = await cycles(engine, arguments.cycles, tiny.build("qwen3"))
        await engine.close()
        print(
            f"{tally.cycles} stops and continues under load: {tally.mismatches} mismatches, {tally.close} replies"
            f" differ within the margin, {tally.recomputed} prompt tokens computed again beyond the last one"
            f" ({time.perf_counter() - began:.0f} s)"
        )
        await requests(folder, arguments.requests)
    return min(1, tally.mismatches + tally.recomputed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
