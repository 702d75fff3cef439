"""Every family of models says what the transformers library says, alone and among others."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT
from palaver.engines.torch import EngineOptions, SchedulerLimits, library_engine, load, model_runner
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import continued, run
from tests.engines.reference import reference

TRUNCATABLE = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_oss", "qwen3_moe", "phi3", "phi", "gpt2")
RECURRENT = ("qwen3_next", "mamba", "lfm2")
FUSED = ("llama", "qwen2", "qwen3")
TEXTS = (b"Hi", b"The longest of them all, longer than any window is", b"abc" * 5, b"x", b"Some other text")
LENGTH = 10
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, banned_ids=(tiny.END,))


def prompts() -> list[Prompt]:
    return [Prompt(tuple(text)) for text in (*TEXTS, *(text[::-1] for text in TEXTS[:3]))]


def library_says(model: Any, prompt: Prompt) -> list[int]:
    ids = torch.tensor([prompt.context_ids])
    with torch.inference_mode():
        out = model.generate(
            ids, max_new_tokens=LENGTH, do_sample=False, suppress_tokens=[tiny.END], pad_token_id=0, eos_token_id=None
        )
    reply: list[int] = out[0, ids.shape[1] :].tolist()
    return reply


@pytest.mark.parametrize("family", [*TRUNCATABLE, *RECURRENT])
async def test_says_what_the_library_says_alone_and_with_seven_others(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    model = tiny.build(family)
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False))
    try:
        assert engine.info.reuse == ("to the token" if family in TRUNCATABLE else "snapshots")
        together = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in prompts()))
        for prompt, out in zip(prompts(), together, strict=True):
            expected = library_says(model, prompt)
            assert out.ids == expected or reference(model, prompt, GREEDY).agrees(out.ids)
            assert (await run(engine, prompt, GREEDY)).ids == out.ids
    finally:
        await engine.close()


@pytest.mark.parametrize("family", FUSED)
async def test_the_models_own_code_and_ours_agree(family: str, folder_of: Callable[[str], Path]) -> None:
    model = tiny.build(family)
    for fused in (True, False):
        engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(fused=fused, compiled=False))
        for prompt in prompts():
            assert reference(model, prompt, GREEDY).agrees((await run(engine, prompt, GREEDY)).ids)
        await engine.close()


@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "qwen3"])
async def test_a_long_prompt_in_chunks_is_the_same_prompt(family: str, folder_of: Callable[[str], Path]) -> None:
    options = EngineOptions(limits=SchedulerLimits(chunk_tokens=16), compiled=False)
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=options)
    prompt = Prompt(tuple(b"A prompt that is longer than three chunks and more than two windows of attention. " * 2))
    out = await run(engine, prompt, GREEDY)
    await engine.close()
    assert reference(tiny.build(family), prompt, GREEDY).agrees(out.ids)


@pytest.mark.parametrize("family", [*RECURRENT, "gemma3", "gpt_oss"])
async def test_continue_retry_and_the_next_turn_are_hits(family: str, folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False))
    prompt = Prompt(tuple(b"A first question of some length?"))
    first = await run(engine, prompt, GREEDY)
    retry = await run(engine, prompt, GREEDY)
    assert retry.ids == first.ids
    assert retry.prefilled is not None
    assert retry.prefilled.cached_tokens == len(prompt)
    cut = await run(engine, prompt, GREEDY, stop_after=5)
    rest = await run(engine, continued(prompt, cut.ids), GREEDY)
    assert cut.ids + rest.ids == first.ids
    assert rest.prefilled is not None
    assert rest.prefilled.cached_tokens >= len(prompt) - 1 + (4 if family not in RECURRENT else 0)
    longer = Prompt((*prompt.context_ids, *first.ids, *b"And then?"))
    turn = await run(engine, longer, GREEDY)
    assert turn.prefilled is not None
    assert turn.prefilled.cached_tokens == len(prompt) + len(first.ids) - 1
    await engine.close()


async def test_a_model_without_any_usable_cache_is_still_right(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no cache of this kind")

    monkeypatch.setattr("palaver.engines.torch.library_engine.kv_layout", refuse)
    monkeypatch.setattr("palaver.engines.torch.snapshot_runner.RecurrentState.feed", refuse)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(fused=False))
    assert engine.info.reuse == "none: its cache isn't understood (RuntimeError)"
    prompt = Prompt(tuple(b"Hello"))
    out = await run(engine, prompt, GREEDY)
    assert reference(tiny.build("qwen3"), prompt, GREEDY).agrees(out.ids)
    assert out.prefilled is not None
    assert out.prefilled.cached_tokens == 0
    await engine.close()


EXACT = Sampling(temperature=0, max_tokens=8, banned_ids=(tiny.END,), logprobs=5)
EXPERTS = ("gpt_oss", "qwen3_moe")


async def test_exact_bits_of_long_prompts_do_not_depend_on_the_batch(folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(exact=True, compiled=False))
    sampling = replace(EXACT, max_tokens=6)
    long = [Prompt(tuple(range(i, 250)) * 2, owner="alone") for i in range(3)]
    alone = [await run(engine, prompt, sampling) for prompt in long]
    other = asyncio.create_task(run(engine, Prompt((1, 2, 3)), replace(sampling, max_tokens=60)))
    together = await asyncio.gather(*(run(engine, replace(prompt, owner="together"), sampling) for prompt in long))
    assert [out.steps for out in together] == [out.steps for out in alone]
    await other
    await engine.close()


@pytest.mark.parametrize("family", [*TRUNCATABLE, *RECURRENT])
async def test_exact_bits_do_not_depend_on_the_batch(family: str, folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(exact=True, compiled=False))
    assert engine.info.exactness == (BY_CACHE if family in (*RECURRENT, *EXPERTS) else BY_TEXT)
    alone = [await run(engine, prompt, EXACT) for prompt in prompts()]
    crowd = [replace(prompt, owner=owner) for owner in ("one", "another") for prompt in prompts()]
    together = await asyncio.gather(*(run(engine, prompt, EXACT) for prompt in crowd))
    assert [out.steps for out in together] == [out.steps for out in alone] * 2
    await engine.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi", "gpt2"])
@pytest.mark.parametrize("packs", [True, False])
async def test_exact_bits_depend_on_the_text_alone(
    family: str, packs: bool, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that is continued in a fresh engine, where all is computed anew in other pieces, has the same bits."""
    if not packs:  # as where a row's bits depend on its place
        monkeypatch.setattr(library_engine, "probe_exactness", _unpacked)
    prompt = Prompt(tuple(b"A prompt that is longer than some blocks of positions are."))
    options = EngineOptions(exact=True, compiled=False, limits=SchedulerLimits(chunk_tokens=24))
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=options)
    uncut = await run(engine, prompt, EXACT)
    await engine.close()
    for count in (1, 4, 7):
        fresh = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=options)
        others = [run(fresh, other, EXACT) for other in prompts()]
        rest, *_ = await asyncio.gather(run(fresh, continued(prompt, uncut.ids[:count]), EXACT), *others)
        assert rest.steps == uncut.steps[count:]
        await fresh.close()


def _unpacked(forward: Any, layout: Any, ids: Any, may_pack: bool) -> Any:
    return model_runner.probe_exactness(forward, layout, ids, False)


async def test_what_is_not_asked_for_is_not_promised(folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False))
    assert engine.info.exactness == BY_BATCH
    await engine.close()
