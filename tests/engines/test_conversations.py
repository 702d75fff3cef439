"""Nothing is computed twice with the model's own code, and the cache stays within its limit."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from palaver.engines.torch import EngineOptions, TorchEngine, load
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import Run, continued, run

GREEDY = Sampling(temperature=0, max_tokens=8, banned_ids=(tiny.END,))


def new_tokens(out: Run) -> int:
    assert out.prefilled is not None
    return out.prefilled.prompt_tokens - out.prefilled.cached_tokens


async def test_cycles_with_the_models_own_code_compute_one_token_each(folder_of: Callable[[str], Path]) -> None:
    """As all engines do with the embedded model (test_conformance.py)."""
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(fused=False))
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
