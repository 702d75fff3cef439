"""torch's own operations verify drafts where they are asked to: replies are those without drafts, up to rounding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from palaver.engines.base import BY_BATCH
from palaver.engines.core.speculation import DraftLookup
from palaver.engines.torch import EngineOptions, TorchEngine, load
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.drafts import count_same, make_free
from tests.engines.generate import continued, run

REPEATED = tuple(b"one two three four five six seven, " * 4)
ROUNDING = 1e-3
Starts = Callable[..., TorchEngine]


@pytest.fixture
async def start(folder_of: Callable[[str], Path]) -> AsyncIterator[Starts]:
    engines: list[TorchEngine] = []

    def load_family(family: str, **options: Any) -> TorchEngine:
        given = EngineOptions(compiled=False, **options)
        engines.append(load(folder_of(family), vocabulary=tiny.VOCABULARY, device="cpu", options=given))
        return engines[-1]

    yield load_family
    for engine in engines:
        await engine.close()


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    make_free(monkeypatch)


def cases(seed: int, count: int) -> list[tuple[Prompt, Sampling]]:
    chance = random.Random(seed)
    settings = [
        Sampling(temperature=0, max_tokens=50, logprobs=2, banned_ids=(tiny.END,)),
        Sampling(temperature=0.4, top_k=8, max_tokens=40, logprobs=2, seed=seed, banned_ids=(tiny.END,)),
        Sampling(temperature=0, max_tokens=30, logprobs=1, repetition_penalty=1.1, banned_ids=(tiny.END,)),
    ]
    same = Sampling(temperature=0, max_tokens=40, logprobs=1, logit_bias=((ord("a"), 90.0),))
    drawn = [(Prompt(REPEATED[: chance.randint(9, 130)]), chance.choice(settings)) for _ in range(count - 1)]
    return [*drawn, (Prompt(tuple(b"always the same")), same)]


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "gpt2"])
async def test_replies_alone_together_and_continued(family: str, ahead: bool, start: Starts) -> None:
    """Of a plain decoder and of the library's code, with windows and with absolute positions, too."""
    plain, drafting = start(family), start(family, drafts=True, run_ahead=ahead)
    assert plain._runner.verify_drafts is None
    assert drafting.info.steps == f"{plain.info.steps}, drafts up to rounding"
    assert drafting.info.exactness == BY_BATCH
    given = cases(1, 8)
    expected = [await run(plain, *case) for case in given]
    alone = [await run(drafting, *case) for case in given]
    together = await asyncio.gather(*(run(drafting, *case) for case in given))
    for replies in (alone, together):
        assert count_same(replies, expected, ROUNDING) >= 7
    assert drafting.statistics.accepted_tokens > 20

    async def stop_and_go(prompt: Prompt, sampling: Sampling) -> list[int]:
        cut = await run(drafting, prompt, sampling, stop_after=11)
        return cut.ids + (await run(drafting, continued(prompt, cut.ids), sampling)).ids

    cut = await asyncio.gather(*(stop_and_go(*case) for case in given))
    assert sum(one == other.ids for one, other in zip(cut, expected, strict=True)) >= 7


@pytest.mark.usefixtures("free_drafts")
async def test_a_draft_model_drafts_where_nothing_repeats(
    start: Starts, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the model itself, so it is right where tokens are the likeliest."""
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    plain, drafting = start("qwen3"), start("qwen3", drafts=True, draft_model=folder_of("qwen3"))
    given = cases(4, 6)
    expected = [await run(plain, *case) for case in given]
    alone = [await run(drafting, *case) for case in given]
    together = await asyncio.gather(*(run(drafting, *case) for case in given))
    for replies in (alone, together):
        assert count_same(replies, expected, ROUNDING) >= 5
    assert drafting.statistics.accepted_tokens > drafting.statistics.draft_tokens / 3 > 30


async def test_drafts_are_refused_where_they_can_not_be_verified(start: Starts) -> None:
    with pytest.raises(BadParameter, match="--drafts"):
        start("qwen3", drafts=True, exact=True)
    with pytest.raises(BadParameter, match="--drafts"):
        start("mamba", drafts=True)
