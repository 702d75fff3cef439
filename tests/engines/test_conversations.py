"""Nothing is computed twice: turns, retries, edits and continues of a growing conversation."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from palaver.engines.torch import EngineOptions, TorchEngine, load
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.compiler import needs_a_compiler
from tests.engines.generate import Run, continued, run

GREEDY = Sampling(temperature=0, max_tokens=8, banned_ids=(tiny.END,))


def new_tokens(out: Run) -> int:
    assert out.prefilled is not None
    return out.prefilled.prompt_tokens - out.prefilled.cached_tokens


async def test_twenty_turns_compute_what_is_new_in_each(engine: TorchEngine) -> None:
    history: tuple[int, ...] = ()
    for turn in range(20):
        question = tuple(f"Question {turn}?".encode())
        history += question
        out = await run(engine, Prompt(history), GREEDY)
        # the last token of a reply was sampled but not computed: the next turn computes it
        assert new_tokens(out) == len(question) + (turn > 0)
        history += tuple(out.ids)


async def test_a_retry_and_an_edit_compute_what_differs(engine: TorchEngine) -> None:
    prompt = Prompt(tuple(b"What do you think of the weather today?"))
    await run(engine, prompt, GREEDY)
    assert new_tokens(await run(engine, prompt, replace(GREEDY, temperature=1.0, seed=1))) == 0
    edited = Prompt(tuple(b"What do you think of the colour today?"))
    assert new_tokens(await run(engine, edited, GREEDY)) == len(edited) - len(b"What do you think of the ")
    assert new_tokens(await run(engine, prompt, GREEDY)) == 0


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(compiled=False),
        EngineOptions(exact=True, compiled=False),
        EngineOptions(fused=False),
        pytest.param(EngineOptions(compiled=True), marks=needs_a_compiler),
        pytest.param(EngineOptions(compiled=True, exact=True), marks=needs_a_compiler),
    ],
    ids=["", "exact", "own code", "compiled", "compiled and exact"],
)
async def test_stop_and_continue_cycles_compute_one_token_each(
    options: EngineOptions, folder_of: Callable[[str], Path]
) -> None:
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    rng = random.Random(1)
    for seed in range(4):
        prompt = Prompt(tuple(b"A question about number " + str(seed).encode()))
        sampling = Sampling(temperature=seed * 0.5, seed=seed, max_tokens=60, banned_ids=(tiny.END,))
        uncut = await run(engine, prompt, sampling)
        reply: list[int] = []
        while len(reply) < 60:
            out = await run(engine, continued(prompt, reply), sampling, stop_after=rng.randint(1, 9))
            assert new_tokens(out) == (1 if reply else 0)
            reply += out.ids
        assert reply == uncut.ids
    await engine.close()


async def test_statistics_tell_the_hits(engine: TorchEngine) -> None:
    prompt = Prompt(tuple(b"Twice the same"))
    await run(engine, prompt, GREEDY)
    await run(engine, prompt, GREEDY)
    statistics = engine.statistics.cache
    assert statistics.prompt_tokens == 2 * len(prompt)
    assert statistics.hit_tokens == len(prompt)
    assert 0 < statistics.kept_bytes <= statistics.used_bytes <= statistics.limit_bytes


async def test_memory_is_flat_over_many_requests(folder_of: Callable[[str], Path]) -> None:
    cache_bytes = 768 * 2000
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(cache_bytes=cache_bytes))
    rng = random.Random(2)
    for _ in range(120):
        prompt = Prompt(tuple(rng.randrange(256) for _ in range(rng.randint(1, 120))))
        await run(engine, prompt, replace(GREEDY, max_tokens=2))
        assert engine.statistics.cache.used_bytes <= cache_bytes
    assert engine.statistics.cache.evictions > 0
    await engine.close()
