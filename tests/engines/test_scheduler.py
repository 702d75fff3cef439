"""Random schedules: whatever joins, leaves, is cancelled or continued, each reply is the one it is alone."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from palaver.engines.core import scheduler
from palaver.engines.core.kv_cache import HostMemory
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.request import SequenceState
from palaver.engines.core.sampler import Logits, NextPass, SampledStep
from palaver.engines.core.token_masks import VocabularyIndex
from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, load
from palaver.engines.torch.device_sampler import DeviceLogits, DeviceSampler
from palaver.errors import CacheFull, EngineError, PalaverError, QueueFull
from palaver.generation import Ended, Finish, Prefilled, Prompt, Queued, Step
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.compiler import needs_a_compiler
from tests.engines.generate import continued, run
from tests.engines.reference import Reference, reference

ENDLESS = Sampling(temperature=0, banned_ids=(tiny.END,))
TEXTS = (b"Hello", b"Hello there", b"Hello there, how are you today? I am fine.", b"Q", b"zz" * 40, b"Tell me a story")


def cases(rng: random.Random) -> list[tuple[Prompt, Sampling, int]]:
    drawn = []
    for _ in range(6):
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            min_tokens=rng.choice([0, 5]),
            max_tokens=rng.randint(1, 24),
            seed=rng.randrange(1000),
        )
        drawn.append((Prompt(tuple(rng.choice(TEXTS)), owner=rng.choice(["", "me"])), sampling, rng.randrange(2)))
    return drawn


async def stop_and_go(engine: TorchEngine, rng: random.Random, case: tuple[Prompt, Sampling, int]) -> list[int]:
    """A reply with random stops, each followed by a continue."""
    prompt, sampling, choice = case
    reply_ids: list[int] = []
    for _ in range(rng.randrange(3)):
        out = await run(engine, continued(prompt, reply_ids), sampling, choice, stop_after=rng.randint(0, 6))
        reply_ids += out.ids
    return reply_ids + (await run(engine, continued(prompt, reply_ids), sampling, choice)).ids


@pytest.mark.parametrize(
    ("seed", "compiled"),
    [*((seed, False) for seed in range(16)), *(pytest.param(s, True, marks=needs_a_compiler) for s in range(16, 20))],
)
async def test_random_schedules(
    seed: int, compiled: bool, folder_of: Callable[[str], Path], oracle: Callable[..., Reference]
) -> None:
    rng = random.Random(seed)
    ahead = seed % 2 == 1 and not compiled
    limits = SchedulerLimits(max_running=rng.choice([2, 4, 32]), chunk_tokens=rng.choice([8, 32, 256]))
    room = rng.choice([1 << 30, 1 << 22, 768 * 600])  # down to where sequences are put back and pages evicted
    options = EngineOptions(limits=limits, cache_bytes=room, fused=compiled or rng.random() < 0.7, compiled=compiled)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=replace(options, run_ahead=ahead))
    runner: Any = engine._runner
    assert (runner.run_ahead is not None) is ahead
    runner._cache.widens_pools = rng.random() < 0.5  # as on an accelerator
    drawn = cases(rng)
    replies = await asyncio.gather(*(stop_and_go(engine, random.Random(i), case) for i, case in enumerate(drawn)))
    for case, reply_ids in zip(drawn, replies, strict=True):
        assert oracle(*case).agrees(reply_ids)
    assert engine.statistics.cache.used_bytes <= room
    await engine.close()


class Hasty(DeviceSampler):
    """Starts the next pass with a wrong token in some rows, which it then drops, as where a kernel can't decide."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.device("cpu"), on_device=True)
        self.rng = random.Random(seed)
        self.dropped = 0

    def logits(self, tensor: Tensor) -> Logits:
        return HastyLogits(tensor, self)


class HastyLogits(DeviceLogits):
    def sample(self, processors: Sequence[LogitsProcessor], next_pass: NextPass | None = None) -> list[SampledStep]:
        steps = super().sample(processors)
        sampler = self._sampler
        assert isinstance(sampler, Hasty)
        if next_pass is not None:
            wrong = [isinstance(step, PalaverError) or sampler.rng.random() < 0.3 for step in steps]
            next_pass.start(
                torch.tensor([65 if bad else step.token_id for bad, step in zip(wrong, steps, strict=True)])  # type: ignore[union-attr]
            )
            for row, bad in enumerate(wrong):
                if bad:
                    sampler.dropped += 1
                    next_pass.drop(row)
        return steps


@pytest.mark.parametrize("seed", range(4))
async def test_rows_that_ran_ahead_with_another_token_are_computed_again(
    seed: int, folder_of: Callable[[str], Path], oracle: Callable[..., Reference]
) -> None:
    options = EngineOptions(fused=seed % 2 == 0, compiled=False, run_ahead=True)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    sampler = Hasty(seed)
    runner: Any = engine._runner
    runner._sampler = sampler
    drawn = cases(random.Random(seed))
    replies = await asyncio.gather(*(stop_and_go(engine, random.Random(i), case) for i, case in enumerate(drawn)))
    for case, reply_ids in zip(drawn, replies, strict=True):
        assert oracle(*case).agrees(reply_ids)
    assert sampler.dropped > 5
    await engine.close()


@pytest.fixture
async def small(folder_of: Callable[[str], Path]) -> AsyncIterator[TorchEngine]:
    """Two at once, and six places to wait in: three for one owner."""
    limits = SchedulerLimits(max_running=2, max_waiting=6, chunk_tokens=16)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(limits=limits))
    yield engine
    await engine.close()


async def test_a_full_queue_refuses_and_reports_positions(small: TorchEngine) -> None:
    prompts = [Prompt((65 + i,)) for i in range(6)]
    opened = [small.generate(prompt, ENDLESS) for prompt in prompts]
    for generation in opened[:2]:
        await generation.__aenter__()
        assert isinstance(await anext(generation), Prefilled)
    for generation in opened[2:]:
        await generation.__aenter__()
    assert [await anext(generation) for generation in opened[2:5]] == [Queued(1), Queued(2), Queued(3)]
    with pytest.raises(QueueFull):
        await anext(opened[5])
    await opened[0].__aexit__(None, None, None)
    assert isinstance(await anext(opened[2]), Prefilled)
    assert await anext(opened[3]) == Queued(1)
    for generation in opened[1:5]:
        await generation.__aexit__(None, None, None)


async def test_one_owner_cant_keep_others_out(small: TorchEngine) -> None:
    """An owner that floods the queue gets a part of it, and others are admitted in between."""
    async with AsyncExitStack() as opened:
        flood = [small.generate(Prompt((65 + i,), owner="flood"), ENDLESS) for i in range(6)]
        for generation in flood[:2]:
            await opened.enter_async_context(generation)
            assert isinstance(await anext(generation), Prefilled)
        for generation in flood[2:]:
            await opened.enter_async_context(generation)
        assert [await anext(generation) for generation in flood[2:5]] == [Queued(1), Queued(2), Queued(3)]
        with pytest.raises(QueueFull):
            await anext(flood[5])
        other = await opened.enter_async_context(small.generate(Prompt((80,), owner="other"), ENDLESS))
        assert await anext(other) == Queued(2)
        assert [await anext(generation) for generation in flood[3:5]] == [Queued(3), Queued(4)]
        for generation in flood[:2]:
            generation.stop()
        assert isinstance(await anext(other), Prefilled)


async def test_those_that_wait_are_compared_once_not_at_every_step(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long prompt takes 25 steps; 40 others wait for what it computes, in as many comparisons."""
    limits = SchedulerLimits(max_running=2, max_waiting=1024, chunk_tokens=4)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(limits=limits))
    compared: list[SequenceState] = []
    common = SequenceState.common_prefix

    def count_comparison(one: SequenceState, other: SequenceState) -> int:
        compared.append(one)
        return common(one, other)

    monkeypatch.setattr(SequenceState, "common_prefix", count_comparison)
    seen = passes(engine, monkeypatch)
    prompt, sampling = Prompt(tuple(b"A long one. " * 34)), replace(ENDLESS, max_tokens=1)
    outs = await asyncio.gather(*(run(engine, replace(prompt), sampling) for _ in range(41)))
    assert len({tuple(out.ids) for out in outs}) == 1
    assert len(seen) > 25
    assert sum(map(sum, seen)) < len(prompt) + 2 * 41, "what they share is computed once"
    assert len(compared) <= 2 * 41
    await engine.close()


async def test_banned_strings_are_looked_up_off_the_engines_thread(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    look_up = VocabularyIndex._containing

    def recorded(index: VocabularyIndex, text: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return look_up(index, text)

    monkeypatch.setattr(VocabularyIndex, "_containing", recorded)
    sampling = replace(ENDLESS, banned_strings=("e", "of the"), max_tokens=8)
    for _ in range(2):
        out = await run(engine, Prompt(tuple(b"Say something")), sampling)
        assert ord("e") not in out.ids
    assert len(threads) == 2, "each string once"
    assert "palaver-engine" not in threads


async def test_a_long_reply_is_restored_between_the_tokens_of_others(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, sampling = Prompt((65, 66)), replace(ENDLESS, frequency_penalty=0.3, max_tokens=320)
    whole = await run(engine, prompt, sampling)
    monkeypatch.setattr(scheduler, "RESTORE_TOKENS", 16)
    appended = [0]
    append_token, step = LogitsProcessor.append_token, engine._scheduler.step

    def count_appended(processor: LogitsProcessor, token_id: int) -> None:
        appended[-1] += 1
        append_token(processor, token_id)

    def recorded() -> None:
        appended.append(0)
        step()

    monkeypatch.setattr(LogitsProcessor, "append_token", count_appended)
    monkeypatch.setattr(engine._scheduler, "step", recorded)
    async with engine.generate(Prompt((67,)), ENDLESS) as running:
        await anext(running)
        partial = continued(prompt, whole.ids[:300])
        rests = await asyncio.gather(*(run(engine, partial, sampling) for _ in range(2)))
        left = await run(engine, continued(prompt, whole.ids), sampling)
        await run(engine, partial, sampling, stop_after=0)
    assert [rest.ids for rest in rests] == [whole.ids[300:]] * 2
    assert (left.ids, left.ended) == ([], Ended(Finish.LENGTH))
    assert sum(appended) > 900
    assert max(appended) <= 3 * 16 + 3, "at submission and in a step, for all of them"


async def test_cancelled_while_waiting_in_prefill_and_decoding(small: TorchEngine) -> None:
    long = Prompt((65,) * 400)
    async with small.generate(long, ENDLESS) as prefilling, small.generate(Prompt((66,)), ENDLESS) as decoding:
        await anext(decoding)
        async with small.generate(Prompt((67,)), ENDLESS) as waiting:
            assert await anext(waiting) == Queued(1)
            for generation in (waiting, prefilling, decoding):
                generation.stop()
                rest = [output async for output in generation]
                assert rest[-1] == Ended(Finish.STOPPED)
    assert (small.statistics.running, small.statistics.waiting) == (0, 0)


async def test_two_hundred_cancelled_requests_leave_nothing_behind(engine: TorchEngine) -> None:
    async def begin_and_leave(i: int) -> None:
        await run(engine, Prompt((i % 200, 1, 2)), ENDLESS, stop_after=i % 3)

    await asyncio.gather(*(begin_and_leave(i) for i in range(200)))
    assert (await run(engine, Prompt((1,)), replace(ENDLESS, max_tokens=1))).ids
    assert (engine.statistics.running, engine.statistics.waiting) == (0, 0)


async def test_a_long_prompt_is_computed_between_the_tokens_of_others(small: TorchEngine) -> None:
    """400 tokens in chunks of 16 are 25 steps: the running reply says a token in each."""
    async with small.generate(Prompt((66,)), ENDLESS) as running, small.generate(Prompt((65,) * 400), ENDLESS) as long:
        token_count = 0
        filled = asyncio.ensure_future(anext(long))
        async for output in running:
            token_count += isinstance(output, Step)
            if filled.done():
                break
    assert token_count >= 20


def passes(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many tokens of each sequence are computed in each pass from now on."""
    seen: list[list[int]] = []
    compute = engine._runner.run

    def recorded(sequences: Any, counts: list[int], need_logits: bool = True) -> Any:
        seen.append(list(counts))
        return compute(sequences, counts, need_logits)

    monkeypatch.setattr(engine._runner, "run", recorded)
    return seen


async def test_prompts_that_delay_no_reply_get_their_first_token_in_the_same_pass(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = passes(engine, monkeypatch)
    sampling = replace(ENDLESS, max_tokens=3)
    texts = (b"Alone", b"Alone, and longer", b"Quite another one")
    alone = await run(engine, Prompt(tuple(texts[0])), sampling)
    assert seen == [[5], [1], [1]]
    assert alone.prefilled == Prefilled(5, 0)
    seen.clear()
    outs = await asyncio.gather(*(run(engine, Prompt(tuple(text)), sampling) for text in texts[1:]))
    assert sum(map(sum, seen)) == sum(map(len, texts[1:])) - len(texts[0]) + 2 * 2
    model = tiny.build("qwen3")
    for text, out in zip(texts, [alone, *outs], strict=True):
        assert out.ids == reference(model, Prompt(tuple(text)), sampling).ids
    seen.clear()
    async with engine.generate(Prompt((67,)), ENDLESS) as running:
        await anext(running)
        await run(engine, Prompt(tuple(b"Beside another")), replace(ENDLESS, max_tokens=1))
    assert [13] in seen, "the reply that runs is not computed with a prompt"


async def test_exactly_computed_tokens_come_in_passes_of_their_own(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder_of("llama"), vocabulary=tiny.VOCABULARY, options=EngineOptions(exact=True, compiled=False))
    seen = passes(engine, monkeypatch)
    await run(engine, Prompt(tuple(b"Alone")), replace(ENDLESS, max_tokens=2))
    await engine.close()
    assert seen == [[4], [1], [1]]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next", "mamba"])
@pytest.mark.parametrize("length", [1, 7, 32, 33, 64])
async def test_a_retry_begins_without_a_pass(
    family: str, length: int, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from the very logits of the first attempt."""
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False))
    seen = passes(engine, monkeypatch)
    prompt = Prompt(tuple(b"A question that is need_logits again, until the answer is liked by all."[:length]))
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=5, logprobs=5, banned_ids=(tiny.END,))
    first = await run(engine, prompt, sampling)
    for again in (sampling, replace(sampling, seed=7), replace(sampling, max_tokens=40)):
        seen.clear()
        retry = await run(engine, prompt, again)
        assert retry.prefilled == Prefilled(length, length)
        assert seen == [[1]] * (len(retry.ids) - 1), "no pass before the first token"
        assert retry.steps[0].alternatives == first.steps[0].alternatives, "to the last bit"
        if again.seed == sampling.seed:
            assert retry.ids[:5] == first.ids
    one = await run(engine, prompt, replace(sampling, max_tokens=1))
    assert (one.ids, one.prefilled) == (first.ids[:1], Prefilled(length, length))
    statistics = engine.statistics.cache
    assert statistics.hit_tokens == 4 * length
    assert statistics.used_bytes >= tiny.SIZE * 4
    await engine.close()


async def test_what_is_kept_of_prompts_is_within_the_bound_and_goes_with_its_pages(
    folder_of: Callable[[str], Path],
) -> None:
    room = 768 * 600
    engine = load(
        folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(cache_bytes=room, compiled=False)
    )
    sampling = replace(ENDLESS, max_tokens=1)
    prompts = [Prompt(tuple(f"Question {number}".encode() * 4)) for number in range(40)]
    for prompt in prompts:
        await run(engine, prompt, sampling)
        assert engine.statistics.cache.used_bytes <= room
    latest, oldest = await run(engine, prompts[-1], sampling), await run(engine, prompts[0], sampling)
    assert latest.prefilled == Prefilled(len(prompts[-1]), len(prompts[-1]))
    assert oldest.prefilled is not None
    assert oldest.prefilled.cached_tokens < len(prompts[0])
    assert engine.statistics.cache.evictions > 0
    await engine.close()


async def test_more_than_the_cache_holds_fails_alone(folder_of: Callable[[str], Path]) -> None:
    options = EngineOptions(cache_bytes=768 * 300)
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    with pytest.raises(CacheFull, match="there is room for 256"):
        await run(engine, Prompt((65,) * 400), ENDLESS)
    with pytest.raises(CacheFull):
        await run(engine, Prompt((65,) * 20), ENDLESS)
    assert len((await run(engine, Prompt((65,) * 20), replace(ENDLESS, max_tokens=50))).ids) == 50
    await engine.close()


async def test_a_request_that_cant_begin_fails_alone(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = engine._runner.allocate

    def poisoned(sequence: Any) -> None:
        if sequence.token_ids[0] == 66:
            raise RuntimeError("no memory")
        allocate(sequence)

    monkeypatch.setattr(engine._runner, "allocate", poisoned)
    sampling = replace(ENDLESS, max_tokens=8)
    good, bad = await asyncio.gather(
        *(run(engine, Prompt((token, 1)), sampling) for token in (65, 66)), return_exceptions=True
    )
    assert isinstance(bad, EngineError)
    assert not isinstance(good, BaseException)
    assert (await run(engine, Prompt((65, 1)), sampling)).ids == good.ids


async def test_a_failing_forward_fails_its_request_alone(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    run_before = engine._runner.run

    def poisoned(sequences: Any, *rest: Any) -> Any:
        if any(6 in sequence.token_ids for sequence in sequences):
            raise RuntimeError("poison")
        return run_before(sequences, *rest)

    monkeypatch.setattr(engine._runner, "run", poisoned)
    sampling = replace(ENDLESS, max_tokens=8, banned_ids=(tiny.END, 6))
    good, bad, fine = await asyncio.gather(
        *(run(engine, Prompt((token, 70, 71)), sampling) for token in (5, 6, 7)), return_exceptions=True
    )
    assert isinstance(bad, EngineError)
    assert "poison" in str(bad)
    assert not isinstance(good, BaseException)
    assert not isinstance(fine, BaseException)
    assert len(good.ids) == len(fine.ids) == 8


def exhaust_memory(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> list[int]:
    """From now on no copy of keys and values can be allocated. Returns the sizes that were tried."""
    tried: list[int] = []

    def fail_deeply(tensor: torch.Tensor, memo: Any) -> torch.Tensor:
        return fail(tensor)

    def fail(tensor: Any, **options: Any) -> Any:
        tried.append(tensor.nbytes)
        raise raised

    monkeypatch.setattr(torch.Tensor, "clone", fail)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", fail_deeply)
    monkeypatch.setattr(HostMemory, "clone", lambda memory, array: fail(array))
    return tried


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize(
    "raised", [torch.OutOfMemoryError("no memory"), RuntimeError("can't allocate memory"), MemoryError()]
)
async def test_a_full_memory_only_costs_what_would_have_been_kept(
    family: str, raised: Exception, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY)
    prompt, sampling = Prompt(tuple(b"Kept where there is room")), replace(ENDLESS, max_tokens=6)
    expected = reference(tiny.build(family), prompt, sampling).ids
    with monkeypatch.context() as patch:
        tried = exhaust_memory(patch, raised)
        first = await run(engine, prompt, sampling)
        stopped = await run(engine, Prompt(tuple(b"Another")), ENDLESS, stop_after=2)
    assert tried, "it was tried"
    assert (first.ids, first.ended) == (expected, Ended(Finish.LENGTH))
    assert len(stopped.ids) == 2
    again = await asyncio.gather(*(run(engine, prompt, sampling) for _ in range(3)))
    assert [out.ids for out in again] == [expected] * 3
    assert (engine.statistics.running, engine.statistics.waiting) == (0, 0)
    await engine.close()


async def test_a_lost_device_still_ends_the_thread(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class AcceleratorError(RuntimeError):
        """As in versions of torch that have it."""

    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
    exhaust_memory(monkeypatch, AcceleratorError("the device is gone"))
    with pytest.raises(EngineError, match="thread failed"):
        await run(engine, Prompt((65, 66)), ENDLESS)
    await engine.close()


async def test_the_threads_death_ends_all_and_says_so(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
    async with engine.generate(Prompt((65,)), ENDLESS) as running:
        await anext(running)

        def die() -> None:
            raise SystemError("the device is gone")

        monkeypatch.setattr(engine._scheduler, "step", die)
        with pytest.raises(EngineError, match=r"thread failed \(SystemError: the device is gone\)"):
            async for _ in running:
                pass
    with pytest.raises(EngineError, match="thread failed"):
        await run(engine, Prompt((65,)), ENDLESS)
    await engine.close()
