"""The runner of CUDA steps, over a step of torch's operations: whatever joins, leaves, is cancelled or continued, each
reply is the one it is alone, though prompts and replies share passes that start before their tokens are known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: the runner of CUDA steps is not tested")

from palaver.engines.core.draft_model import RunnerDraftModel
from palaver.engines.core.rng import UniformStream
from palaver.engines.core.speculation import DraftLookup, PassCosts
from palaver.engines.torch import (
    EngineOptions,
    SchedulerLimits,
    TorchEngine,
    device_filters,
    load,
    step_runner,
)
from palaver.engines.torch.batch import SequenceChunk, build_batch
from palaver.engines.torch.cuda_step import StepRow
from palaver.engines.torch.plain_decoder import FusedDecoder
from palaver.engines.torch.step_runner import StepRunner
from palaver.generation import Prompt, Step
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import Run, run
from tests.engines.reference import Reference
from tests.engines.test_scheduler import cases, stop_and_go

DEVICE = torch.device("cpu")
Results = Callable[[], NDArray[np.float64]]


class TorchStep:
    """What `DecoderStep` does, by torch's operations."""

    exact = False
    costs = None
    capture = None

    def __init__(self, decoder: FusedDecoder, max_rows: int, max_prompt_tokens: int, quantized: bool = False) -> None:
        self._decoder = decoder
        self.model = SimpleNamespace(quantized=quantized)
        self.prefilled = 0
        self.max_rows = max_rows
        self.max_prompt_tokens = max_prompt_tokens
        self._sampled = torch.zeros(max_rows, dtype=torch.int64)
        self.mixed = self.mixed_ahead = self.moved = self.repeated = self.verified = self.resumed = 0
        """Passes with prompts beside rows, those of them whose tokens the host didn't know, passes whose rows are not
        those of the pass before, passes of the same rows, passes with drafts, and batches whose logits were known."""
        self._rows: list[StepRow] = []

    def set_tokens(self, tokens: Tensor) -> None:
        self._sampled[: len(tokens)] = tokens

    def prefill(self, chunks: Sequence[SequenceChunk]) -> None:
        self.prefilled += 1
        self._decoder(build_batch(chunks, DEVICE, need_logits=False))

    def run(
        self, rows: Sequence[StepRow], sources: Sequence[int] | None = None, prompts: Sequence[SequenceChunk] = ()
    ) -> tuple[Tensor, Results]:
        assert len(rows) <= self.max_rows
        assert sum(len(chunk.ids) for chunk in prompts) <= self.max_prompt_tokens
        if prompts:
            self.prefill(prompts)
            self.mixed += 1
            self.mixed_ahead += sources is not None
        batch = build_batch([row.chunk for row in rows], DEVICE)
        if sources is not None:
            self.moved += list(sources) != list(range(len(rows)))
            tokens = [self._sampled[at] if at >= 0 else row.chunk.ids[0] for at, row in zip(sources, rows, strict=True)]
            batch.set_tokens(torch.tensor(tokens))
        self._rows = list(rows)
        return self._sample(self._decoder(batch).float())

    def verify(self, rows: Sequence[StepRow]) -> tuple[Tensor, Results]:
        self.verified += 1
        found = [self.run([row]) for row in rows]
        table = np.concatenate([results() for _, results in found])
        return torch.cat([logits for logits, _ in found]), lambda: table

    def resume(self, rows: Sequence[StepRow], logits: Sequence[Tensor]) -> tuple[Tensor, Results]:
        self.resumed += 1
        self._rows = list(rows)
        return self._sample(torch.cat(list(logits)))

    def repeat(self) -> tuple[Tensor, Results]:
        self.repeated += 1
        chunks = [replace(row.chunk, start=row.chunk.start + 1) for row in self._rows]
        self._rows = [replace(row, chunk=chunk) for row, chunk in zip(self._rows, chunks, strict=True)]
        batch = build_batch(chunks, DEVICE)
        batch.set_tokens(self._sampled[: len(chunks)])
        return self._sample(self._decoder(batch).float())

    def _sample(self, logits: Tensor) -> tuple[Tensor, Results]:
        settings = [processor_of(row) for row in self._rows]
        results = device_filters.sample_rows(logits, logits, settings, device_filters.REPORTED)
        self.set_tokens(results[:, device_filters.TOKEN].long())
        return logits, results.numpy


def processor_of(row: StepRow) -> Any:
    """The settings of a row, as a step knows them."""
    numbers = UniformStream(0, 0)
    numbers.state = row.uniform_state
    return SimpleNamespace(
        sampling=row.sampling,
        do_sample=row.sampling.temperature > 0,
        reply=SimpleNamespace(forced_id=None),
        uniform=lambda: numbers[row.chunk.start + 1 - row.reply_start],
        xtc_uniform=lambda: 1.0,
    )


def replace_runner(
    engine: TorchEngine, max_rows: int, max_prompt_tokens: int, speculate: bool = False, quantized: bool = False
) -> TorchStep:
    """Gives the engine the runner of steps. No request has been submitted yet."""
    old: Any = engine._runner
    step = TorchStep(old._forward, max_rows, max_prompt_tokens, quantized)
    memory = old._cache
    runner = StepRunner(
        step,  # type: ignore[arg-type]
        old._forward,
        memory._layout,
        memory._limit_bytes,
        old._context_length,
        old._threads,
        run_ahead=True,
        speculate=speculate,
    )
    engine._runner = engine._scheduler._runner = runner
    return step


@pytest.mark.parametrize("seed", range(8))
async def test_random_schedules(seed: int, folder_of: Callable[[str], Path], oracle: Callable[..., Reference]) -> None:
    rng = random.Random(seed)
    max_running = rng.choice([2, 4, 8])
    limits = SchedulerLimits(max_running=max_running, chunk_tokens=rng.choice([8, 24, 256]))
    room = rng.choice([1 << 30, 1 << 22, 768 * 600])  # down to where sequences are put back and pages evicted
    options = EngineOptions(limits=limits, cache_bytes=room, fused=True, compiled=False, run_ahead=True)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    step = replace_runner(engine, max_running, rng.choice([12, 64]))
    drawn = cases(rng)
    replies = await asyncio.gather(*(stop_and_go(engine, random.Random(i), case) for i, case in enumerate(drawn)))
    for case, reply_ids in zip(drawn, replies, strict=True):
        assert oracle(*case).agrees(reply_ids)
    assert step.mixed
    await engine.close()


async def test_drafts_change_no_reply(folder_of: Callable[[str], Path]) -> None:
    """Replies of a text that repeats itself, greedy and sampled, with drafts and without."""
    options = EngineOptions(limits=SchedulerLimits(max_running=4), fused=True, compiled=False, run_ahead=True)
    prompts = [Prompt(tuple(b"one two three four " * 5)), Prompt(tuple(b"abcabcabcabcabcabc"))]
    settings = [Sampling(temperature=0, max_tokens=120), Sampling(temperature=0.3, seed=4, max_tokens=120)]
    found = []
    for speculate in (False, True):
        engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
        step = replace_runner(engine, 16, 64, speculate)
        replies = [run(engine, prompt, sampling) for prompt in prompts for sampling in settings]
        alone = await run(engine, Prompt(tuple(b"xyxyxyxyxyxyxyxy")), settings[0])
        found.append([*(reply.ids for reply in await asyncio.gather(*replies)), alone.ids])
        assert bool(step.verified) is speculate
        await engine.close()
    assert found[0] == found[1]


async def test_drafts_of_a_model_change_no_reply(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model has steps of its own. It is the model itself, so it is right where tokens are the likeliest."""
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    monkeypatch.setattr(PassCosts, "extra", lambda *_: 0.0)
    monkeypatch.setattr(PassCosts, "drafting", lambda *_: 0.01)
    options = EngineOptions(limits=SchedulerLimits(max_running=4), fused=True, compiled=False, run_ahead=True)
    prompts = [Prompt(tuple(b"Tell me more")), Prompt(bytes_of(300)), Prompt(tuple(b"one, two"))]
    settings = [Sampling(temperature=0, max_tokens=60), Sampling(temperature=0.6, seed=4, max_tokens=60)]
    found = []
    for drafts in (False, True):
        engine, small = (load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options) for _ in range(2))
        step, drafting = replace_runner(engine, 16, 64, drafts), replace_runner(small, 16, 64)
        if drafts:
            engine._runner.draft_model = RunnerDraftModel(small._runner, 512, tiny.SIZE, tiny.SIZE)
        alone = [await run(engine, prompt, settings[0]) for prompt in prompts]
        if drafts:  # but for those behind a reply's end
            assert engine.statistics.accepted_tokens > 0.75 * engine.statistics.draft_tokens > 50
        alone += [await run(engine, prompt, settings[1]) for prompt in prompts]
        both = [run(engine, prompt, sampling) for prompt in prompts[:2] for sampling in settings]
        found.append([reply.ids for reply in (*alone, *await asyncio.gather(*both))])
        assert bool(step.verified) is bool(drafting.mixed or drafting.prefilled) is drafts
        if drafts:
            assert drafting.repeated > 50, "the next pass starts before a token is read"
            await engine.forget("nobody")  # by then all that ended is released
            assert not small._runner._slots  # type: ignore[attr-defined]
        for one in (engine, small):
            await one.close()
    assert found[0] == found[1]


def bytes_of(count: int) -> tuple[int, ...]:
    return tuple(random.Random(5).randrange(256) for _ in range(count))


async def test_cached_prompts_are_resumed(folder_of: Callable[[str], Path]) -> None:
    """Replies to a cached prompt, alone, several at once and beside one that runs, are those to a computed one."""
    options = EngineOptions(limits=SchedulerLimits(max_running=4), fused=True, compiled=False, run_ahead=True)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    step = replace_runner(engine, 4, 64)
    prompts = [tuple(b"the first prompt"), tuple(b"a second one of another length")]
    settings = [Sampling(temperature=0.8, seed=seed, max_tokens=40) for seed in range(3)]
    settings.append(Sampling(temperature=0.8, seed=3, max_tokens=40, repetition_penalty=1.3))
    fresh = [
        [(await run(engine, Prompt(ids, owner=f"fresh {number}"), one)).ids for number, one in enumerate(settings)]
        for ids in prompts
    ]
    for ids in prompts:
        await run(engine, Prompt(ids), Sampling(temperature=0, max_tokens=1))
    assert not step.resumed
    for ids, expected in zip(prompts, fresh, strict=True):
        assert [(await run(engine, Prompt(ids), one)).ids for one in settings] == expected
    assert step.resumed == len(prompts) * len(settings)
    at_once = await asyncio.gather(*(run(engine, Prompt(ids), settings[0]) for ids in prompts))
    assert [reply.ids for reply in at_once] == [expected[0] for expected in fresh]
    repeated = step.repeated
    async with engine.generate(
        Prompt(tuple(b"a long reply")), Sampling(temperature=0.8, seed=9, max_tokens=400)
    ) as one:
        async for output in one:
            if isinstance(output, Step):
                beside = await asyncio.gather(*(run(engine, Prompt(ids), settings[1]) for ids in prompts))
                break
    assert [reply.ids for reply in beside] == [expected[1] for expected in fresh]
    assert step.repeated > repeated
    await engine.close()


async def test_prompts_join_passes_that_run_ahead(folder_of: Callable[[str], Path]) -> None:
    """A reply goes on ahead of the host while prompts of others are computed beside it."""
    limits = SchedulerLimits(max_running=4, chunk_tokens=16)
    options = EngineOptions(limits=limits, fused=True, compiled=False, run_ahead=True)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    step = replace_runner(engine, 4, 64)
    long = Sampling(temperature=0.8, seed=3, max_tokens=200)
    texts = [bytes(range(at, at + 70)) for at in (0, 70, 140)]
    alone = [(await run(engine, Prompt(tuple(text), owner="alone"), long)).ids for text in texts]
    step.mixed = step.mixed_ahead = step.moved = 0
    ids: list[int] = []
    others: list[asyncio.Task[Run]] = []
    async with engine.generate(Prompt(tuple(texts[0])), long) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                ids.append(output.token_id)
            if len(ids) == 3 and not others:
                others = [asyncio.create_task(run(engine, Prompt(tuple(text)), long)) for text in texts[1:]]
    replies = [ids] + [reply.ids for reply in await asyncio.gather(*others)]
    assert replies == alone
    assert step.mixed_ahead >= 5  # of the 70 tokens of each prompt at most 16 in a pass
    assert step.moved >= 1
    assert step.repeated >= 20
    await engine.close()


@pytest.mark.parametrize("quantized", [False, True])
async def test_long_prompts_of_quantised_weights_are_computed_by_the_step(
    quantized: bool, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's operations would turn the weights into floats for each pass, more slowly than the kernels do."""
    monkeypatch.setattr(step_runner, "SHORT_PROMPT", 10)
    monkeypatch.setattr(step_runner, "SHORT_TEXT", 100)
    options = EngineOptions(limits=SchedulerLimits(chunk_tokens=16), fused=True, compiled=False)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    step = replace_runner(engine, 4, 8, quantized=quantized)
    await run(engine, Prompt(tuple(range(90))), Sampling(temperature=0, max_tokens=2))
    assert step.prefilled == 2
    await run(engine, Prompt(tuple(range(1, 251))), Sampling(temperature=0, max_tokens=2))
    # 64 tokens in each pass but the last, which belongs to the step: the third one comes after more than 100
    assert step.prefilled == 2 + (4 if quantized else 3)
    await engine.close()
