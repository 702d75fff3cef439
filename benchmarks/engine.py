"""The speed of the torch engine on the CPU, as ratios measured in one run.

    python benchmarks/engine.py [--model FOLDER] [--threads N] [--quick] [--no-compile]

The default model is the embedded one if its weights exist, else random weights of the same shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

import palaver.models
from palaver.engines.host.process import environment
from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, load
from palaver.engines.torch.loader import quiet
from palaver.generation import Prefilled, Prompt, Step
from palaver.sampling import Sampling

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
CONTEXT = 64
TURN = 48
REPLY = 32
ROUNDS = 6
BATCHES = (1, 8, 32)
TURNS = (1, 2, 5, 20)
CONVERSATIONS = 15


@contextmanager
def model_folder(path: str | None) -> Iterator[Path]:
    """The given model, the embedded one, or random weights of its shape, all without an end-of-sequence token."""
    embedded = Path(palaver.models.__file__).parent / "sprout"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if path or (embedded / "model.safetensors").is_file():
            copy_endless(Path(path) if path else embedded, folder)
        else:
            torch.manual_seed(0)
            with quiet():
                config = transformers.Qwen3Config(**SHAPE)
                transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        yield folder


def copy_endless(source: Path, folder: Path) -> None:
    for path in [*source.glob("*.safetensors"), *source.glob("*.safetensors.index.json")]:
        (folder / path.name).symlink_to(path.resolve())
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            settings = json.loads((source / name).read_text())
            (folder / name).write_text(json.dumps(settings | {"eos_token_id": None}))


class Bench:
    def __init__(self, folder: Path, threads: int | None, tokens: int, compiled: bool | None = None) -> None:
        self.folder = folder
        self.threads = threads
        self.compiled = compiled
        self.tokens = tokens
        with quiet():
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.size = self.model.get_output_embeddings().weight.shape[0]
        self.greedy = Sampling(temperature=0, max_tokens=tokens)
        torch.set_num_threads(threads or 1)

    def engine(self, **options: Any) -> TorchEngine:
        vocabulary = [str(i).encode() for i in range(self.size)]
        return load(self.folder, vocabulary=vocabulary, options=self._options(**options))

    def _options(self, **options: Any) -> EngineOptions:
        return EngineOptions(threads=self.threads, compiled=self.compiled, **options)

    def prompt(self, seed: int, length: int = CONTEXT) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(2, self.size, (length,), generator=generator).tolist())

    @torch.inference_mode()
    def generate(self, batch: int) -> float:
        """Seconds a step of the library's generate()."""
        ids = torch.tensor([self.prompt(i) for i in range(batch)])

        def run(count: int) -> float:
            began = time.perf_counter()
            with quiet():
                self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                )
            return time.perf_counter() - began

        run(2)
        return (run(self.tokens) - run(1)) / (self.tokens - 1)

    @torch.inference_mode()
    def bare_loop(self, batch: int) -> float:
        """Seconds a forward pass of the library's model with its own cache, without a generation loop."""
        cache = transformers.DynamicCache(config=self.model.config)
        ids = torch.tensor([self.prompt(i) for i in range(batch)])
        token = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        began = time.perf_counter()
        for _ in range(self.tokens):
            token = self.model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        return (time.perf_counter() - began) / self.tokens


async def consume(engine: TorchEngine, prompt: Prompt, sampling: Sampling) -> tuple[list[float], int, list[int]]:
    """The arrival time of each token, the number of prompt tokens computed, and the tokens."""
    times, computed, ids = [], 0, []
    async with engine.generate(prompt, sampling) as outputs:
        async for output in outputs:
            match output:
                case Step():
                    times.append(time.perf_counter())
                    ids.append(output.token_id)
                case Prefilled():
                    computed = output.prompt_tokens - output.cached_tokens
    return times, computed, ids


@dataclass(frozen=True, order=True)
class StepTimes:
    """Seconds a step: wall time, and CPU time in the model, in the rest of the engine's thread, and in the event loop
    that receives the tokens."""

    seconds: float
    model: float
    rest: float
    loop: float


async def decode(bench: Bench, engine: TorchEngine, batch: int) -> StepTimes:
    prompts = [Prompt(bench.prompt(1000 + i)) for i in range(batch)]
    await asyncio.gather(*(consume(engine, prompt, bench.greedy) for prompt in prompts))
    before, loop = engine.statistics, time.thread_time()
    runs = await asyncio.gather(*(consume(engine, prompt, bench.greedy) for prompt in prompts))
    after, loop = engine.statistics, time.thread_time() - loop
    seconds = (max(t[-1] for t, _, _ in runs) - min(t[0] for t, _, _ in runs)) / (bench.tokens - 1)
    model = after.forward_seconds - before.forward_seconds
    rest = after.thread_seconds - before.thread_seconds - model
    return StepTimes(seconds, model / bench.tokens, rest / bench.tokens, loop / bench.tokens)


@dataclass
class Measurements:
    """Seconds a step, several times over."""

    generate: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    engine: list[StepTimes] = field(default_factory=list)


async def measure(bench: Bench) -> dict[int, Measurements]:
    """Measures everything in each of several rounds: other load on the machine affects all of it alike."""
    engine = bench.engine()
    measured = {batch: Measurements() for batch in BATCHES}
    for _ in range(ROUNDS):
        for batch, found in measured.items():
            found.engine.append(await decode(bench, engine, batch))
            found.generate.append(bench.generate(batch))
            found.bare.append(bench.bare_loop(batch))
    await engine.close()
    return measured


async def speed(bench: Bench) -> None:
    print(
        f"{'batch':>5} {'generate()':>11} {'bare loop':>10} {'engine':>8}   ms a step     x generate  x bare  tokens/s"
    )
    measured = await measure(bench)
    for batch, found in measured.items():
        generate, bare, ours = min(found.generate), min(found.bare), min(found.engine)
        print(
            f"{batch:5} {generate * 1e3:11.2f} {bare * 1e3:10.2f} {ours.seconds * 1e3:8.2f} {'':12}"
            f" {generate / ours.seconds:12.2f} {bare / ours.seconds:7.2f} {batch / ours.seconds:9.0f}"
        )
    one = min(measured[1].engine)
    print(
        f"batch 1, CPU time a step: model {one.model * 1e3:.2f} ms; scheduling and sampling {one.rest * 1e3:.2f} ms"
        f" = {one.rest / one.model:.1%}; handing over {one.loop * 1e3:.2f} ms = {one.loop / one.model:.1%}"
    )
    for batch in BATCHES[1:]:
        gain = batch * one.seconds / min(measured[batch].engine).seconds
        print(f"throughput of batch {batch} over batch 1: {gain:.2f}")


@dataclass
class TurnTimes:
    """Tokens of the prompt, those computed, and the seconds to the first token, with and without the cache."""

    prompt: int
    computed: int
    first: float
    uncached: float = 0.0


async def converse(bench: Bench, engine: TorchEngine, number: int) -> dict[int, TurnTimes]:
    """All turns of a conversation; those of TURNS a second time for an owner without cached tokens."""
    history: tuple[int, ...] = ()
    times_of: dict[int, TurnTimes] = {}
    for turn in range(1, TURNS[-1] + 1):
        history += bench.prompt(100 * number + turn, TURN)
        began = time.perf_counter()
        times, computed, ids = await consume(engine, Prompt(history), Sampling(temperature=0, max_tokens=REPLY))
        times_of[turn] = TurnTimes(len(history), computed, times[0] - began)
        if turn in TURNS:
            began = time.perf_counter()
            uncached = Prompt(history, owner=f"{number} {turn}")
            cold, _, _ = await consume(engine, uncached, Sampling(temperature=0, max_tokens=1))
            times_of[turn].uncached = cold[0] - began
        history += tuple(ids)
    return times_of


async def turns(bench: Bench) -> None:
    """Median time to the first token as a conversation grows, against computing the whole prompt."""
    engine = bench.engine()
    await converse(bench, engine, 0)  # warms up the machine
    conversations = [await converse(bench, engine, number) for number in range(1, CONVERSATIONS + 1)]
    found = {turn: [conversation[turn] for conversation in conversations] for turn in TURNS}
    print("turn  prompt  computed  first token ms  full prefill ms  ratio")
    firsts = {turn: statistics.median(t.first for t in seen) for turn, seen in found.items()}
    for turn, seen in found.items():
        full = statistics.median(t.uncached for t in seen)
        print(
            f"{turn:4} {seen[0].prompt:7} {seen[0].computed:9} {firsts[turn] * 1e3:15.1f} {full * 1e3:16.1f}"
            f" {full / firsts[turn]:6.1f}"
        )
    ratios = sorted(late.first / early.first for early, late in zip(found[2], found[20], strict=True))
    print(
        f"first token of turn 20 over that of turn 2: {firsts[20] / firsts[2]:.2f}"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f} in single conversations)"
    )
    prompts = sum(turn.prompt for conversation in conversations for turn in conversation.values())
    computed = sum(turn.computed for conversation in conversations for turn in conversation.values())
    print(f"reuse: {1 - computed / prompts:.1%} of the conversations' {prompts} prompt tokens were in the cache")
    cache = engine.statistics.cache
    print(f"memory: {cache.used_bytes / 1e6:.1f} MB of {cache.limit_bytes / 1e6:.0f} MB, {cache.evictions} evictions")
    await engine.close()


async def interference(bench: Bench) -> None:
    """How long running streams wait for a token while a long prompt is computed."""
    for chunk in (64, 256):
        engine = bench.engine(limits=SchedulerLimits(chunk_tokens=chunk))
        sampling = Sampling(temperature=0, max_tokens=200)
        streams = [asyncio.create_task(consume(engine, Prompt(bench.prompt(i)), sampling)) for i in range(4)]
        await asyncio.sleep(0.15)
        began = time.perf_counter()
        long, _, _ = await consume(engine, Prompt(bench.prompt(99, 3000)), Sampling(temperature=0, max_tokens=1))
        runs = await asyncio.gather(*streams)
        gaps = [(b - a, a) for times, _, _ in runs for a, b in pairwise(times)]
        during = [gap for gap, at in gaps if began < at < long[0]] or [0.0]
        outside = [gap for gap, at in gaps if not began < at < long[0]] or [0.0]
        print(
            f"chunk {chunk}: a 3000-token prompt took {long[0] - began:.2f} s; a token of 4 running streams took"
            f" {statistics.fmean(outside) * 1e3:.1f} ms, meanwhile {statistics.median(during) * 1e3:.1f}"
            f" (at most {max(during) * 1e3:.1f}) ms"
        )
        await engine.close()


async def cancels(bench: Bench) -> None:
    """From leaving a generation to everything being freed."""
    engine = bench.engine()
    waits = []
    for i in range(20):
        async with engine.generate(Prompt(bench.prompt(i)), bench.greedy) as outputs:
            for _ in range(5):
                await anext(outputs)
            began = time.perf_counter()
            outputs.stop()
            async for _ in outputs:
                pass
            waits.append(time.perf_counter() - began)
    print(f"cancel to freed: median {statistics.median(waits) * 1e3:.2f} ms, at most {max(waits) * 1e3:.2f} ms")
    await engine.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument(
        "--threads", type=int, help="of all; by default the engine picks its own, and the library has one"
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="require or avoid compiled steps")
    parser.add_argument("--only", choices=("speed", "turns", "interference", "cancels"))
    arguments = parser.parse_args()
    with model_folder(arguments.model) as folder:
        bench = Bench(folder, arguments.threads, 24 if arguments.quick else 100, arguments.compile)
        count = sum(p.numel() for p in bench.model.parameters())
        threads = "the engine's own" if arguments.threads is None else arguments.threads
        print(f"{bench.model.config.model_type}, {count / 1e6:.1f} M parameters, fp32, threads: {threads}")
        for part in (speed, turns, interference, cancels):
            if arguments.only in (None, part.__name__):
                print(f"\n{part.__name__}")
                await part(bench)


if __name__ == "__main__":
    if os.environ != environment():  # the environment of an engine process
        os.execve(sys.executable, sys.orig_argv, environment())
    sys.exit(asyncio.run(main()))
