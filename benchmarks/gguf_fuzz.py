"""Loads GGUF files with damaged headers in the engine process.

    python -m benchmarks.gguf_fuzz --files 1000 [--engine compiled]

Each file is the embedded model with bytes of its header changed: counts, lengths, types, metadata, the vocabulary, the
shapes and places of tensors. Every file must end in one sentence or run, and nothing may hang. llama.cpp ends its
process at some of them: that costs one file, never this process. Exits with 1 if a file hangs or fails in another way,
if compiled steps end their process, or if an undamaged file does not run afterwards."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.errors import EngineError, ModelError, PalaverError
from palaver.formats.gguf_tokenizer import load_gguf_tokenizer
from palaver.generation import Prompt
from palaver.gguf import read_gguf
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from tests.engines.generate import run
from tests.gguf_files import convert_qwen3

PROMPT = Prompt((400, 500, 600, 700))
LIMIT_S = 120
"""After so many seconds a file counts as one that hangs."""
START = 2048
"""The first bytes of a header: counts, and the settings of the model."""
NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
RAN, REFUSED, DIED, HUNG, WRONG = "ran", "refused in one sentence", "the process ended: one sentence", "hung", "wrong"


def mutations(header_bytes: int, rng: random.Random) -> dict[int, bytes]:
    """One to four changes, by place: half of them at the start, some at the tensors, which the header ends with."""
    ends = ((0, START), (0, START), (0, header_bytes), (max(0, header_bytes - START), header_bytes))
    changes = {}
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(*rng.choice(ends))
        if rng.random() < 0.6:
            changes[place] = bytes([rng.randrange(256)])
        else:
            size = rng.choice((4, 8))
            changes[place] = (rng.choice(NUMBERS) & (256**size - 1)).to_bytes(size, "little")
    return changes


@dataclass
class Fuzz:
    whole: bytes
    header_bytes: int
    vocabulary: tuple[bytes, ...]
    folder: Path
    seed: int
    engine: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0

    async def work(self, worker: int, numbers: asyncio.Queue[int]) -> None:
        """Damages one file in place, file after file, so that only the changed bytes are written."""
        path = self.folder / f"damaged{worker}.gguf"
        path.write_bytes(self.whole)
        while not numbers.empty():
            number = numbers.get_nowait()
            changes = mutations(self.header_bytes, random.Random(self.seed * 1_000_003 + number))
            self._write(path, changes)
            began = time.perf_counter()
            outcome, sentence = await self._load(path)
            self.slowest = max(self.slowest, time.perf_counter() - began)
            self.outcomes[outcome] += 1
            if outcome in (HUNG, WRONG) or (outcome == DIED and self.engine == "compiled"):
                self.failures.append(f"number {number}: {sentence}")
            self._write(path, {place: self.whole[place : place + len(part)] for place, part in changes.items()})
            if sum(self.outcomes.values()) % 100 == 0:
                print(f"{sum(self.outcomes.values()):,}: {dict(self.outcomes)}", file=sys.stderr, flush=True)

    @staticmethod
    def _write(path: Path, changes: dict[int, bytes]) -> None:
        with path.open("r+b") as file:
            for place, part in changes.items():
                file.seek(place)
                file.write(part)

    async def _load(self, path: Path) -> tuple[str, str]:
        required = True if self.engine == "compiled" else None
        spec = EngineSpec(self.engine, path, self.vocabulary, compiled=required, context=128, max_running=1)
        engine = HostedEngine(spec)
        try:
            async with asyncio.timeout(LIMIT_S):
                await engine.start()
                await run(engine, PROMPT, Sampling(max_tokens=2))
            return RAN, ""
        except TimeoutError:
            return HUNG, f"no answer after {LIMIT_S} s"
        except PalaverError as error:
            if "\n" in str(error):
                return WRONG, str(error)
            ended = isinstance(error, EngineError) and not isinstance(error, ModelError)
            return (DIED if ended else REFUSED), str(error)
        except Exception as error:
            return WRONG, f"{type(error).__name__}: {error}"
        finally:
            await engine.close()


async def fuzz(files: int, seed: int, engine: str, workers: int, folder: Path) -> int:
    """The exit status."""
    whole = convert_qwen3(resolve_folder("sprout"), folder / "whole.gguf")
    header = read_gguf(whole)
    data = whole.read_bytes()
    vocabulary = tuple(load_gguf_tokenizer(header).vocabulary)
    found = Fuzz(data, len(data) - header.weights_bytes, vocabulary, folder, seed, engine)
    numbers: asyncio.Queue[int] = asyncio.Queue()
    for number in range(files):
        numbers.put_nowait(number)
    began = time.perf_counter()
    await asyncio.gather(*(found.work(worker, numbers) for worker in range(workers)))
    seconds = time.perf_counter() - began
    for outcome in (RAN, REFUSED, DIED, HUNG, WRONG):
        print(f"{outcome:32} {found.outcomes[outcome]:6,}")
    print(f"{files:,} files in {seconds:.0f} s; the slowest took {found.slowest:.1f} s")
    for failure in found.failures[:10]:
        print(failure)
    undamaged, sentence = await found._load(whole)
    print(f"the undamaged file: {undamaged} {sentence}")
    return 0 if not found.failures and undamaged == RAN else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("llamacpp", "compiled"), default="llamacpp")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.files, arguments.seed, arguments.engine, arguments.workers)
        sys.exit(asyncio.run(fuzz(*given, Path(folder))))


if __name__ == "__main__":
    main()
