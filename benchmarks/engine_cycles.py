"""Long runs: stop and continue under load with every engine, and many requests in bounded memory.

    python benchmarks/engine_cycles.py [--engine NAME ...] [--exact] [--device cpu] [--gguf q8_0] [--threads 0]
                                       [--cycles 1000] [--requests 10000]

Each reply of the embedded model is generated uncut first, alone; then again beside seven others, stopped at random
points and continued, sometimes without anything of it in the cache. A reply that differs is excused only if the choice
of its first token that differs was within twice the engine's rounding of another one; at most 0.5% of the replies, and
none if the engine's bits depend on the text alone (`tests/engines/cycles.py`). Engines that are not installed are
left out, and named; `vllm` needs $PALAVER_VLLM_PYTHON, the Python of its environment. If --engine names one, that is a
failure.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from palaver.engines.torch import EngineOptions, SchedulerLimits, load
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.cycles import Cycles, Tally, measure_rounding
from tests.engines.engine_cases import NAMES, EngineCases, missing
from tests.engines.generate import run
from tests.gguf_files import FILE_TYPES


async def cycles(name: str, exact: bool, count: int, cases: EngineCases) -> list[str]:
    """Returns what the engine did wrong."""
    engine = cases.load(name, exact)
    began = time.perf_counter()
    tally = await Cycles(engine, cases, Tally(await measure_rounding(engine, cases))).run(count)
    await engine.close()
    print(
        f"{name}{' --exact' if exact else ''} (bits {engine.info.exactness}): {tally}"
        f" ({time.perf_counter() - began:.0f} s)",
        flush=True,
    )
    failures = tally.failures(engine.info.exactness)
    return [*failures, *([f"{tally.recomputed} cached tokens were computed again"] if tally.recomputed else [])]


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
        await run(engine, prompt, Sampling(temperature=0, max_tokens=3), stop_after=rng.choice([None, None, 1]))

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
    parser.add_argument("--engine", nargs="+", choices=NAMES)
    parser.add_argument("--exact", action="store_true", help="in the exact mode")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gguf", default="f32", choices=FILE_TYPES, help="the weights of llama.cpp's GGUF file")
    parser.add_argument("--threads", type=int, default=1, help="0: each engine decides itself")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000, help="0 leaves them out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = EngineCases(folder, arguments.device, arguments.gguf, arguments.threads or None)
        for engine in arguments.engine or NAMES:
            if reason := missing(engine):
                print(f"left out: {engine}: {reason}", flush=True)
                failures += [f"{engine}: {reason}"] if arguments.engine else []
                continue
            failures += [
                f"{engine}: {failure}" for failure in await cycles(engine, arguments.exact, arguments.cycles, cases)
            ]
        if arguments.requests:
            await requests(tiny.make("qwen3", folder / "tiny"), arguments.requests)
    print(*failures, sep="\n")
    return min(1, len(failures))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
