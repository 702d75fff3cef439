"""A draft model changes no reply: it is followed where it says what is sampled anyway, and left alone where it costs
more than it gains."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.engine_choice import LoadOptions, check_engine_options
from palaver.chat.model import check_draft_model
from palaver.engines.compiled import engine as compiled_engine
from palaver.engines.compiled.decoder import CompiledDecoder, CompiledRunner, Rows
from palaver.engines.compiled.engine import load, load_decoder
from palaver.engines.core import options as core_options
from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.draft_model import CHUNK, RunnerDraftModel
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.kv_cache import HostArray
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import ThreadCounts
from palaver.engines.core.speculation import DraftLookup, ModelDrafts, PassCosts
from palaver.engines.loader import load_engine
from palaver.engines.torch import load as load_torch
from palaver.errors import BadParameter
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt
from palaver.models.resolver import resolve_model
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.compiler import needs_a_compiler
from tests.engines.generate import continued, run
from tests.engines.test_speculation import SPROUT

GREEDY = Sampling(temperature=0, max_tokens=24, banned_ids=(tiny.END,))


class CountingDecoder:
    """Notes how many tokens each pass computes, and which."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.passes: list[int] = []
        self.token_ids: set[int] = set()

    def run(self, rows: Rows, threads: int, memory: HostArray | None = None) -> HostArray:
        self.passes.append(len(rows.array))
        self.token_ids.update(rows.array[:, 3].tolist())
        result: HostArray = self._decoder.run(rows, threads, memory)
        return result


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft model that is much smaller; drafts from the text are left out."""
    monkeypatch.setattr(PassCosts, "drafting", lambda *_: 0.01)
    monkeypatch.setattr(PassCosts, "extra", lambda *_: 0.01)
    monkeypatch.setattr(PassCosts, "sampling", lambda *_: 0.0)
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())


@asynccontextmanager
async def engine_with(model: Path, draft_model: Path | None, **options: Any) -> AsyncIterator[LocalEngine]:
    given = EngineOptions(draft_model=draft_model, drafts=draft_model is not None, **options)
    engine = load(model, vocabulary=tiny.VOCABULARY, options=given)
    try:
        yield engine
    finally:
        await engine.close()


def runner_of(engine: LocalEngine) -> CompiledRunner:
    """The draft model's."""
    drafter = engine._runner.draft_model
    assert isinstance(drafter, RunnerDraftModel)
    assert isinstance(drafter._runner, CompiledRunner)
    return drafter._runner


@needs_a_compiler
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
async def test_replies_stay_the_same(family: str, folder_of: Callable[[str], Path]) -> None:
    """With the model itself as draft model, which is right where tokens are greedy, and with another one."""
    chance = random.Random(1)

    def case(number: int) -> tuple[Prompt, Sampling]:
        settings = replace(GREEDY, temperature=chance.choice([0, 0.4, 1.0]), seed=number, logprobs=2)
        text = tuple(chance.randrange(256) for _ in range(chance.choice([1, 30, CHUNK, 300])))
        return Prompt(text), chance.choice(
            [settings, replace(settings, repetition_penalty=1.2), replace(settings, max_tokens=2)]
        )

    model = folder_of("qwen3")
    async with engine_with(model, None) as plain, engine_with(model, folder_of(family)) as drafting:

        async def same(prompt: Prompt, settings: Sampling) -> None:
            expected = await run(plain, prompt, settings)
            assert (await run(drafting, prompt, settings)).steps == expected.steps
            cut = await run(drafting, prompt, settings, stop_after=1)
            rest = await run(drafting, continued(prompt, cut.ids), settings) if len(expected.ids) > 1 else None
            assert cut.ids + (rest.ids if rest else []) == expected.ids

        for number in range(6):
            await same(*case(number))
        await asyncio.gather(*(same(*case(number)) for number in range(6, 14)))
        assert drafting.statistics.draft_tokens > 0
        assert drafting.statistics.accepted_tokens > 0 or family == "llama"


@needs_a_compiler
@pytest.mark.usefixtures("cheap")
async def test_nothing_is_computed_twice(folder_of: Callable[[str], Path]) -> None:
    """The draft model computes a prompt in chunks, and of the next turn only what is new."""
    async with engine_with(folder_of("qwen3"), folder_of("qwen3")) as engine:
        runner = runner_of(engine)
        runner._decoder = counting = CountingDecoder(runner._decoder)  # type: ignore[assignment]
        prompt = Prompt(tuple(random.Random(2).randrange(256) for _ in range(2 * CHUNK + 40)))
        first = await run(engine, prompt, GREEDY)
        assert engine.statistics.accepted_tokens == engine.statistics.draft_tokens > 0, "greedy models agree"
        assert max(counting.passes) == CHUNK
        computed, counting.passes = sum(counting.passes), []
        assert len(prompt.context_ids) < computed < len(prompt.context_ids) + 3 * len(first.ids)
        await run(engine, Prompt((*prompt.context_ids, *first.ids, *b"And then?")), GREEDY)
        assert sum(counting.passes) < 100


@needs_a_compiler
@pytest.mark.usefixtures("cheap")
async def test_without_memory_it_goes_on_without_drafts(folder_of: Callable[[str], Path]) -> None:
    async with (
        engine_with(folder_of("qwen3"), None) as plain,
        engine_with(folder_of("qwen3"), folder_of("llama")) as engine,
    ):
        runner = CompiledRunner(runner_of(engine)._decoder, 40_000, 512, ThreadCounts(1, 1))
        engine._runner.draft_model = small = RunnerDraftModel(runner, 512, tiny.SIZE, tiny.SIZE)
        prompt = Prompt(tuple(b"A text that is longer than the memory of the draft model. " * 5))
        assert (await run(engine, prompt, GREEDY)).steps == (await run(plain, prompt, GREEDY)).steps
        await engine.forget("nobody")  # by then all that ended is released
        assert not small._texts


@needs_a_compiler
@pytest.mark.usefixtures("cheap")
async def test_it_may_lack_tokens_of_the_large_model(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Its rows of weights end earlier: no other memory is read in place of a token that it lacks."""
    smaller = tiny.make("qwen3", tmp_path / "smaller", vocab_size=200)
    async with engine_with(folder_of("qwen3"), None) as plain, engine_with(folder_of("qwen3"), smaller) as engine:
        runner = runner_of(engine)
        runner._decoder = counting = CountingDecoder(runner._decoder)  # type: ignore[assignment]
        prompt = Prompt((tiny.START, *b"A text with markers", tiny.THINK, 255))
        expected = await run(plain, prompt, GREEDY)
        assert max(expected.ids) >= 200
        assert (await run(engine, prompt, GREEDY)).steps == expected.steps
        assert engine.statistics.draft_tokens > 0
        assert max(counting.token_ids) < 200


@needs_a_compiler
async def test_both_caches_take_what_is_free_beside_both_models(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load_one(checkpoint: Checkpoint, *given: Any) -> CompiledDecoder:
        loaded.append(checkpoint.name)
        return load_decoder(checkpoint, *given)

    monkeypatch.setattr(compiled_engine, "load_decoder", load_one)
    monkeypatch.setattr(core_options, "available_bytes", lambda: (10 - 4 * len(loaded)) << 20)
    async with engine_with(folder_of("qwen3"), folder_of("llama")) as engine:
        assert len(loaded) == 2
        assert engine.statistics.cache.limit_bytes == 1 << 20
        assert 0 < runner_of(engine).statistics.limit_bytes < 1 << 20


@needs_a_compiler
@pytest.mark.usefixtures("cheap")
async def test_its_cache_counts(folder_of: Callable[[str], Path]) -> None:
    async with (
        engine_with(folder_of("qwen3"), None, cache_bytes=1 << 22) as plain,
        engine_with(folder_of("qwen3"), folder_of("qwen3"), cache_bytes=1 << 22) as engine,
    ):
        for one in (plain, engine):
            await run(one, Prompt(tuple(b"Hello there")), GREEDY)
            await one.forget("nobody")  # by then all that ended is cached
        alone, both = plain.statistics.cache, engine.statistics.cache
        assert alone.limit_bytes == both.limit_bytes == 1 << 22
        assert both.kept_bytes == alone.kept_bytes + runner_of(engine).statistics.kept_bytes > alone.kept_bytes
        assert both.prompt_tokens == alone.prompt_tokens


@needs_a_compiler
@pytest.mark.usefixtures("cheap")
async def test_deleted_conversations_are_forgotten(folder_of: Callable[[str], Path]) -> None:
    async with engine_with(folder_of("qwen3"), folder_of("qwen3")) as engine:
        runner = runner_of(engine)
        await run(engine, Prompt(tuple(b"Hello there"), conversation="Ann"), GREEDY)
        await engine.forget("nobody")  # by then all that ended is cached
        assert runner._cache.statistics.kept_bytes > 0
        await engine.forget("Ann")
        assert runner._cache.statistics.kept_bytes == 0


def test_drafts_of_a_model_are_as_long_as_pays() -> None:
    costs = PassCosts()
    costs.record_plain(1, 1.0)
    costs.record_drafting(1, 3, 1.15)
    drafts = ModelDrafts()
    costs.record_model(1, 4, 0.04)
    assert drafts.length(15, costs, 1) >= 3
    assert drafts.length(1, costs, 1) == 1
    for _ in range(30):
        drafts.record(3, 0)
    assert drafts.length(15, costs, 1) == 0
    while drafts.length(15, costs, 1) == 0:  # it is tried again later
        pass
    costs.record_model(1, 1, 5.0)
    costs.record_model(1, 1, 5.0)
    costs.record_model(1, 1, 5.0)
    assert ModelDrafts().length(15, costs, 1) == 0, "it is as slow as the model"
    for _ in range(1000):
        costs.record_plain(1, 1.0)
    assert costs.drafting(1) < 1


def test_it_is_refused_where_it_can_not_be_used(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(BadParameter, match="no such file or folder"):
        LoadOptions(draft_model=tmp_path / "missing")
    with pytest.raises(BadParameter, match="--no-drafts"):
        LoadOptions(draft_model=SPROUT, drafts=False)
    sprout = LoadOptions(draft_model=SPROUT, engine="vllm")
    with pytest.raises(BadParameter, match="--draft-model"):
        check_engine_options(resolve_model(str(SPROUT)), sprout)
    options = EngineOptions(draft_model=folder_of("gpt2"))
    with pytest.raises(BadParameter, match="needs compiled steps for both models"):
        load_engine(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, device="cpu", options=options)
    for draft_model in ("gpt2", "qwen3"):
        options = EngineOptions(draft_model=folder_of(draft_model), compiled=False)
        with pytest.raises(BadParameter, match="needs two plain decoders"):
            load_torch(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, device="cpu", options=options)


def test_its_tokens_must_be_those_of_the_model(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(SPROUT)
    check_draft_model(SPROUT, tokenizer)
    other = tmp_path / "other"
    other.mkdir()
    text = (SPROUT / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<think>"', '"<hmm>"'))
    with pytest.raises(BadParameter, match="another vocabulary"):
        check_draft_model(other, tokenizer)
