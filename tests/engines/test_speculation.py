"""Drafts change nothing but the time: every reply is, to the last bit, the one without them."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from palaver.engines.compiled.engine import load
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.core.speculation import DRAFT_LENGTHS, MAX_PAUSE, NGRAM, DraftLookup
from palaver.generation import Prompt, Step
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.compiler import needs_a_compiler
from tests.engines.generate import continued, run

REPEATED = tuple(b"one two three four five six seven, " * 4)
SAMPLINGS = (
    Sampling(temperature=0, max_tokens=60, logprobs=3),
    Sampling(temperature=0, max_tokens=60, banned_ids=(tiny.END,), repetition_penalty=1.05),
    Sampling(temperature=0.3, top_k=4, max_tokens=50, seed=3, logprobs=2),
    Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.2, max_tokens=40, seed=4),
    Sampling(temperature=0, max_tokens=60, stop=("e", "q"), min_tokens=3),
    Sampling(temperature=0.2, max_tokens=7, seed=5),
    Sampling(temperature=0.5, max_tokens=50, seed=6, logit_bias=((ord("a"), 90.0),)),
)


def test_what_followed_before_is_the_draft() -> None:
    text = list(b"abcdefgh-abc")
    lookup = DraftLookup(text)
    assert bytes(lookup.propose(15)) == b"def"
    assert bytes(lookup.propose(2)) == b"de"
    text += b"xyz"
    assert list(lookup.propose(15)) == []
    text += b"bcd"
    assert bytes(lookup.propose(15)) == b"efg"


def test_drafts_grow_with_success_and_pause_after_failures() -> None:
    lookup = DraftLookup(list(b"0123456789abcdefghijklmnopqrstuvwxyz" * 2))
    for length in (*DRAFT_LENGTHS, DRAFT_LENGTHS[-1]):
        assert len(lookup.propose(99)) == length
        lookup.record(length, length)
    pauses = []
    for _ in range(8):
        proposed = lookup.propose(99)
        lookup.record(len(proposed), 0)
        pauses.append(next(n for n in range(2 * MAX_PAUSE) if lookup.propose(99)))
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE > pauses[0] > 0


@contextmanager
def engines(folder: Path, limits: SchedulerLimits | None = None) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    options = EngineOptions(limits=limits, cache_bytes=1 << 22)
    pair = [load(folder, vocabulary=tiny.VOCABULARY, options=replace(options, speculate=on)) for on in (True, False)]
    try:
        yield pair[0], pair[1]
    finally:
        for engine in pair:
            asyncio.run(engine.close())


async def steps(engine: LocalEngine, prompt: Prompt, sampling: Sampling) -> list[Step]:
    async with engine.generate(prompt, sampling) as outputs:
        return [output async for output in outputs if isinstance(output, Step)]


@needs_a_compiler
def test_replies_alone_and_in_company_are_those_without_drafts(folder_of: Callable[[str], Path]) -> None:
    prompts = [Prompt(REPEATED), Prompt(tuple(b"x")), Prompt((*REPEATED[:70], *b"zz")), Prompt(tuple(b"abcabcab"))]
    cases = [(prompt, sampling) for prompt in prompts for sampling in SAMPLINGS]

    async def all_of(engine: LocalEngine, together: int) -> list[list[Step]]:
        replies: list[list[Step]] = []
        for start in range(0, len(cases), together):
            part = cases[start : start + together]
            replies += await asyncio.gather(*(steps(engine, *case) for case in part))
        return replies

    with engines(folder_of("qwen3")) as (drafting, plain):
        expected = asyncio.run(all_of(plain, 1))
        assert plain.statistics.draft_tokens == 0
        assert asyncio.run(all_of(drafting, 1)) == expected
        assert drafting.statistics.accepted_tokens > 100, "one of the settings repeats a letter"
        for together in (3, 8, len(cases)):
            assert asyncio.run(all_of(drafting, together)) == expected


@needs_a_compiler
@pytest.mark.parametrize("seed", range(3))
def test_stopped_and_continued_with_little_room(seed: int, folder_of: Callable[[str], Path]) -> None:
    rng = random.Random(seed)
    limits = SchedulerLimits(max_running=rng.choice([2, 4]), chunk_tokens=rng.choice([8, 64]))

    async def stop_and_go(engine: LocalEngine, prompt: Prompt, sampling: Sampling) -> list[int]:
        ids: list[int] = []
        for stop in (rng.randint(1, 9), rng.randint(1, 20)):
            ids += (await run(engine, continued(prompt, ids), sampling, stop_after=stop)).ids
        return ids + (await run(engine, continued(prompt, ids), sampling)).ids

    async def compare(drafting: LocalEngine, plain: LocalEngine) -> None:
        cases = [(Prompt(REPEATED[: rng.randint(NGRAM, 120)]), sampling) for sampling in SAMPLINGS]
        cut = await asyncio.gather(*(stop_and_go(drafting, *case) for case in cases))
        assert cut == [(await run(plain, *case)).ids for case in cases]

    with engines(folder_of("qwen3"), limits) as (drafting, plain):
        asyncio.run(compare(drafting, plain))
