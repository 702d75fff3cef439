"""DiffusionGemma in the engine gives the library's own tokens for the same settings, cut anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
)

from palaver.engines.core.options import EngineOptions
from palaver.engines.diffusion.block import BlockRules
from palaver.engines.diffusion.engine import DiffusionEngine, load
from palaver.engines.diffusion.gemma import seeded
from palaver.errors import BadParameter
from palaver.generation import Draft, Ended, Finish, Output, Prompt, Step
from palaver.sampling import Sampling

SIZE, END, CANVAS = 80, 1, 8
PROMPT = Prompt(tuple(range(5, 30)))
SAMPLING = Sampling(temperature=1.0, seed=3, max_tokens=3 * CANVAS, steps=6)


def make_folder(folder: Path, canvas: int = CANVAS, seed: int = 0) -> Path:
    """A small random model, sharp enough that it accepts some tokens of a canvas and not others."""
    torch.manual_seed(seed)
    text = DiffusionGemmaTextConfig(
        vocab_size=SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=8, max_position_embeddings=256, sliding_window=16,
        num_experts=4, top_k_experts=2, moe_intermediate_size=16, eos_token_id=END, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, patch_size=4,
    )  # fmt: skip
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=canvas)
    model = DiffusionGemmaForBlockDiffusion(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=(3.0 if "embed_tokens" in name else 1.5) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": 0}))
    return folder


def load_folder(folder: Path) -> DiffusionEngine:
    vocabulary = tuple(bytes([33 + id]) for id in range(SIZE))
    return load(folder, vocabulary=vocabulary, device="cpu", options=EngineOptions(threads=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[DiffusionEngine]:
    engine = load_folder(folder)
    yield engine
    asyncio.run(engine.close())


async def collect(
    engine: DiffusionEngine, prompt: Prompt, sampling: Sampling, stop_after: int | None = None
) -> list[Output]:
    """All outputs; stopped after so many drafts."""
    outputs: list[Output] = []
    async with engine.generate(prompt, sampling) as generation:
        async for output in generation:
            outputs.append(output)
            if stop_after is not None and sum(isinstance(one, Draft) for one in outputs) == stop_after:
                stop_after = None
                generation.stop()
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    return [output.token_id for output in outputs if isinstance(output, Step)]


def tokens(engine: DiffusionEngine, prompt: Prompt, sampling: Sampling) -> list[int]:
    return tokens_of(asyncio.run(collect(engine, prompt, sampling)))


def library_tokens(folder: Path, prompt: Prompt, sampling: Sampling, canvas: int = CANVAS) -> list[int]:
    """`generate` of the library. Its random numbers are seeded before each step, as the engine does."""
    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32).eval()
    nothing = torch.zeros(0)
    rules = BlockRules(sampling, 0, sampling.steps or 0, None, nothing, nothing)
    step, prepare = model._denoising_step, model._prepare_denoiser_inputs
    place = {"canvas": -1, "step": 0}

    def prepared(*given: Any, **named: Any) -> Any:
        place["canvas"], place["step"] = place["canvas"] + 1, 0
        with seeded(rules, place["canvas"] * canvas, 0):
            return prepare(*given, **named)

    def stepped(*given: Any, **named: Any) -> Any:
        place["step"] += 1
        with seeded(rules, place["canvas"] * canvas, place["step"]):
            return step(*given, **named)

    model._denoising_step, model._prepare_denoiser_inputs = stepped, prepared
    ids = torch.tensor([prompt.context_ids])
    out = model.generate(ids, max_new_tokens=sampling.max_tokens, max_denoising_steps=sampling.steps)
    found: list[int] = out.sequences[0, ids.shape[1] :].tolist()
    return found[: found.index(END) + 1] if END in found else found


@pytest.mark.parametrize("seed", range(6))
def test_the_library_gives_the_same_tokens(engine: DiffusionEngine, folder: Path, seed: int) -> None:
    sampling = replace(SAMPLING, seed=seed, steps=2 + 3 * seed)
    found = tokens(engine, PROMPT, sampling)
    assert found == library_tokens(folder, PROMPT, sampling)
    assert len(found) > 1


@pytest.mark.parametrize("seed", range(4))
def test_canvases_of_any_length_agree_with_the_library(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    canvas = draw.randrange(1, 24)
    folder = make_folder(tmp_path, canvas, seed)
    engine = load_folder(folder)
    prompt = Prompt(tuple(draw.randrange(5, SIZE) for _ in range(draw.randrange(1, 60))))
    sampling = replace(SAMPLING, seed=draw.randrange(2**40), steps=draw.randrange(1, 12), max_tokens=2 * canvas)
    try:
        assert tokens(engine, prompt, sampling) == library_tokens(folder, prompt, sampling, canvas)
    finally:
        asyncio.run(engine.close())


def test_a_reply_stopped_at_any_step_goes_on_as_uncut(engine: DiffusionEngine) -> None:
    sampling = replace(SAMPLING, banned_ids=(END,), steps=4, max_tokens=2 * CANVAS)
    uncut = asyncio.run(collect(engine, PROMPT, sampling))
    for step in range(1, sum(isinstance(output, Draft) for output in uncut) + 1):
        outputs = asyncio.run(collect(engine, PROMPT, sampling, stop_after=step))
        kept = tokens_of(outputs)
        assert outputs[-1] in (Ended(Finish.STOPPED), uncut[-1])
        assert len(kept) % CANVAS == 0
        assert kept + tokens(engine, replace(PROMPT, reply_ids=tuple(kept)), sampling) == tokens_of(uncut), step


def test_requests_take_turns_step_by_step(engine: DiffusionEngine) -> None:
    """A short reply that comes second is there before the long one, and neither changes the other."""
    long, short = replace(SAMPLING, banned_ids=(END,)), replace(SAMPLING, max_tokens=CANVAS, banned_ids=(END,), seed=9)
    alone = [tokens(engine, PROMPT, long), tokens(engine, PROMPT, short)]
    order: list[str] = []

    async def run(name: str, sampling: Sampling) -> list[int]:
        outputs = await collect(engine, PROMPT, sampling)
        order.append(name)
        return tokens_of(outputs)

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(run("long", long), run("short", short)))

    assert asyncio.run(together()) == alone
    assert order == ["short", "long"]


def test_a_reply_cut_at_any_token_goes_on_as_uncut(engine: DiffusionEngine) -> None:
    sampling = replace(SAMPLING, banned_ids=(END,))
    uncut = tokens(engine, PROMPT, sampling)
    assert len(uncut) == 3 * CANVAS
    for cut in range(0, len(uncut), 5):
        assert tokens(engine, replace(PROMPT, reply_ids=tuple(uncut[:cut])), sampling) == uncut[cut:]


def test_drafts_come_before_the_tokens_of_a_canvas(engine: DiffusionEngine) -> None:
    outputs = asyncio.run(collect(engine, PROMPT, replace(SAMPLING, banned_ids=(END,))))
    drafts = [output for output in outputs if isinstance(output, Draft)]
    assert {draft.position for draft in drafts} == {0, CANVAS, 2 * CANVAS}
    assert all(len(draft.token_ids) == CANVAS for draft in drafts)
    assert outputs[-1] == Ended(Finish.LENGTH)


def test_its_own_rules_are_said(engine: DiffusionEngine) -> None:
    assert engine.info.block_length == CANVAS
    with pytest.raises(BadParameter, match="block_length"):
        engine.generate(PROMPT, replace(SAMPLING, block_length=4))
