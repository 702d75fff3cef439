"""The torch engine on an accelerator: whether its replies are right, and its speed relative to memory bandwidth.

    PYTHONPATH=src python3 benchmarks/accelerator.py --identity     every family against the library, fp32
    PYTHONPATH=src python3 benchmarks/accelerator.py --kernels      families that our kernels run, in bf16
    PYTHONPATH=src python3 benchmarks/accelerator.py --speed        random weights in the shapes of real models, bf16
    PYTHONPATH=src python3 benchmarks/accelerator.py --speed --shape Gemma-3-4b --library
    PYTHONPATH=src python3 benchmarks/accelerator.py --sampling     the same at batch 1 and 32: what sampling costs
    PYTHONPATH=src python3 benchmarks/accelerator.py --arrivals     requests that come and go
    PYTHONPATH=src python3 benchmarks/accelerator.py --bits 2000    the exact mode: replies alone, in batches, cut
    PYTHONPATH=src python3 benchmarks/accelerator.py --drafts       with drafts over without, of a model, too
    PYTHONPATH=src python3 benchmarks/accelerator.py --search       the quickest tiles of products, for the next start
    PYTHONPATH=src python3 benchmarks/accelerator.py --prompts      prompts with quantised weights, packed and unpacked

Needs only torch and transformers. `--device cpu --tiny` runs the same code without an accelerator.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from palaver.constraints import Constraint, Grammar
from palaver.engines.core.draft_model import RunnerDraftModel
from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, load
from palaver.engines.torch.library_engine import model_engine
from palaver.engines.torch.loader import quiet
from palaver.generation import Prompt, Step
from palaver.memory import collect_seldom
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.quantized_files import FORMATS, store_tensors

FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss", "mistral", "qwen3_moe", "phi3", "phi", "qwen2", "gpt2")
RECURRENT = ("qwen3_next", "lfm2", "mamba")
KERNEL_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "phi3")
KERNEL_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "initializer_range": 0.1,
}
SHAPES: dict[str, dict[str, Any]] = {
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
    "Qwen3-30B-A3B": {
        "config": "Qwen3MoeConfig",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "config": "GptOssConfig",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "Gemma-3-4b": {
        "config": "Gemma3TextConfig",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
    },
    "Qwen3.5-4B": {
        "config": "Qwen3_5TextConfig",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
DEFAULT_SHAPES = ("Qwen3-0.6B", "Qwen3-8B")
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
"""Two likely tokens whose logits are this close may swap by rounding."""
NARROW_MARGIN = 0.03
"""The same in bfloat16, relative to the greatest logit: some units in the last place, after several layers."""


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

    def __init__(self, family: str, device: str, kernels: bool) -> None:
        """`kernels`: in bfloat16, in sizes that our kernels run; the library computes the same weights in float32."""
        self.family = family
        self.device = device
        self.kernels = kernels
        self.model = self.build().float()
        self.banned = [tiny.END, *range(tiny.SIZE, KERNEL_SIZES["vocab_size"] if kernels else 0)]
        self.sampling = Sampling(temperature=0, max_tokens=LENGTH, banned_ids=tuple(self.banned))
        self.close = 0
        self.steps = ""

    def build(self) -> Any:
        sizes = KERNEL_SIZES if self.kernels else {}
        return tiny.build(self.family, **sizes).to(self.device, torch.bfloat16 if self.kernels else torch.float32)

    @torch.inference_mode()
    def library_ids(self, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=self.device)
        with quiet():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=LENGTH,
                do_sample=False,
                suppress_tokens=self.banned,
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
        margin = NARROW_MARGIN * float(logits.abs().max()) if self.kernels else MARGIN
        logits[self.banned] = -torch.inf
        near = bool(logits.max() - logits[reply[first]] < margin)
        self.close += near
        return near

    async def run(self) -> tuple[int, int]:
        """Replies compared, and how many differed."""
        rng = random.Random(1)
        prompts = [tuple(rng.randrange(256) for _ in range(rng.randint(1, 70))) for _ in range(8)]
        expected = [self.library_ids(prompt) for prompt in prompts]
        options = EngineOptions(cache_bytes=1 << 26, limits=SchedulerLimits(max_running=6, chunk_tokens=24))
        vocabulary = [*tiny.VOCABULARY, *(b"x" for _ in self.banned[1:])]
        engine = model_engine(self.family, self.build(), vocabulary, options)
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


async def identity(device: str, kernels: bool) -> int:
    failures = 0
    for family in KERNEL_FAMILIES if kernels else (*FAMILIES, *RECURRENT):
        test = Identity(family, device, kernels)
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


def random_model(shape: dict[str, Any], device: str, vocabulary: int) -> Any:
    config = getattr(transformers, shape.get("config", "Qwen3Config"))(
        **{name: value for name, value in shape.items() if name != "config"},
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=None,
        eos_token_id=None,
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device), quiet():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.mul_(5)  # otherwise rounding decides between experts
    return model


def quantized_engine(model: Any, form: str, vocabulary: list[bytes], options: EngineOptions) -> tuple[TorchEngine, int]:
    """The engine of a checkpoint of the model in a quantised format, and the bytes of the weights that a step reads."""
    with tempfile.TemporaryDirectory() as folder:
        stored: dict[str, Any] = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                found, _ = store_tensors({name: parameter.data}, form)
                stored |= {key: tensor.cpu().contiguous() for key, tensor in found.items()}
        settings = model.config.to_dict() | {"quantization_config": FORMATS[form][1]}
        Path(folder, "config.json").write_text(json.dumps(settings))
        save_file(stored, Path(folder, "model.safetensors"))
        device = str(next(model.parameters()).device)
        model.to("meta")  # makes room
        read = sum(tensor.nbytes for name, tensor in stored.items() if "embed_tokens" not in name)
        return load(folder, vocabulary=vocabulary, device=device, options=options), read


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
    "top_p alone": Sampling(temperature=1.0, top_p=0.9, logprobs=5),
    "every filter": Sampling(
        temperature=1.0,
        dynatemp_range=0.3,
        typical_p=0.95,
        top_p=0.95,
        min_p=0.02,
        top_a=0.1,
        xtc_probability=0.5,
        logprobs=5,
    ),
    "with a grammar": Sampling(
        temperature=0.6, top_k=20, top_p=0.95, logprobs=5, constraint=Constraint(Grammar.REGEX, "x*")
    ),
}
"""Penalties, filters over the whole vocabulary, and masks that change from token to token."""
LOADS = ((1, 128), (1, 1024), (8, 1024), (32, 1024))
SAMPLING_LOADS = ((1, 1024), (32, 1024))
"""Batch sizes, each with the length of its prompts."""


class Pauses:
    """What else than computing happens in a run: the longest step of the scheduler, collections of Python's garbage,
    kernels that are compiled, and memory that is asked of the device."""

    def __init__(self, engine: TorchEngine) -> None:
        self._scheduler: Any = engine._scheduler
        self._step = self._scheduler.step
        self.steps: list[float] = []
        self.collections: list[float] = []
        self._collecting = 0.0
        self.compiled = 0
        self._segments = _segments()

    def __enter__(self) -> Pauses:
        self._scheduler.step = self._timed_step
        gc.callbacks.append(self._collected)
        _set_compile_hook(self._compiled)
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.step = self._step
        gc.callbacks.remove(self._collected)
        _set_compile_hook(None)

    def _timed_step(self) -> None:
        began = time.perf_counter()
        self._step()
        self.steps.append(time.perf_counter() - began)

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self.collections.append(time.perf_counter() - self._collecting)

    def _compiled(self, *_: object, **__: object) -> None:
        self.compiled += 1

    def __str__(self) -> str:
        steps = sorted(self.steps)
        usual = steps[len(steps) // 2] if steps else 0.0
        longer = sum(step - usual for step in steps if step > 1.5 * usual)
        return (
            f"{len(steps)} steps, half of them up to {usual * 1e3:.2f} ms, all {max(steps, default=0) * 1e3:.1f} ms,"
            f" long ones {longer * 1e3:.0f} ms more than others; {len(self.collections)} collections of at most"
            f" {max(self.collections, default=0) * 1e3:.1f} ms, {self.compiled} kernels compiled,"
            f" {_segments() - self._segments} allocations on the device"
        )


def _segments() -> int:
    """How often memory was asked of the device so far."""
    if not torch.cuda.is_available():
        return 0
    count: int = torch.cuda.memory_stats().get("segment.all.allocated", 0)
    return count


def _set_compile_hook(hook: Any) -> None:
    """Called after each kernel that Triton compiles or reads from its files."""
    if torch.cuda.is_available():
        import triton

        triton.knobs.runtime.jit_post_compile_hook = hook


class Speed:
    """One shape: tokens a second at some batch sizes, and their share of what the memory bandwidth allows."""

    def __init__(self, name: str, shape: dict[str, Any], arguments: argparse.Namespace, limit: float) -> None:
        self.name = name
        self.arguments = arguments
        self.limit = limit
        self.size = 512 if arguments.tiny else 151936
        model = random_model(shape, arguments.device, self.size)
        embedding = model.get_input_embeddings().weight.numel()
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.experts = sum(size for name, size in sizes.items() if ".experts." in name)
        self.weights = sum(sizes.values()) - embedding - self.experts
        experts = shape.get("num_experts", shape.get("num_local_experts", 1))
        self.missed = 1 - shape.get("num_experts_per_tok", 1) / experts
        """The share of a layer's experts that a token doesn't take."""
        recurrent = getattr(model.config, "layer_types", []).count("linear_attention")
        attention = shape["num_hidden_layers"] - recurrent
        self.token_bytes = 4 * attention * shape["num_key_value_heads"] * shape["head_dim"]
        self.weight_bytes = 2 * self.weights
        began = time.perf_counter()
        options = EngineOptions(fused=not arguments.library, exact=arguments.exact)
        if arguments.weights is None:
            self.engine = model_engine(name, model, [b"x"] * self.size, options)
        else:
            self.engine, self.weight_bytes = quantized_engine(model, arguments.weights, [b"x"] * self.size, options)
            del model
        collect_seldom()  # as the engine's process does
        experts = f" and {self.experts / 1e9:.2f} G of experts" if self.experts else ""
        print(f"{name}: {self.weights / 1e9:.2f} G weights{experts}, {self.engine.info.reuse}", end="")
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
        with Pauses(self.engine) as pauses:
            replies = await asyncio.gather(*(generate_ids(self.engine, p, sampling) for p in prompts))
        assert all(len(reply) == tokens for reply in replies), "nothing ends these replies"
        seconds, after = time.perf_counter() - began, self.engine.statistics
        rate = batch * tokens / seconds
        weights = self.weights + self.experts * (1 - self.missed**batch)  # with experts chosen at random
        read = self.weight_bytes + 2 * (weights - self.weights) + batch * (context + tokens / 2) * self.token_bytes
        allowed = batch * self.limit / read
        forward = (after.forward_seconds - before.forward_seconds) / tokens
        print(
            f"{self.name:11} batch {batch:3} context {context:5} {name}: {rate:8.1f} tokens/s,"
            f" {rate / allowed:6.1%} of the memory's {allowed:8.0f}; {seconds / tokens * 1e3:6.2f} ms a step,"
            f" {forward * 1e3:6.2f} of it launching the model; prefill {batch * context / prefill:8.0f} tokens/s;"
            f" {pauses}",
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
    """Requests at random times for ten seconds, with prompts of 512 tokens and replies of 64 to 256."""

    def __init__(self, name: str, shape: dict[str, Any], arguments: argparse.Namespace) -> None:
        self.name = name
        self.seconds, self.length = (1, 32) if arguments.tiny else (10, 512)
        self.size = 512 if arguments.tiny else 151936
        model = random_model(shape, arguments.device, self.size)
        self.engine = model_engine(name, model, [b"x"] * self.size, EngineOptions(exact=arguments.exact))
        collect_seldom()  # as the engine's process does
        runner: Any = self.engine._scheduler._runner
        print(f"{name}: {getattr(getattr(runner, '_step', None), 'costs', None)}", flush=True)
        self.rng = random.Random(name)
        self.first_tokens: list[float] = []
        self.times: list[float] = []
        """Of all tokens."""
        self.gaps: list[float] = []
        """Between the tokens of a reply, as they are read."""

    async def run(self, per_second: int) -> None:
        """Prints the rate between the first fifth of the time and the last arrival, and its share of the steady rate of
        as many replies as ran meanwhile."""
        replies = [self.rng.randint(64, 256) for _ in range(per_second * self.seconds)]
        starts, at = [], 0.0
        for _ in replies:
            at += self.rng.expovariate(per_second)
            starts.append(at)
        await asyncio.gather(*(self._one(0, 16) for _ in range(4)))  # warm-up
        self.first_tokens, self.times, self.gaps = [], [], []
        began = time.perf_counter()
        running: list[int] = []
        counting = asyncio.create_task(self._count_running(running))
        with Pauses(self.engine) as pauses:
            await asyncio.gather(*(self._one(start, tokens) for start, tokens in zip(starts, replies, strict=True)))
        counting.cancel()
        took = time.perf_counter() - began
        since, until = began + starts[-1] / 5, began + starts[-1]
        rate = sum(since <= at <= until for at in self.times) / (until - since)
        mean = sum(running) / max(1, len(running))
        waits, gaps = sorted(self.first_tokens), sorted(self.gaps)
        print(
            f"{self.name:11} {len(replies)} requests, {per_second} a second: {rate:8.1f} tokens/s of"
            f" {sum(replies) / starts[-1]:.0f} asked for, {sum(replies) / took:8.1f} with the end over {took:.1f} s,"
            f" {mean:.1f} replies at once; first token {_percentile(waits, 0.5):.0f} ms, 99%"
            f" {_percentile(waits, 0.99):.0f} ms, gap 50% {_percentile(gaps, 0.5):.1f} ms, 99%"
            f" {_percentile(gaps, 0.99):.1f} ms; {pauses}; {self.engine.info.steps}",
            flush=True,
        )
        steady = await self._steady(max(1, round(mean)))
        print(
            f"{'':11} steady with {round(mean)} replies: {steady:8.1f}; with arrivals {rate / steady:.1%}", flush=True
        )

    async def _count_running(self, counts: list[int]) -> None:
        await asyncio.sleep(self.seconds / 5)
        for _ in range(int(self.seconds * 0.8 / 0.02)):
            counts.append(self.engine.statistics.running)
            await asyncio.sleep(0.02)

    async def _steady(self, replies: int) -> float:
        """Tokens a second of so many replies to such prompts, which are in the cache."""
        prompts = [self._prompt() for _ in range(replies)]
        sampling = replace(SAMPLINGS["stored turn"], max_tokens=256)
        await asyncio.gather(*(generate_ids(self.engine, p, replace(sampling, max_tokens=8)) for p in prompts))
        began = time.perf_counter()
        await asyncio.gather(*(generate_ids(self.engine, prompt, sampling) for prompt in prompts))
        return replies * 256 / (time.perf_counter() - began)

    def _prompt(self) -> Prompt:
        return Prompt(tuple(self.rng.randrange(1, self.size) for _ in range(self.length)))

    async def _one(self, start: float, tokens: int) -> None:
        prompt = self._prompt()
        await asyncio.sleep(start)
        last = began = time.perf_counter()
        count = 0
        async with self.engine.generate(prompt, replace(SAMPLINGS["stored turn"], max_tokens=tokens)) as outputs:
            async for output in outputs:
                if isinstance(output, Step):
                    now = time.perf_counter()
                    (self.gaps if count else self.first_tokens).append(now - last if count else now - began)
                    self.times.append(now)
                    last = now
                    count += 1
        assert count == tokens


def _percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return values[min(len(values) - 1, int(len(values) * share))] * 1e3 if values else 0.0


class Bits:
    """The exact mode: ids and log-probabilities of replies alone, against the same in changing batches, stopped and
    continued with nothing cached, and with other chunk sizes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        shape = next(iter(arguments.shapes.values()))
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


class Drafts:
    """One stream with drafts and without, in turn: in the exact mode, and with --drafts up to rounding.

    No random model copies a text. So what the layers compute is left out of the sum, and after each token comes the
    one that a permutation of the vocabulary says; the passes are those of any model. Where the prompt holds what comes
    next, a reply is a copy of it, and otherwise it repeats nothing. A draft model has the shape of Qwen3-0.6B, and
    another permutation for a share of the tokens."""

    ROUNDS = 3
    CHANGE = 60
    """Each token of a copied text with a number divisible by this is another one in the prompt."""

    AGREES = 0.8
    """The share of tokens that a draft model expects."""

    def __init__(self, name: str, shape: dict[str, Any], arguments: argparse.Namespace, exact: bool) -> None:
        self.name = f"{name}, {'exact' if exact else 'fast'}"
        self.size = 512 if arguments.tiny else 151936
        self.length = 64 if arguments.tiny else 1024
        self.tokens: int = 32 if arguments.tiny else arguments.tokens
        chain = torch.randperm(self.size, generator=torch.Generator().manual_seed(3))
        self.next = chain.tolist()
        model = self._chained(shape, arguments.device, chain)
        drafts = None if exact else True
        self.engines = [
            model_engine(name, model, [b"x"] * self.size, EngineOptions(exact=exact, drafts=one))
            for one in (drafts, False)
        ]
        self.draft_model: RunnerDraftModel | None = None
        small_shape = TINY if arguments.tiny else SHAPES["Qwen3-0.6B"]
        if arguments.tiny or shape is not small_shape:
            other = chain.clone()
            wrong = torch.randperm(self.size)[: int((1 - self.AGREES) * self.size)]
            other[wrong] = other[wrong.roll(1)]
            small = self._chained(small_shape, arguments.device, other)
            self.drafter = model_engine("draft model", small, [b"x"] * self.size, EngineOptions(drafts=False))
            runner = self.drafter._scheduler._runner
            self.draft_model = RunnerDraftModel(runner, 8192, self.size, self.size)
        collect_seldom()  # as the engine's process does

    def _chained(self, shape: dict[str, Any], device: str, chain: torch.Tensor) -> Any:
        """A random model whose likeliest token after each other one is that of a permutation."""
        model = random_model(shape, device, self.size)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
            embedding = model.get_input_embeddings().weight
            model.get_output_embeddings().weight[chain.to(embedding.device)] = embedding
        return model

    async def run(self) -> int:
        """Returns how many replies differ."""
        rng, wrong = random.Random(self.name), 0
        kinds = ["a text with changes", "a text with changes, eight streams", "prose"]
        kinds += ["prose, a draft model", "prose, a draft model, eight streams"] if self.draft_model else []
        for kind in kinds:
            self.engines[0]._scheduler._runner.draft_model = self.draft_model if "model" in kind else None
            rates: list[list[float]] = [[], []]
            for number in range(self.ROUNDS):
                streams = 8 if "eight" in kind else 1
                prompts = [self._prompt(rng, "prose" not in kind) for _ in range(streams)]
                both = [
                    await self._measure(engine, prompts, number, rate)
                    for engine, rate in zip(self.engines, rates, strict=True)
                ]
                wrong += both[0] != both[1]
            ratios = [fast / plain for fast, plain in zip(*rates, strict=True)]
            statistics = self.engines[0].statistics
            print(
                f"{self.name:11} {kind}: {sorted(ratios)[len(ratios) // 2]:.2f} times ({min(ratios):.2f} to"
                f" {max(ratios):.2f}), {max(rates[0]):.0f} and {max(rates[1]):.0f} tokens/s;"
                f" {statistics.accepted_tokens} of {statistics.draft_tokens} drafted tokens accepted so far",
                flush=True,
            )
        print(f"{self.name:11} {wrong} replies differ", flush=True)
        for engine in self.engines:
            await engine.close()
        return wrong

    def _prompt(self, rng: random.Random, copied: bool) -> Prompt:
        """With `copied`, of the text that the reply will be, but for some tokens."""
        ids = [rng.randrange(1, self.size) for _ in range(self.length)]
        if copied:
            text = [ids[-1]]
            while len(text) <= self.tokens:
                text.append(self.next[text[-1]])
            for place in range(self.CHANGE, len(text), self.CHANGE):
                text[place] = rng.randrange(1, self.size)
            ids[10 : 10 + len(text)] = text
        return Prompt(tuple(ids[: self.length]))

    async def _measure(
        self, engine: TorchEngine, prompts: Sequence[Prompt], seed: int, rates: list[float]
    ) -> list[list[int]]:
        """From the first token to the last, with the prompt in the cache."""
        sampling = replace(SAMPLINGS["stored turn"], seed=seed, max_tokens=self.tokens)
        await asyncio.gather(*(generate_ids(engine, prompt, replace(sampling, max_tokens=4)) for prompt in prompts))
        began = time.perf_counter()
        replies = await asyncio.gather(*(generate_ids(engine, prompt, sampling) for prompt in prompts))
        rates.append(sum(map(len, replies)) / (time.perf_counter() - began))
        return replies


async def speed(arguments: argparse.Namespace) -> None:
    limit = bandwidth(arguments.device)
    print(f"memory read: {limit / 1e12:.2f} TB/s")
    for name, shape in arguments.shapes.items():
        test = Speed(name, shape, arguments, limit)
        for batch, context in SAMPLING_LOADS if arguments.sampling else LOADS:
            if arguments.batch not in (None, batch):
                continue
            small = arguments.tiny
            await test.run(min(batch, 4) if small else batch, context // 16 if small else context, arguments.tokens)
        cache = test.engine.statistics.cache
        print(f"{name}: cache {cache.used_bytes / 1e9:.1f} GB of {cache.limit_bytes / 1e9:.1f} GB\n", flush=True)
        await test.engine.close()
        del test
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


async def search(arguments: argparse.Namespace) -> None:
    """The tiles that products have now and the quickest ones, which the next start uses."""
    from palaver.engines.torch.tile_timer import search_tiles

    for name, shape in arguments.shapes.items():
        began = time.perf_counter()
        model = random_model(shape, arguments.device, 151936)
        engine = model_engine(name, model, [b"x"] * 151936, EngineOptions(exact=arguments.exact))
        runner: Any = engine._scheduler._runner
        await engine.close()
        print(f"{name}: {engine.info.steps}, ready after {time.perf_counter() - began:.1f} s", flush=True)
        began = time.perf_counter()
        tried = rejected = 0
        with torch.inference_mode():
            for found in search_tiles(runner._step, everything=True, seconds=arguments.search, compilers=8).run():
                product, tile = found.product, "" if found.tile == found.default else f" {tuple(found.tile)}"
                kind = f"{product.outputs} x {product.inputs}{' gated' if product.gated else ''} {product.weights}"
                print(
                    f"{name:11} {kind:28} {product.rows or 'decode':>6} {found.default_seconds * 1e6:8.1f} us"
                    f" {tuple(found.default)} -> {found.default_seconds * found.ratio * 1e6:8.1f} us, {found.ratio:.1%}"
                    f"{tile}; {found.tried} tried, {found.rejected} rejected",
                    flush=True,
                )
                tried += found.tried
                rejected += found.rejected
        seconds = time.perf_counter() - began
        print(f"{name}: {tried} tiles in {seconds:.1f} s; {rejected} failed or gave other bits\n", flush=True)
        del runner, engine, model
        gc.collect()
        torch.cuda.empty_cache()


PROMPT_FORMATS = ("int4 groups", "fp8 blocks", "fp8 channels")
PROMPT_LAYERS = 4
PROMPT_ROWS = (128, 256, 512, 1024, 2048, 4096)


class Prompts:
    """Passes over prompts of a few layers in the 8B shape: weights in bfloat16, quantised ones that stay packed, and
    the same if they are unpacked first. Bits of the last two are compared."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from palaver.engines.torch.cuda_graphs import CudaGraphCapture
        from palaver.engines.torch.devices import TensorLayout, TensorMemory
        from palaver.engines.torch.plain_decoder import PlainDecoder

        self.device = torch.device(arguments.device)
        self.layers: int = SHAPES["Qwen3-8B"]["num_hidden_layers"]
        shape = TINY_PROMPTS if arguments.tiny else SHAPES["Qwen3-8B"] | {"num_hidden_layers": PROMPT_LAYERS}
        self.rows = (128, 256) if arguments.tiny else PROMPT_ROWS
        self.parts = PlainDecoder.from_model(random_model(shape, arguments.device, 512), 8192)
        heads = (self.parts.num_kv_heads, self.parts.head_dim)
        memory = TensorMemory(self.parts.embedding.dtype, self.device)
        self.layout = TensorLayout(((heads, heads),) * len(self.parts.layers), memory)
        self.capture = CudaGraphCapture(self.device) if self.device.type == "cuda" else None
        self.ids = [(i * i * 7 + i * 13 + 5) % 512 for i in range(max(self.rows))]
        self.search: float = arguments.search

    @torch.inference_mode()
    def run(self, forms: Sequence[str]) -> int:
        """Returns how many formats differ in a bit."""
        wrong = 0
        plain = self._measure("bfloat16", self._step(self.parts, 0))[0]
        for form in forms:
            parts = self._quantized(form)
            packed, expected = self._measure(f"{form}, packed", self._step(parts, max(self.rows)), plain)
            step = self._step(parts, 1)
            found = self._measure(f"{form}, unpacked", step, plain, packed)[1]
            same = torch.equal(found, expected)
            wrong += not same
            print(f"{form}: {'the same bits' if same else 'OTHER BITS'} packed and unpacked", flush=True)
            self._time_unpacking(form, step)
            if self.search:
                self._search(form, step)
        return wrong

    def _quantized(self, form: str) -> Any:
        from palaver.engines.core.quantization_config import read_quantization
        from palaver.engines.torch.quantized_weights import QuantizedLinear, read_weight

        store, settings = FORMATS[form]
        quantization = read_quantization({"quantization_config": settings})
        assert quantization is not None

        def quantized(linear: Any) -> QuantizedLinear:
            stored, _ = store(linear.weight.t().float().contiguous())
            tensors = {f"x.{name}": tensor.to(self.device) for name, tensor in stored.items()}
            packed = read_weight(quantization, "x", tensors.__getitem__).pack()
            assert packed is not None
            return QuantizedLinear(packed, linear.bias, linear.weight.dtype)

        parts = copy.copy(self.parts)
        parts.layers = []
        for layer in self.parts.layers:
            names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
            changes: dict[str, Any] = {name: quantized(getattr(layer, name)) for name in names}
            parts.layers.append(replace(layer, **changes))
        return parts

    def _step(self, parts: Any, packed_rows: int) -> Any:
        """`packed_rows`: for more rows, weights are unpacked."""
        from palaver.engines.torch import step_weights, tile_shapes
        from palaver.engines.torch.cuda_step import DecoderStep
        from palaver.engines.torch.tile_timer import with_known_tiles

        modules: list[Any] = [step_weights, tile_shapes]
        for module in modules:
            module.PACKED_ROWS = packed_rows
        model = parts.step_model()
        newest = self.capture is not None and torch.cuda.get_device_capability() >= (9, 0)
        return DecoderStep(
            model if self.capture is None else with_known_tiles(model), True, self.capture, 32, pdl=newest
        )

    def _measure(self, name: str, step: Any, *others: dict[int, float]) -> tuple[dict[int, float], torch.Tensor]:
        """The seconds of a pass by its rows, and logits after a prompt of all rows and after one of a quarter."""
        seconds = {}
        for rows in self.rows:
            seconds[rows] = min(self._time(step, rows) for _ in range(3)) if self.capture else 1.0
            ratios = "".join(f", {other[rows] / seconds[rows]:5.2f}" for other in others)
            rate = rows / (seconds[rows] * self.layers / len(self.parts.layers))
            print(
                f"{name:24} {rows:5} rows {seconds[rows] * 1e3:8.3f} ms; all layers {rate:8.0f} rows/s{ratios}",
                flush=True,
            )
        return seconds, torch.cat([self._logits(step, count) for count in (len(self.ids) // 4, len(self.ids))])

    def _time(self, step: Any, rows: int) -> float:
        """A mixed step, which is a graph, or a pass over a prompt alone."""
        if rows in step.mixed_rows:
            seconds: float = step._time(step.max_rows, rows)
            return seconds
        chunk = self._chunk(rows)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step.prefill([chunk])
        began.record()
        step.prefill([chunk])
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    def _chunk(self, rows: int) -> Any:
        from palaver.engines.core.kv_cache import SlotAllocator
        from palaver.engines.torch.batch import sequence_chunk

        return sequence_chunk(SlotAllocator(self.layout, 1 << 30).allocate(rows + 1), 0, self.ids[:rows])

    def _logits(self, step: Any, rows: int) -> torch.Tensor:
        """After a prompt of so many tokens, all but the last in one pass."""
        from palaver.engines.torch.cuda_step import StepRow

        chunk = self._chunk(rows)
        step.prefill([replace(chunk, ids=chunk.ids[:-1])])
        last = replace(chunk, start=rows - 1, ids=chunk.ids[-1:])
        logits: torch.Tensor = step.run([StepRow(last, Sampling(temperature=0), 0, 0)])[0].clone()
        return logits

    def _time_unpacking(self, form: str, step: Any) -> None:
        packed = [one.packed for layer in step.layers for one in layer.linears]
        size = sum(one.words.nbytes + 2 * one.outputs * one.inputs for one in packed)
        if self.capture is None:
            return

        def unpack() -> torch.Tensor:
            for one in packed:
                step._unpack(one)
            out: torch.Tensor = step._unpacked
            return out

        unpack()
        replay = self.capture(unpack)
        best = float("inf")
        for _ in range(5):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            replay()
            ended.record()
            ended.synchronize()
            best = min(best, began.elapsed_time(ended) / 1e3)
        print(f"{form}: unpacking {best * 1e3:.3f} ms, {size / best / 1e12:.2f} TB/s", flush=True)

    def _search(self, form: str, step: Any) -> None:
        """The quickest tiles of products with unpacked weights, of 1,024 rows."""
        from palaver.engines.torch.tile_search import TileSearch
        from palaver.engines.torch.tile_timer import ProductTimer, device_limits, list_products, open_tile_cache

        limits, products = device_limits(step.device), list_products(step.model)
        left = [
            (product.shape.with_rows(1024), product.projections[0].prefill_tile(1024))
            for product in products
            if product.prefills
        ]
        cache = open_tile_cache(limits)
        for found in TileSearch(left, ProductTimer(step, products), cache, limits, self.search, 8).run():
            shape = found.product
            print(
                f"{form}: {shape.outputs} x {shape.inputs}{' gated' if shape.gated else ''} in {shape.split}:"
                f" {found.default_seconds * 1e6:.1f} us {tuple(found.default)} -> {found.ratio:.1%}"
                f" {tuple(found.tile)}; {found.tried} tried, {found.rejected} rejected",
                flush=True,
            )


TINY_PROMPTS = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--identity", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--arrivals", action="store_true")
    parser.add_argument("--bits", type=int, default=0, metavar="CYCLES")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--search", type=float, nargs="?", const=120.0, default=0.0, metavar="SECONDS")
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--batch", type=int, help="only this number of streams")
    parser.add_argument("--rates", type=int, nargs="*", default=[25, 40], help="arrivals a second")
    parser.add_argument("--library", action="store_true", help="the library's model code instead of the fused decoder")
    parser.add_argument("--weights", help="a quantised format, such as 'int4 groups': with --speed, --prompts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    shapes = {"tiny": TINY} if arguments.tiny else SHAPES
    chosen_shapes = (arguments.shape,) if arguments.shape else ("tiny", *DEFAULT_SHAPES)
    arguments.shapes = {name: shape for name, shape in shapes.items() if name in chosen_shapes}
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.device}", flush=True)
    chosen = (
        arguments.identity
        or arguments.kernels
        or arguments.speed
        or arguments.sampling
        or arguments.arrivals
        or arguments.bits
        or arguments.drafts
        or arguments.search
        or arguments.prompts
    )
    failures = await identity(arguments.device, False) if arguments.identity or not chosen else 0
    if arguments.prompts:
        failures += Prompts(arguments).run((arguments.weights,) if arguments.weights else PROMPT_FORMATS)
    elif arguments.search:
        await search(arguments)
    if arguments.kernels:
        failures += await identity(arguments.device, True)
    if arguments.speed or arguments.sampling or not chosen:
        await speed(arguments)
    if arguments.arrivals:
        for name, shape in arguments.shapes.items():
            arrivals = Arrivals(name, shape, arguments)
            for per_second in (4,) if arguments.tiny else arguments.rates:
                await arrivals.run(per_second)
            await arrivals.engine.close()
    if arguments.bits:
        failures += await Bits(arguments).run()
    if arguments.drafts:
        for name, shape in arguments.shapes.items():
            for exact in (True, False) if arguments.device == "cuda" else (True,):
                differ = await Drafts(name, shape, arguments, exact).run()
                failures += differ if exact else 0  # otherwise they are the same up to rounding
                gc.collect()
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
