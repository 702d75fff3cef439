"""Models that treat late positions differently give the tokens of the library's `generate` at every length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch import EngineOptions, SchedulerLimits, load, plain_decoder
from palaver.engines.torch.library_engine import ModelProbe, model_engine
from palaver.engines.torch.plain_decoder import FusedDecoder, PlainDecoder
from palaver.errors import ContextOverflow
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import continued, run
from tests.engines.reference import reference

FAMILIES = ("longrope", "dynamic_ntk", "ministral3", "llama4")
GREEDY = Sampling(temperature=0, max_tokens=16, banned_ids=(tiny.END,))
LENGTHS = (10, 88, 120, 300, 496)
"""Of prompts: short, growing past the original length, beyond it, far beyond it, up to the end of the context."""


def prompt_of(length: int) -> Prompt:
    return Prompt(tuple((7 * i * i + 13 * i + length) % 256 for i in range(length)))


@cache
def build(family: str) -> Any:
    return tiny.build(family)


@cache
def generated(model: Any, prompt: Prompt) -> list[int]:
    ids = torch.tensor([prompt.context_ids])
    with torch.inference_mode():
        out = model.generate(
            ids, max_new_tokens=16, do_sample=False, suppress_tokens=[tiny.END], pad_token_id=0, eos_token_id=None
        )
    reply: list[int] = out[0, ids.shape[1] :].tolist()
    return reply


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def agrees(model: Any, prompt: Prompt, reply: list[int]) -> bool:
    """Rounding may decide only where two tokens are next to equally likely."""
    return reply == generated(model, prompt) or reference(model, prompt, GREEDY).agrees(reply)


@pytest.mark.parametrize("chunk", [16, 512])
async def test_says_what_generate_says_at_every_length_alone_and_together(
    family: str, chunk: int, folder_of: Callable[[str], Path]
) -> None:
    model = build(family)
    engine = load(
        folder_of(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(limits=SchedulerLimits(chunk_tokens=chunk))
    )
    assert engine.info.reuse == "to the token"
    prompts = [prompt_of(length) for length in LENGTHS]
    alone = [await run(engine, replace(prompt, owner="alone"), GREEDY) for prompt in prompts]
    together = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in prompts))
    for prompt, out in zip(prompts * 2, [*alone, *together], strict=True):
        assert agrees(model, prompt, out.ids)
    await engine.close()


async def test_a_reply_that_outgrows_the_original_length_goes_on_as_if_uncut(folder_of: Callable[[str], Path]) -> None:
    prompt = prompt_of(88)
    model = build("longrope")
    engine = load(
        folder_of("longrope"),
        vocabulary=tiny.VOCABULARY,
        options=EngineOptions(limits=SchedulerLimits(chunk_tokens=16)),
    )
    other = asyncio.create_task(run(engine, prompt_of(10), replace(GREEDY, max_tokens=60)))
    uncut = await run(engine, prompt, GREEDY)
    assert agrees(model, prompt, uncut.ids)
    for count in (3, 8, 9, 12):
        for owner in ("", f"fresh {count}"):
            cut = replace(continued(prompt, uncut.ids[:count]), owner=owner)
            rest = await run(engine, cut, GREEDY)
            assert uncut.ids[:count] + rest.ids == uncut.ids
    turn = Prompt((*prompt.context_ids, *uncut.ids, *range(20)))
    assert agrees(model, turn, (await run(engine, turn, GREEDY)).ids)
    await other
    await engine.close()


async def test_a_longer_text_than_frequencies_hold_for_is_refused(folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of("dynamic_ntk"), vocabulary=tiny.VOCABULARY)
    with pytest.raises(ContextOverflow):
        await run(engine, prompt_of(513), GREEDY)
    await engine.close()


def test_the_probe_sees_queries_that_are_scaled_at_late_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_decoder, "_check_shape", lambda model: None)
    model = tiny.build("ministral3")
    with torch.inference_mode():
        probe = ModelProbe(model, tiny.SIZE, 512)
        layout = probe.layout()
        parts = PlainDecoder.from_model(model, 512)
        probe.check(FusedDecoder(parts), layout)
        with pytest.raises(UnsupportedModel):
            probe.check_late(FusedDecoder(parts.without_tables()), layout)


async def test_frequencies_by_the_length_of_a_pass_that_nothing_is_known_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then everything is computed anew at each token, which is right and slow."""
    monkeypatch.setattr("palaver.engines.torch.library_engine.find_longrope", lambda model: None)
    model = tiny.build("longrope")
    engine = model_engine("longrope", model, tiny.VOCABULARY)
    assert engine.info.reuse.startswith("none")
    together = await asyncio.gather(*(run(engine, prompt_of(length), GREEDY) for length in (10, 92, 120)))
    await engine.close()
    for length, out in zip((10, 92, 120), together, strict=True):
        assert agrees(model, prompt_of(length), out.ids)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_in_bfloat16_no_more_than_twice_its_own_rounding_passes(family: str) -> None:
    model = tiny.build(family).to(torch.bfloat16)
    with torch.inference_mode():
        probe = ModelProbe(model, tiny.SIZE, 512)
        logits = probe._expected[20].float()
        probe.compare(logits, 21)
        with pytest.raises(UnsupportedModel):
            probe.compare(logits + 0.1 * logits.abs().max(), 21)
