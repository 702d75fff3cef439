"""How much sooner a diffusion reply is there than by the plain loop, which computes the whole text at every step.

    python -m benchmarks.diffusion [--model sprout-diffusion] [--prompt 1000] [--tokens 256]
    python -m benchmarks.diffusion --approximate [--steps 8]

The plain loop's steps are measured at a few lengths and counted for the whole reply; several streams run one after the
other, as they would in such a loop. The engine generates the whole replies, all streams at once.

`--approximate` compares the approximate cache of bidirectional models with computing the whole text at every step. The
model is loaded as a bidirectional one; whether it was trained as one changes its tokens, not its speed.

The exit status is 1 if the engine is less than 2 times as fast with one stream, or 5 times with eight.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from palaver.engines.core.options import EngineOptions
from palaver.engines.diffusion.config import find_diffusion, read_diffusion_config
from palaver.engines.diffusion.engine import DiffusionEngine, load
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt, Step
from palaver.models.resolver import resolve_folder
from palaver.phases import Vocabulary
from palaver.sampling import Sampling

SAMPLES = 4
"""Lengths at which a step of the plain loop is measured."""
BARS = {1: 2.0, 8: 5.0}
"""How many times as fast as the plain loop the engine has to be, by streams."""


@torch.inference_mode()
def plain_seconds(folder: Path, prompt: int, tokens: int, block: int, steps: int) -> float:
    """The time of one reply by the plain loop."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    size = model.config.vocab_size
    total = 0.0
    for at in range(SAMPLES):
        length = prompt + (at * tokens // SAMPLES) // block * block + block
        ids = torch.randint(0, size - 1, (1, length))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        seen[-block:, -block:] = True
        model(input_ids=ids, attention_mask=seen[None, None])
        began = time.perf_counter()
        for _ in range(3):
            model(input_ids=ids, attention_mask=seen[None, None]).logits[0, -block - 1 : -1].softmax(-1).max(-1)
        total += (time.perf_counter() - began) / 3
    return total / SAMPLES * steps * -(-tokens // block)


async def engine_seconds(engine: DiffusionEngine, prompts: list[Prompt], sampling: Sampling) -> float:
    async def reply(prompt: Prompt) -> int:
        async with engine.generate(prompt, sampling) as outputs:
            return sum([isinstance(output, Step) async for output in outputs])

    began = time.perf_counter()
    counts = await asyncio.gather(*map(reply, prompts))
    assert set(counts) == {sampling.max_tokens}, counts
    return time.perf_counter() - began


async def approximate_ratio(
    folder: Path,
    vocabulary: Vocabulary,
    settings: dict[str, Any],
    prompt: Prompt,
    sampling: Sampling,
    threads: int,
) -> None:
    seconds = []
    for approximate in (False, True):
        engine = load(
            folder,
            vocabulary=vocabulary,
            trained=settings | {"attention": "bidirectional"},
            device="cpu",
            options=EngineOptions(threads=threads, approximate_cache=approximate),
        )
        banned = replace(sampling, banned_ids=tuple(engine.info.end_ids))
        await engine_seconds(engine, [Prompt((5, 6, 7))], replace(banned, max_tokens=32))
        seconds.append(await engine_seconds(engine, [prompt], banned))
        await engine.close()
    off, on = seconds
    print(f"whole text at every step {off:.1f} s, approximate cache {on:.1f} s: {off / on:.1f} times as fast")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sprout-diffusion")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the reply")
    parser.add_argument("--steps", type=int, help="steps of a block; by default the model's")
    parser.add_argument("--approximate", action="store_true", help="measure the approximate cache instead")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    folder = resolve_folder(given.model)
    torch.set_num_threads(given.threads)
    vocabulary = load_tokenizer(folder).vocabulary
    settings = find_diffusion(folder)
    assert settings is not None, f"{given.model} is no diffusion model"
    config = read_diffusion_config(folder, settings, len(vocabulary))
    block, steps = config.block_length or given.tokens, given.steps or config.steps
    torch.manual_seed(0)
    prompts = [Prompt(tuple(torch.randint(10, 4000, (given.prompt,)).tolist())) for _ in range(9)]
    sampling = Sampling(temperature=0.0, max_tokens=given.tokens, steps=steps)
    if given.approximate:
        await approximate_ratio(folder, vocabulary, dict(settings), prompts[0], sampling, given.threads)
        return 0
    engine = load(folder, vocabulary=vocabulary, device="cpu", options=EngineOptions(threads=given.threads))
    sampling = replace(sampling, banned_ids=tuple(engine.info.end_ids))
    await engine_seconds(engine, [Prompt((5, 6, 7))], sampling)
    plain = plain_seconds(folder, given.prompt, given.tokens, block, min(steps, block))
    missed = False
    for (streams, bar), batch in zip(BARS.items(), (prompts[:1], prompts[1:]), strict=True):
        seconds = await engine_seconds(engine, batch, sampling)
        speed = streams * given.tokens / seconds
        print(
            f"{streams} streams: {seconds:.1f} s, {speed:.0f} tokens/s; plain loop {plain * streams:.1f} s:"
            f" {plain * streams / seconds:.1f} times as fast (bar: {bar})"
        )
        missed |= plain * streams / seconds < bar
    await engine.close()
    return int(missed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
