"""The scores of attention take bounded memory, and a pass that runs out of memory is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, load
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.model_runner import SCORE_BYTES, Forward, TorchRunner
from palaver.errors import EngineError
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import run
from tests.engines.reference import reference

GREEDY = Sampling(temperature=0, max_tokens=8, banned_ids=(tiny.END,))
PROMPT = Prompt(tuple((7 * i * i + 13 * i) % 256 for i in range(200)))


class Watched:
    """Counts the pairs of a query and a key in each pass; raises where they take more than the memory."""

    def __init__(self, forward: Forward, memory: int, error: type[Exception], text: str) -> None:
        self._forward = forward
        self._memory = memory
        self._error = error
        self._text = text
        self.passes: list[int] = []

    def __call__(self, batch: ForwardBatch) -> Tensor:
        pairs = sum(len(chunk.ids) * (chunk.start + len(chunk.ids)) for chunk in batch.chunks)
        self.passes.append(pairs)
        if pairs > self._memory:
            raise self._error(self._text)
        return self._forward(batch)

    @property
    def pair_bytes(self) -> int:
        return self._forward.pair_bytes


def watch(engine: TorchEngine, memory: int, error: type[Exception] = RuntimeError, text: str = "") -> Watched:
    runner = engine._runner
    assert isinstance(runner, TorchRunner)
    watched = Watched(runner._forward, memory, error, text)
    runner._forward = watched
    return watched


def loaded(family: str, folder_of: Callable[[str], Path]) -> TorchEngine:
    options = EngineOptions(limits=SchedulerLimits(chunk_tokens=512), compiled=False)
    return load(folder_of(family), vocabulary=tiny.VOCABULARY, options=options)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
async def test_chunks_are_bounded_by_the_memory_of_their_scores(
    family: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCORE_BYTES, "cpu", 200_000)
    engine = loaded(family, folder_of)
    watched = watch(engine, memory=1 << 40)
    out = await run(engine, PROMPT, GREEDY)
    bytes_of_a_pass = [pairs * watched.pair_bytes for pairs in watched.passes]
    assert max(bytes_of_a_pass) <= 200_000
    assert reference(tiny.build(family), PROMPT, GREEDY).agrees(out.ids)
    await engine.close()


@pytest.mark.parametrize(
    ("error", "text"),
    [(torch.OutOfMemoryError, "out of memory"), (RuntimeError, "DefaultCPUAllocator: can't allocate memory")],
)
async def test_a_pass_without_memory_is_tried_in_smaller_pieces(
    error: type[Exception], text: str, folder_of: Callable[[str], Path]
) -> None:
    engine = loaded("gpt_oss", folder_of)
    watched = watch(engine, 5_000, error, text)
    out = await run(engine, PROMPT, GREEDY)
    assert reference(tiny.build("gpt_oss"), PROMPT, GREEDY).agrees(out.ids)
    failed = [pairs for pairs in watched.passes if pairs > 5_000]
    assert 0 < len(failed) <= 4, "what was too much once is not tried again"
    await engine.close()


async def test_other_errors_are_not_tried_again(folder_of: Callable[[str], Path]) -> None:
    engine = loaded("gpt_oss", folder_of)
    watched = watch(engine, 5_000, RuntimeError, "a mistake")
    with pytest.raises(EngineError, match="a mistake"):
        await run(engine, PROMPT, GREEDY)
    assert len(watched.passes) == 1
    await engine.close()


async def test_a_reply_grows_to_all_the_cache_there_is(folder_of: Callable[[str], Path]) -> None:
    """Memory for 400 tokens; a slot of the next power of two would take more."""
    layers, heads, size = 3, 2, 16
    cache_bytes = 400 * layers * 2 * heads * size * 4
    options = EngineOptions(cache_bytes=cache_bytes, compiled=False)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    model = tiny.build("qwen3")
    for length, reply_tokens in ((300, 40), (100, 270)):
        prompt = Prompt(PROMPT.context_ids[:100] * (length // 100))
        sampling = Sampling(temperature=0, max_tokens=reply_tokens, banned_ids=(tiny.END,))
        out = await run(engine, prompt, sampling)
        assert len(out.ids) == reply_tokens
        if length == 300:
            assert reference(model, prompt, sampling).agrees(out.ids)
        assert engine.statistics.cache.used_bytes <= cache_bytes
    await engine.close()
