"""llama.cpp verifies drafts where it is asked to: replies are those without drafts, up to rounding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.chat.engine_choice import LoadOptions
from palaver.engines.base import BY_BATCH, Fingerprint
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.speculation import DraftLookup
from palaver.engines.llamacpp.engine import LlamaEngine, load
from palaver.engines.llamacpp.runner import LlamaRunner
from palaver.errors import BadParameter
from palaver.formats.gguf_tokenizer import load_gguf_tokenizer
from palaver.generation import Prompt
from palaver.gguf import read_gguf
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from tests.engines.drafts import count_same, make_free
from tests.engines.generate import continued, run
from tests.gguf_files import convert_qwen3, make_mamba

END = 2
ROUNDING = 0.05
"""By how much log-probabilities of the tests' model in f32 may differ: its keys and values are f16."""

Opens = Callable[..., LlamaEngine]


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_qwen3(resolve_folder("sprout"), tmp_path_factory.mktemp("gguf") / "sprout.gguf")


@pytest.fixture
async def opens(sprout: Path) -> AsyncIterator[Opens]:
    vocabulary = tuple(load_gguf_tokenizer(read_gguf(sprout)).vocabulary)
    opened: list[LlamaEngine] = []

    def make(**options: object) -> LlamaEngine:
        chosen = EngineOptions(**{"threads": 1, "context": 512, "max_running": 4, **options})  # type: ignore[arg-type]
        opened.append(load(sprout, vocabulary=vocabulary, options=chosen))
        return opened[-1]

    yield make
    for engine in opened:
        await engine.close()


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    make_free(monkeypatch)


def cases(seed: int, count: int) -> list[tuple[Prompt, Sampling]]:
    chance = random.Random(seed)
    text = [chance.randrange(300, 900) for _ in range(40)] * 5

    def case(number: int) -> tuple[Prompt, Sampling]:
        settings = {"temperature": chance.choice([0, 0.7]), "repetition_penalty": chance.choice([1, 1, 1.1])}
        sampling = Sampling(seed=number, max_tokens=40, logprobs=2, banned_ids=(END, 0), **settings)  # type: ignore[arg-type]
        return Prompt(tuple(text[: chance.randint(45, 190)])), sampling

    return [case(number) for number in range(count)]


@pytest.mark.usefixtures("free_drafts")
async def test_replies_alone_together_and_continued(opens: Opens) -> None:
    plain, drafting, given = opens(), opens(drafts=True), cases(1, 12)
    assert drafting.info.steps == f"{plain.info.steps}, drafts up to rounding"
    assert drafting.info.exactness == BY_BATCH
    assert Fingerprint.parse(drafting.info.fingerprint) != Fingerprint.parse(plain.info.fingerprint)
    expected = [await run(plain, *case) for case in given]
    alone = [await run(drafting, *case) for case in given]
    together = await asyncio.gather(*(run(drafting, *case) for case in given))
    assert count_same(alone, expected, ROUNDING) >= 8
    assert count_same(together, expected, ROUNDING) >= 8
    assert plain.statistics.draft_tokens == 0
    assert drafting.statistics.accepted_tokens > 100

    async def stop_and_go(prompt: Prompt, sampling: Sampling) -> list[int]:
        cut = await run(drafting, prompt, sampling, stop_after=7)
        return cut.ids + (await run(drafting, continued(prompt, cut.ids), sampling)).ids

    cut = await asyncio.gather(*(stop_and_go(*case) for case in given))
    assert sum(one == other.ids for one, other in zip(cut, expected, strict=True)) >= 8


@pytest.mark.usefixtures("free_drafts")
async def test_rejected_tokens_are_not_in_the_cache(opens: Opens) -> None:
    """The next turn computes only what is new, and what the context has are the tokens of the reply."""
    engine = opens(drafts=True)
    for prompt, sampling in cases(2, 6):
        reply = await run(engine, prompt, sampling)
        runner = engine._runner
        assert isinstance(runner, LlamaRunner)
        text = (*prompt.context_ids, *reply.ids)
        after = await run(engine, Prompt((*text, 350, 351)), Sampling(temperature=0, max_tokens=1, logprobs=2))
        assert after.prefilled is not None
        assert after.prefilled.cached_tokens == len(text) - 1
        fresh = await run(
            engine, Prompt((*text, 350, 351), owner="b"), Sampling(temperature=0, max_tokens=1, logprobs=2)
        )
        assert after.steps[0].logprob == pytest.approx(fresh.steps[0].logprob, abs=ROUNDING)


@pytest.mark.usefixtures("free_drafts")
async def test_a_draft_model_drafts_where_nothing_repeats(
    opens: Opens, sprout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    plain, drafting, given = opens(), opens(drafts=True, draft_model=sprout), cases(3, 8)
    expected = [await run(plain, *case) for case in given]
    alone = [await run(drafting, *case) for case in given]
    together = await asyncio.gather(*(run(drafting, *case) for case in given))
    assert count_same(alone, expected, ROUNDING) >= 5
    assert count_same(together, expected, ROUNDING) >= 5
    statistics = drafting.statistics
    assert statistics.accepted_tokens > statistics.draft_tokens / 3 > 30, "it is the model itself"


async def test_drafts_are_refused_where_they_can_not_be_verified(opens: Opens, sprout: Path, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="--drafts"):
        opens(drafts=True, exact=True)
    with pytest.raises(BadParameter, match="needs --drafts"):
        opens(draft_model=sprout)
    with pytest.raises(BadParameter, match="takes another GGUF file"):
        opens(drafts=True, draft_model=tmp_path)
    mamba = make_mamba(tmp_path / "mamba.gguf", (resolve_folder("sprout") / "tokenizer.json").read_text())
    with pytest.raises(BadParameter, match="--drafts"):
        load(mamba, vocabulary=(), options=EngineOptions(drafts=True))
    with pytest.raises(BadParameter, match="--draft-model"):
        opens(drafts=True, draft_model=mamba)
    assert LoadOptions(drafts=True).drafts
