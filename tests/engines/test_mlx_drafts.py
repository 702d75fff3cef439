"""The MLX engine verifies drafts: with --exact replies are those without drafts, with --drafts up to rounding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from palaver.engines.mlx.loader import is_installed

if not is_installed():
    pytest.skip("NOTHING IS SHOWN HERE: mlx and mlx-lm are not installed", allow_module_level=True)

from palaver.engines.base import BY_BATCH, BY_TEXT
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.speculation import DraftLookup
from palaver.engines.mlx.engine import load
from palaver.engines.mlx.runner import MLXRunner
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.drafts import count_same, make_free
from tests.engines.generate import continued, run

REPEATED = tuple(b"one two three four five six seven, " * 4)
ROUNDING = 1e-3
Starts = Callable[..., LocalEngine]


@pytest.fixture
async def start(folder_of: Callable[[str], Path]) -> AsyncIterator[Starts]:
    engines: list[LocalEngine] = []

    def load_family(family: str = "qwen3", draft_model: str | None = None, **options: Any) -> LocalEngine:
        given = EngineOptions(draft_model=None if draft_model is None else folder_of(draft_model), **options)
        engines.append(load(folder_of(family), vocabulary=tiny.VOCABULARY, device="cpu", options=given))
        return engines[-1]

    yield load_family
    for engine in engines:
        await engine.close()


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    make_free(monkeypatch)


def cases(seed: int, count: int) -> list[tuple[Prompt, Sampling]]:
    chance = random.Random(seed)
    settings = [
        Sampling(temperature=0, max_tokens=50, logprobs=2, banned_ids=(tiny.END,)),
        Sampling(temperature=0.4, top_k=8, max_tokens=40, logprobs=2, banned_ids=(tiny.END,)),
        Sampling(temperature=0, max_tokens=30, repetition_penalty=1.1, banned_ids=(tiny.END,)),
    ]
    return [(Prompt(REPEATED[: chance.randint(9, 130)]), chance.choice(settings)) for _ in range(count)]


async def test_exact_replies_are_those_without_drafts(start: Starts) -> None:
    plain, drafting, given = start(exact=True, drafts=False), start(exact=True), cases(1, 8)
    if drafting.info.exactness != BY_TEXT:
        pytest.skip(f"NOTHING IS SHOWN HERE: on this processor, bits {drafting.info.exactness}")
    assert "rounding" not in drafting.info.steps
    expected = [await run(plain, *case) for case in given]
    assert [(await run(drafting, *case)).steps for case in given] == [one.steps for one in expected]
    together = await asyncio.gather(*(run(drafting, *case) for case in given))
    assert [one.steps for one in together] == [one.steps for one in expected]

    async def stop_and_go(prompt: Prompt, sampling: Sampling) -> list[int]:
        cut = await run(drafting, prompt, sampling, stop_after=11)
        return cut.ids + (await run(drafting, continued(prompt, cut.ids), sampling)).ids

    cut = await asyncio.gather(*(stop_and_go(*case) for case in given))
    assert cut == [one.ids for one in expected]
    assert plain.statistics.draft_tokens == 0
    assert drafting.statistics.accepted_tokens > 50


async def test_drafts_up_to_rounding(start: Starts) -> None:
    plain, drafting, given = start(), start(drafts=True), cases(2, 8)
    assert plain._runner.verify_drafts is None
    assert drafting.info.steps == f"{plain.info.steps}, drafts up to rounding"
    assert drafting.info.exactness == BY_BATCH
    expected = [await run(plain, *case) for case in given]
    alone = [await run(drafting, *case) for case in given]
    together = await asyncio.gather(*(run(drafting, *case) for case in given))
    for replies in (alone, together):
        assert count_same(replies, expected, ROUNDING) >= 6
    assert drafting.statistics.accepted_tokens > 20


async def test_rejected_tokens_are_not_in_the_cache(start: Starts) -> None:
    engine = start(drafts=True)
    for prompt, sampling in cases(3, 5):
        reply = await run(engine, prompt, sampling)
        text = (*prompt.context_ids, *reply.ids)
        last = Sampling(temperature=0, max_tokens=1, logprobs=2)
        after = await run(engine, Prompt((*text, 65, 66)), last)
        assert after.prefilled is not None
        assert after.prefilled.cached_tokens == len(text) - 1
        fresh = await run(engine, Prompt((*text, 65, 66), owner="b"), last)
        assert after.steps[0].logprob == pytest.approx(fresh.steps[0].logprob, abs=ROUNDING)


async def test_a_draft_model_drafts_where_nothing_repeats(start: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the model itself, so it is right where tokens are the likeliest."""
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    plain, drafting, given = start(), start(drafts=True, draft_model="qwen3"), cases(4, 6)
    expected = [await run(plain, *case) for case in given]
    alone = [await run(drafting, *case) for case in given]
    together = await asyncio.gather(*(run(drafting, *case) for case in given))
    for replies in (alone, together):
        assert count_same(replies, expected, ROUNDING) >= 4
    assert drafting.statistics.accepted_tokens > drafting.statistics.draft_tokens / 3 > 30
    drafter: Any = drafting._runner.draft_model
    assert isinstance(drafter._runner, MLXRunner)
    await drafting.forget("nobody")  # by then all that ended is released
    assert not drafter._runner._running
    assert not drafter._texts


async def test_a_failed_pass_of_the_draft_model_costs_one_draft(start: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    engine = start(drafts=True, draft_model="qwen3")
    drafter: Any = engine._runner.draft_model
    errors: list[Exception] = []
    passes, logits, propose = [], drafter._runner._model.logits, drafter.propose

    def fail_once(*given: Any) -> Any:
        passes.append(given)
        if len(passes) == 12:
            raise RuntimeError("once")
        return logits(*given)

    def note_errors(*given: Any) -> Any:
        try:
            return propose(*given)
        except Exception as error:
            errors.append(error)
            raise

    monkeypatch.setattr(drafter._runner._model, "logits", fail_once)
    monkeypatch.setattr(drafter, "propose", note_errors)
    settings = Sampling(temperature=0, max_tokens=120, banned_ids=(tiny.END,))
    await run(engine, Prompt(tuple(b"A text that repeats nothing")), settings)
    assert [str(error) for error in errors] == ["once"]
    assert engine.statistics.accepted_tokens > 50


async def test_drafts_are_refused_where_they_can_not_be_verified(start: Starts) -> None:
    with pytest.raises(BadParameter, match="--draft-model"):
        start(draft_model="qwen3")
    with pytest.raises(BadParameter, match="--draft-model"):
        start(drafts=True, draft_model="mamba")
    with pytest.raises(BadParameter, match="--drafts"):
        start("mamba", drafts=True)
