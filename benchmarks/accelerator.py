"""The torch engine on an accelerator: whether its replies are right, and its speed relative to memory bandwidth.

    PYTHONPATH=src python3 benchmarks/accelerator.py --identity     every family against the library, fp32
    PYTHONPATH=src python3 benchmarks/accelerator.py --speed        random weights in the shapes of real models, bf16
    PYTHONPATH=src python3 benchmarks/accelerator.py --sampling     the same at batch 1 and 32: what sampling costs
    PYTHONPATH=src python3 benchmarks/accelerator.py --arrivals     requests that come and go
    PYTHONPATH=src python3 benchmarks/accelerator.py --bits 2000    the exact mode: replies alone, in batches, cut

Needs only torch and transformers. `--device cpu --tiny` runs the same code without an accelerator.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine
from palaver.engines.torch.library_engine import model_engine
from palaver.engines.torch.loader import quiet
from palaver.generation import Prompt, Step
from palaver.sampling import Sampling
from tests.engines import tiny

FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss", "mistral", "qwen3_moe", "phi3", "phi", "qwen2", "gpt2")
RECURRENT = ("qwen3_next", "lfm2", "mamba")
SHAPES: dict[str, dict[str, int]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LENGTH = 24
MARGIN = 1e-3
"""Two likeliest tokens whose logits are this close may swap by rounding."""


async def generate_ids(
    engine: TorchEngine, prompt: Prompt, sampling: Sampling, stop_after: int | None = None
) -> list[int]:
    ids: list[int] = []
    async with engine.generate(prompt, sampling) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                ids.append(output.token_id)
            if len(ids) == stop_after:
                break
    return ids


class Identity:
    """Compares one family's replies with the library's generate(), token by token."""

    def __init__(self, family: str, device: str) -> None:
        self.family = family
        self.device = device
        self.model = tiny.build(family).to(device)
        self.sampling = Sampling(temperature=0, max_tokens=LENGTH, banned_ids=(tiny.END,))
        self.close = 0
        self.steps = ""

    @torch.inference_mode()
    def library_ids(self, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=self.device)
        with quiet():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=LENGTH,
                do_sample=False,
                suppress_tokens=[tiny.END],
                pad_token_id=0,
                eos_token_id=None,
            )
        reply: list[int] = out[0, ids.shape[1] :].tolist()
        return reply

    @torch.inference_mode()
    def agree(self, prompt: Sequence[int], reply: list[int], expected: list[int]) -> bool:
        """Whether the replies are the same up to a token whose two likeliest choices are within the margin."""
        if reply == expected:
            return True
        first = next((i for i, (a, b) in enumerate(zip(reply, expected, strict=False)) if a != b), None)
        if first is None:
            return False
        ids = torch.tensor([[*prompt, *expected[:first]]], device=self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        logits[tiny.END] = -torch.inf
        best = logits.topk(2).values
        near = bool(best[0] - best[1] < MARGIN)
        self.close += near
        return near

    async def run(self) -> tuple[int, int]:
        """Replies compared, and how many differed."""
        rng = random.Random(1)
        prompts = [tuple(rng.randrange(256) for _ in range(rng.randint(1, 70))) for _ in range(8)]
        expected = [self.library_ids(prompt) for prompt in prompts]
        options = EngineOptions(cache_bytes=1 << 26, limits=SchedulerLimits(max_running=6, chunk_tokens=24))
        engine = model_engine(self.family, tiny.build(self.family).to(self.device), tiny.VOCABULARY, options)
        self.steps = engine.info.steps
        replies = [await generate_ids(engine, Prompt(prompt), self.sampling) for prompt in prompts[:3]]
        replies += await asyncio.gather(*(self._under_load(engine, p, i) for i, p in enumerate(prompts)))
        await engine.close()
        pairs = zip([*prompts[:3], *prompts], replies, [*expected[:3], *expected], strict=True)
        wrong = sum(not self.agree(prompt, reply, library) for prompt, reply, library in pairs)
        return len(replies), wrong

    async def _under_load(self, engine: TorchEngine, prompt: tuple[int, ...], number: int) -> list[int]:
        """In a changing batch: cancelled once, stopped and continued once."""
        await generate_ids(engine, Prompt(prompt, owner="other"), self.sampling, stop_after=number % 4)
        partial = await generate_ids(engine, Prompt(prompt), self.sampling, stop_after=5 + number)
        return partial + await generate_ids(engine, Prompt(prompt, tuple(partial)), self.sampling)


async def identity(device: str) -> int:
    failures = 0
    for family in (*FAMILIES, *RECURRENT):
        test = Identity(family, device)
        began = time.perf_counter()
        compared, wrong = await test.run()
        failures += wrong
        print(
            f"{family:12} {compared} replies, {wrong} differ, {test.close} within the margin"
            f" ({time.perf_counter() - began:.1f} s); {test.steps}",
            flush=True,
        )
    print("identical" if failures == 0 else f"{failures} replies differ")
    return failures


def bandwidth(device: str) -> float:
    """The read bandwidth of the device's memory, in bytes a second."""
    size = (1 << 32) if device == "cuda" else (1 << 26)
    data = torch.ones(size // 4, device=device)
    best = 0.0
    for _ in range(6):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(4):
            data.sum()
        _synchronize(device)
        best = max(best, 4 * size / (time.perf_counter() - began))
    return best


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def random_model(shape: dict[str, int], device: str, vocabulary: int) -> Any:
    config = transformers.Qwen3Config(
        **shape, vocab_size=vocabulary, max_position_embeddings=8192, tie_word_embeddings=False, eos_token_id=None
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device), quiet():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


SAMPLINGS = {
    "stored turn": Sampling(temperature=0.6, top_k=20, top_p=0.95, logprobs=5),
    "temperature 1": Sampling(temperature=1.0, logprobs=5),
}
"""The settings of a conversation, and the costliest: every token may be drawn."""
RARER = {
    "with penalties": Sampling(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, logprobs=5),
    "with XTC and DRY": Sampling(
        temperature=0.6, top_k=20, top_p=0.95, xtc_probability=0.5, dry_multiplier=0.8, logprobs=5
    ),
}
"""Penalties, which change the whole batch at once, and filters that the kernels leave to torch's operations."""
LOADS = ((1, 128), (1, 1024), (8, 1024), (32, 1024))
SAMPLING_LOADS = ((1, 1024), (32, 1024))
"""Batch sizes, each with the length of its prompts."""


class Speed:
    """One shape: tokens a second at some batch sizes, and their share of what the memory bandwidth allows."""

    def __init__(self, name: str, shape: dict[str, int], arguments: argparse.Namespace, limit: float) -> None:
        self.name = name
        self.arguments = arguments
        self.limit = limit
        self.size = 512 if arguments.tiny else 151936
        model = random_model(shape, arguments.device, self.size)
        embedding = model.get_input_embeddings().weight.numel()
        self.weights = sum(p.numel() for p in model.parameters()) - embedding
        self.token_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        began = time.perf_counter()
        self.engine = model_engine(
            name, model, [b"x"] * self.size, EngineOptions(fused=not arguments.library, exact=arguments.exact)
        )
        gc.freeze()  # as the engine's process does
        print(f"{name}: {self.weights / 1e9:.2f} G weights to read, {self.engine.info.reuse}", end="")
        print(f", {self.engine.info.steps}, ready after {time.perf_counter() - began:.1f} s", flush=True)

    async def run(self, batch: int, context: int, tokens: int) -> None:
        """Greedy, then with the settings of a stored turn, then unfiltered: each with its share of the greedy speed."""
        greedy = await self._run("greedy", Sampling(temperature=0), batch, context, tokens)
        for name, sampling in (SAMPLINGS | RARER if self.arguments.sampling else SAMPLINGS).items():
            rate = await self._run(name, sampling, batch, context, tokens)
            print(f"{'':11} {name}: {rate / greedy:.1%} of greedy", flush=True)

    async def _run(self, name: str, sampling: Sampling, batch: int, context: int, tokens: int) -> float:
        rng = random.Random(f"{batch} {name}")
        prompts = [Prompt(tuple(rng.randrange(1, self.size) for _ in range(context))) for _ in range(batch)]
        sampling = replace(sampling, max_tokens=tokens)
        began = time.perf_counter()
        await asyncio.gather(*(generate_ids(self.engine, p, Sampling(temperature=0, max_tokens=1)) for p in prompts))
        prefill = time.perf_counter() - began
        warm_up = replace(sampling, max_tokens=8)  # kernels are compiled for their settings when they first run
        await asyncio.gather(*(generate_ids(self.engine, p, warm_up) for p in prompts))
        before, began = self.engine.statistics, time.perf_counter()
        replies = await asyncio.gather(*(generate_ids(self.engine, p, sampling) for p in prompts))
        assert all(len(reply) == tokens for reply in replies), "nothing ends these replies"
        seconds, after = time.perf_counter() - began, self.engine.statistics
        rate = batch * tokens / seconds
        read = 2 * self.weights + batch * (context + tokens / 2) * self.token_bytes
        allowed = batch * self.limit / read
        forward = (after.forward_seconds - before.forward_seconds) / tokens
        print(
            f"{self.name:11} batch {batch:3} context {context:5} {name}: {rate:8.1f} tokens/s,"
            f" {rate / allowed:6.1%} of the memory's {allowed:8.0f}; {seconds / tokens * 1e3:6.2f} ms a step,"
            f" {forward * 1e3:6.2f} of it launching the model; prefill {batch * context / prefill:8.0f} tokens/s",
            flush=True,
        )
        return rate


async def generate_steps(
    engine: TorchEngine, prompt: Prompt, sampling: Sampling, stop_after: int | None = None
) -> list[tuple[int, float]]:
    """Token ids and log-probabilities."""
    steps: list[tuple[int, float]] = []
    async with engine.generate(prompt, sampling) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                steps.append((output.token_id, output.logprob))
            if len(steps) == stop_after:
                break
    return steps


class Arrivals:
    """Requests at random times, 25 a second for ten seconds, with prompts of 512 tokens and replies of 64 to 256."""

    def __init__(self, name: str, shape: dict[str, int], arguments: argparse.Namespace) -> None:
        self.name = name
        self.per_second, self.seconds, self.length = (4, 1, 32) if arguments.tiny else (25, 10, 512)
        self.size = 512 if arguments.tiny else 151936
        model = random_model(shape, arguments.device, self.size)
        self.engine = model_engine(name, model, [b"x"] * self.size, EngineOptions(exact=arguments.exact))
        self.rng = random.Random(name)
        self.running = self.most = 0
        self.first_tokens: list[float] = []

    async def run(self) -> None:
        replies = [self.rng.randint(64, 256) for _ in range(self.per_second * self.seconds)]
        starts, at = [], 0.0
        for _ in replies:
            at += self.rng.expovariate(self.per_second)
            starts.append(at)
        await asyncio.gather(*(self._one(0, 16) for _ in range(4)))  # warm-up
        self.first_tokens.clear()
        began, self.most = time.perf_counter(), 0
        await asyncio.gather(*(self._one(start, tokens) for start, tokens in zip(starts, replies, strict=True)))
        took = time.perf_counter() - began
        waits = sorted(self.first_tokens)
        median, late = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
        print(
            f"{self.name:11} {len(replies)} requests, {self.per_second} a second, at most {self.most} at once:"
            f" {sum(replies) / took:8.1f} tokens/s over {took:.1f} s, asked for {sum(replies) / starts[-1]:.0f};"
            f" first token {median * 1e3:.0f} ms, 99% {late * 1e3:.0f} ms; {self.engine.info.steps}",
            flush=True,
        )
        await self.engine.close()

    async def _one(self, start: float, tokens: int) -> None:
        await asyncio.sleep(start)
        prompt = Prompt(tuple(self.rng.randrange(1, self.size) for _ in range(self.length)))
        self.running += 1
        self.most = max(self.most, self.running)
        began, count = time.perf_counter(), 0
        async with self.engine.generate(prompt, replace(SAMPLINGS["stored turn"], max_tokens=tokens)) as outputs:
            async for output in outputs:
                count += isinstance(output, Step)
                if count == 1 and isinstance(output, Step):
                    self.first_tokens.append(time.perf_counter() - began)
        self.running -= 1
        assert count == tokens


class Bits:
    """The exact mode: ids and log-probabilities of replies alone, against the same in changing batches, stopped and
    continued with nothing cached, and with other chunk sizes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        shape = TINY if arguments.tiny else SHAPES["Qwen3-0.6B"]
        self.size = 512 if arguments.tiny else 151936
        model = random_model(shape, arguments.device, self.size)
        self.limits = (SchedulerLimits(chunk_tokens=1024), SchedulerLimits(chunk_tokens=200))
        self.engines = [
            model_engine(
                "bits", model, [b"x"] * self.size, EngineOptions(exact=True, limits=limits, cache_bytes=4 << 30)
            )
            for limits in self.limits
        ]
        self.cycles = arguments.bits
        self.done = self.wrong = 0

    async def run(self) -> int:
        print(f"{self.engines[0].info.steps}, {self.engines[0].info.exactness}", flush=True)
        rng = random.Random(5)
        number = 0
        while self.done < self.cycles:
            lengths = [rng.randint(1, 400) for _ in range(24)]
            prompts = [tuple(rng.randrange(1, self.size) for _ in range(length)) for length in lengths]
            settings = [
                Sampling(temperature=rng.choice([0.0, 0.6, 1.0]), top_k=rng.choice([0, 20]), seed=i, max_tokens=40)
                for i in range(len(prompts))
            ]
            pairs = list(zip(prompts, settings, strict=True))
            alone = [await generate_steps(self.engines[0], Prompt(p), s) for p, s in pairs]
            number += 1
            cut = await asyncio.gather(
                *(self._cut(p, s, random.Random(f"{number} {i}")) for i, (p, s) in enumerate(pairs))
            )
            self.wrong += sum(one != other for one, other in zip(alone, cut, strict=True))
            print(f"{self.done} stops and continues so far, {self.wrong} replies differ", flush=True)
        print(
            f"{self.done} stops and continues, {24 * number} replies: {self.wrong} differ in a token or a bit",
            flush=True,
        )
        for engine in self.engines:
            await engine.close()
        return self.wrong

    async def _cut(self, prompt: tuple[int, ...], sampling: Sampling, rng: random.Random) -> list[tuple[int, float]]:
        """Each part under another owner, so that everything is computed again."""
        steps: list[tuple[int, float]] = []
        while len(steps) < 40:
            ids = tuple(token_id for token_id, _ in steps)
            owner = f"{rng.random()}"
            left = replace(sampling, max_tokens=40)
            engine = rng.choice(self.engines)
            steps += await generate_steps(engine, Prompt(prompt, ids, owner=owner), left, rng.randint(1, 8))
            self.done += 1
        return steps[:40]


async def speed(arguments: argparse.Namespace) -> None:
    limit = bandwidth(arguments.device)
    print(f"memory read: {limit / 1e12:.2f} TB/s")
    shapes = {"tiny": TINY} if arguments.tiny else SHAPES
    for name, shape in shapes.items():
        test = Speed(name, shape, arguments, limit)
        for batch, context in SAMPLING_LOADS if arguments.sampling else LOADS:
            small = arguments.tiny
            await test.run(min(batch, 4) if small else batch, context // 16 if small else context, arguments.tokens)
        cache = test.engine.statistics.cache
        print(f"{name}: cache {cache.used_bytes / 1e9:.1f} GB of {cache.limit_bytes / 1e9:.1f} GB\n", flush=True)
        await test.engine.close()
        del test
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--identity", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--arrivals", action="store_true")
    parser.add_argument("--bits", type=int, default=0, metavar="CYCLES")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--library", action="store_true", help="the library's model code instead of the fused decoder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.device}", flush=True)
    chosen = arguments.identity or arguments.speed or arguments.sampling or arguments.arrivals or arguments.bits
    failures = await identity(arguments.device) if arguments.identity or not chosen else 0
    if arguments.speed or arguments.sampling or not chosen:
        await speed(arguments)
    if arguments.arrivals:
        for name, shape in ({"tiny": TINY} if arguments.tiny else SHAPES).items():
            await Arrivals(name, shape, arguments).run()
    if arguments.bits:
        failures += await Bits(arguments).run()
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
