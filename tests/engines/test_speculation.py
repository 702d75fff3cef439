"""Drafts change nothing but the time: every reply is, to the last bit, the one without them."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import palaver.models
from palaver.constraints import Constraint, Grammar, MarkerConstraint
from palaver.engines.compiled.engine import load
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.request import SequenceState
from palaver.engines.core.sampler import Logits
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.core.speculation import (
    ALLOWANCE,
    DRAFT_LENGTHS,
    FIRST_CREDIT,
    FORGOTTEN_AFTER,
    GUESSED_EXTRA,
    MAX_ROWS,
    NGRAM,
    OPENING_TOKENS,
    RESUME_TOKENS,
    DraftLookup,
    PassCosts,
    ReplyOpenings,
)
from palaver.errors import PalaverError
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Ended, Output, Prompt, Step
from palaver.messages import assistant, user
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


class FixedCosts(PassCosts):
    """Each draft token costs so much, whatever was measured."""

    def __init__(self, extra: float) -> None:
        super().__init__()
        self._extra = extra

    def extra(self, sequences: int, drafted: int) -> float:
        return self._extra


def draft(text: bytes, most: int = 15, extra: float = 0.0) -> bytes:
    return bytes(DraftLookup(list(text)).propose(most, FixedCosts(extra)))


def test_what_followed_before_is_the_draft() -> None:
    assert draft(b"abcdefghijklmnopqrstuvw-abc") == b"defghijklmnopqr"
    assert draft(b"abcdefgh-abc", most=2) == b"de"
    assert draft(b"abcdefgh-abx") == b""
    assert draft(b"ab") == draft(b"") == b""


def test_the_longest_match_is_the_draft_and_the_latest_of_equal_ones() -> None:
    assert draft(b"red: one. blue: two. red: ", most=3) == b"one"
    assert draft(b"xab: one. yab: two. ab: ", most=3) == b"two"


def test_a_repetition_goes_on_behind_the_end_of_the_text() -> None:
    assert draft(b"xabcabcabc", most=7) == b"abcabca"


def test_after_a_change_the_draft_goes_on_in_the_same_source() -> None:
    source = b"one two three four five"
    text = list(source + b"|one two ")
    lookup = DraftLookup(text)
    assert bytes(lookup.propose(3, FixedCosts(0.0))) == b"thr"
    lookup.record(3, 2, 0.0)
    text += b"thr"
    text[-1] = ord("X")  # the model wrote another letter
    assert not lookup.propose(7, FixedCosts(0.0))
    text += b"e"
    assert bytes(lookup.propose(7, FixedCosts(0.0))).startswith(b"e four")


def test_after_a_change_of_another_length_one_token_is_enough_to_resume() -> None:
    source = b"one two three four five, six seven: eight"
    text = list(source + b"|one two ")
    lookup = DraftLookup(text)
    assert bytes(lookup.propose(15, FixedCosts(0.0))).startswith(b"three")
    text += b"threQ"  # for an "e"
    lookup.record(15, 4, 0.0)
    text += b"WQ"
    assert not lookup.propose(7, FixedCosts(0.0))
    text += b"f"
    assert bytes(lookup.propose(7, FixedCosts(0.0))) == b"our fiv", "the same letter stands in five, too"
    text += b"@" * RESUME_TOKENS + b"x"
    assert not lookup.propose(7, FixedCosts(0.0)), "the source is given up"


def test_drafts_are_as_long_as_pays() -> None:
    text = b"0123456789abcdefghijklmnopqrstuvwxyz" * 2
    assert len(draft(text, extra=0.0)) == DRAFT_LENGTHS[-1]
    assert len(draft(text, extra=0.2)) == 7
    assert len(draft(text, extra=1.0)) == 0


def test_the_next_pass_waits_for_its_tokens_only_where_drafts_pay() -> None:
    lookup = DraftLookup(list(b"0123456789abcdefghijklmnopqrstuvwxyz" * 2))
    assert lookup.is_promising(15, FixedCosts(0.0))
    assert not lookup.is_promising(15, FixedCosts(1.0))
    assert not DraftLookup(list(b"01abcd-ab")).is_promising(15, FixedCosts(0.0)), "a short match holds too seldom"


def test_what_drafts_cost_is_learned_from_passes() -> None:
    costs = PassCosts()
    costs.record_plain(1, 0.010)
    before = costs.extra(1, 3)
    for _ in range(30):
        costs.record_drafting(1, 3, 0.040)
    assert costs.extra(1, 3) == pytest.approx(1.0, abs=0.05)
    assert costs.extra(1, 7) == costs.extra(1, 3) > before
    assert costs.extra(2, 3) == before, "passes with other sequences are others"


def test_one_slow_pass_says_little_of_what_drafts_cost() -> None:
    """A busy machine, or a cold cache: what was once too dear is measured again."""
    costs = PassCosts()
    for seconds in (0.011, 0.010, 0.080, 0.010):
        costs.record_plain(1, seconds)
    costs.record_drafting(1, 3, 0.200)
    assert costs.extra(1, 3) == pytest.approx(1.0), "no dearer than tokens without drafts"
    for _ in range(FORGOTTEN_AFTER + 2):  # the first one belongs to the pass before
        costs.record_plain(1, 0.010)
    assert costs.extra(1, 3) == GUESSED_EXTRA
    for seconds in (0.013, 0.090, 0.200):
        costs.record_drafting(1, 3, seconds)
        assert costs.extra(1, 3) == pytest.approx(0.1)


def test_a_short_draft_is_tried_where_longer_ones_are_dear() -> None:
    """Two rows of a small model cost little more than one, and four nearly twice as much."""
    costs, text = PassCosts(), list(b"0123456789abcdefghijklmnopqrstuvwxyz" * 2)
    costs.record_plain(1, 0.010)
    costs.record_drafting(1, 3, 0.030)
    assert len(DraftLookup(text).propose(15, costs)) == 1
    costs.record_drafting(1, 1, 0.020)
    assert len(DraftLookup(text).propose(15, costs)) == 3
    costs.record_drafting(1, 3, 0.040)
    costs.record_drafting(1, 3, 0.040)
    assert len(DraftLookup(text).propose(15, costs)) == 3, "the quickest pass counts"


def test_a_pass_that_slows_the_next_one_costs_more() -> None:
    """It leaves less of the weights in the cache."""
    costs = PassCosts()
    for _ in range(2):
        costs.record_plain(1, 0.010)
    for _ in range(3):
        costs.record_drafting(1, 3, 0.013)
        assert costs.drafts(1, 15)[1] == (3, 3 * costs.extra(1, 3), 0.0)
        costs.record_plain(1, 0.016)
    assert costs.extra(1, 3) == pytest.approx(0.1 + 0.6 / 3)
    assert costs.drafts(1, 15)[1] == (3, 3 * costs.extra(1, 3), 0.0)


def test_tokens_that_are_dear_to_sample_gain_less() -> None:
    costs, text = PassCosts(), list(b"0123456789abcdefghijklmnopqrstuvwxyz" * 2)
    costs.record_plain(1, 0.010)
    assert costs.sampling(1, 3) == 0
    costs.record_drafting(1, 3, 0.013, 0)
    assert costs.sampling(1, 3) == 0, "none was accepted"
    costs.record_drafting(1, 3, 0.013, 3, 0.006)
    assert costs.sampling(1, 3) == costs.sampling(1, 7) == pytest.approx(0.2)
    assert costs.drafts(1, 15)[1] == (3, 3 * costs.extra(1, 3), costs.sampling(1, 3))
    assert DraftLookup(text).propose(15, costs)
    costs.record_drafting(1, 3, 0.013, 3, 0.036)
    costs.record_drafting(1, 3, 0.013, 3, 0.036)
    assert not DraftLookup(text).propose(15, costs), "each takes longer than a pass"


def test_a_reply_that_has_lost_by_drafts_looks_for_none() -> None:
    lookup = DraftLookup(list(b"0123456789abcdefghijklmnopqrstuvwxyz" * 2))
    assert lookup.propose(15, FixedCosts(0.2))
    lookup.record(7, 0, 0.2)
    assert not lookup.propose(15, FixedCosts(0.0))


@pytest.mark.parametrize("extra", [0.05, 0.4, 0.9])
def test_a_reply_whose_drafts_fail_loses_little(extra: float) -> None:
    """Its text repeats three tokens again and again, and never what followed them."""
    text, lost, costs = list(b"abcd" * 10), 0.0, FixedCosts(extra)
    lookup = DraftLookup(text)
    for number in range(400):
        proposed = lookup.propose(15, costs)
        if proposed:
            lookup.record(len(proposed), 0, extra)
            lost += len(proposed) * extra
        text += (1000 + number, 97, 98, 99)
    assert lost <= FIRST_CREDIT + ALLOWANCE * len(text)


def test_a_reply_that_fails_at_first_and_then_repeats_gets_drafts() -> None:
    text, costs = list(range(100)), FixedCosts(0.4)
    lookup = DraftLookup(text)
    for number in range(50):
        text += (1, 2, 3)
        if proposed := lookup.propose(15, costs):
            lookup.record(len(proposed), 0, 0.4)
        text.append(1000 + number)
    saved = 0
    text += range(20, 40)
    while text[-1] < 99:
        proposed = lookup.propose(15, costs)
        right = list(range(text[-1] + 1, min(100, text[-1] + 1 + len(proposed))))
        accepted = len(right) if list(proposed) == right else 0
        if proposed:
            lookup.record(len(proposed), accepted, 0.4)
        saved += accepted
        text += range(text[-1] + 1, min(100, text[-1] + 2 + accepted))
    assert saved > 30


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts wherever there is a match, however busy the machine is."""
    monkeypatch.setattr(PassCosts, "extra", lambda *_: 0.0)
    monkeypatch.setattr(PassCosts, "record_drafting", lambda *_: None)


@contextmanager
def engines(folder: Path, limits: SchedulerLimits | None = None) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    options = EngineOptions(limits=limits, cache_bytes=1 << 22)
    pair = [load(folder, vocabulary=tiny.VOCABULARY, options=replace(options, drafts=on)) for on in (True, False)]
    try:
        yield pair[0], pair[1]
    finally:
        for engine in pair:
            asyncio.run(engine.close())


async def steps(engine: LocalEngine, prompt: Prompt, sampling: Sampling) -> list[Step]:
    async with engine.generate(prompt, sampling) as outputs:
        return [output async for output in outputs if isinstance(output, Step)]


@needs_a_compiler
@pytest.mark.usefixtures("free_drafts")
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
@pytest.mark.usefixtures("free_drafts")
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


def test_what_the_last_two_replies_began_with_is_expected() -> None:
    openings, prompt = ReplyOpenings(), list(b"... assistant:")
    openings.record("me", prompt, (1, 2, 3))
    assert openings.expected("me", prompt) == ()
    openings.record("me", prompt, (1, 2, 4))
    assert openings.expected("me", list(b"other ... assistant:")) == (1, 2)
    assert openings.expected("you", prompt) == openings.expected("me", list(b"... user:")) == ()
    openings.record("me", prompt, (9,))
    assert openings.expected("me", prompt) == ()


@needs_a_compiler
def test_an_expected_opening_is_computed_with_the_prompt(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies are those without it: with the expected opening and with others, cached, continued, and side by side."""
    alike = Sampling(temperature=0.8, max_tokens=12, seed=3, logit_bias=((ord("a"), 90.0),))
    others = [
        replace(alike, logit_bias=((ord("b"), 90.0),)),
        replace(alike, logit_bias=()),
        replace(alike, max_tokens=2),
    ]
    prompts = [Prompt(tuple(f"{number} {'words ' * number}ok:".encode())) for number in range(12)]

    async def compare(drafting: LocalEngine, plain: LocalEngine) -> None:
        async def same(prompt: Prompt, sampling: Sampling) -> int:
            before = drafting.statistics.accepted_tokens
            expected = await run(plain, prompt, sampling)
            assert (await run(drafting, prompt, sampling)).steps == expected.steps
            return drafting.statistics.accepted_tokens - before

        assert await same(prompts[0], alike) + await same(prompts[1], alike) == 0
        assert await same(prompts[2], alike) == OPENING_TOKENS
        assert await same(prompts[2], alike) == OPENING_TOKENS - 1, "the first token comes from the cache"
        assert await same(continued(prompts[3], [ord("a")]), alike) == 0, "it has begun already"
        drafted = drafting.statistics.draft_tokens
        await same(prompts[3], replace(alike, max_tokens=1))
        assert drafting.statistics.draft_tokens == drafted, "no token behind the first one is needed"
        assert await same(replace(prompts[3], owner="another"), alike) == 0
        for prompt, other in zip(prompts[4:], others, strict=False):
            await same(prompt, other)
            await same(prompt, alike)
        cut = await run(drafting, prompts[8], alike, stop_after=2)
        rest = await run(drafting, continued(prompts[8], cut.ids), alike)
        assert cut.ids + rest.ids == (await run(plain, prompts[8], alike)).ids
        await asyncio.gather(*(same(prompt, alike) for prompt in prompts[8:]))

    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    with engines(folder_of("qwen3")) as (drafting, plain):
        asyncio.run(compare(drafting, plain))


@needs_a_compiler
async def test_openings_of_deleted_conversations_are_not_remembered(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    alike = Sampling(temperature=0, max_tokens=4, logit_bias=((ord("a"), 90.0),))
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
    try:
        for number in range(2):
            await run(engine, Prompt(tuple(f"{number} ok:".encode())), alike)
        await engine.forget("any")
        before = engine.statistics.draft_tokens
        await run(engine, Prompt(tuple(b"2 ok:")), alike)
        assert engine.statistics.draft_tokens == before
        await run(engine, Prompt(tuple(b"3 ok:")), alike)
        await run(engine, Prompt(tuple(b"4 ok:")), alike)
        assert engine.statistics.draft_tokens > before
    finally:
        await engine.close()


@needs_a_compiler
async def test_drafts_are_counted_before_the_end_of_a_reply_is_sent(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    alike = Sampling(temperature=0, max_tokens=OPENING_TOKENS + 1, logit_bias=((ord("a"), 90.0),))
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
    scheduler = engine._scheduler
    put, counts = scheduler._outbox.put, []

    def put_counted(generation: LocalGeneration, output: Output | PalaverError) -> None:
        if isinstance(output, Ended):
            counts.append((scheduler.draft_tokens, scheduler.accepted_tokens))
        put(generation, output)

    monkeypatch.setattr(scheduler._outbox, "put", put_counted)
    for number in range(3):
        await run(engine, Prompt(tuple(f"{number} ok:".encode())), alike)
    await engine.close()
    assert counts == [(0, 0), (0, 0), (OPENING_TOKENS, OPENING_TOKENS)]


@needs_a_compiler
async def test_openings_of_many_prompts_are_no_larger_than_other_drafts(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a pass with many prompts save nothing, and their logits take memory that stays."""
    alike = Sampling(temperature=0, max_tokens=6, logit_bias=((ord("a"), 90.0),))
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
    scheduler, runner, letters = engine._scheduler, engine._runner, iter(range(33, 127))
    step, verify = scheduler.step, runner.verify_drafts
    sizes: list[list[int]] = []
    assert verify is not None

    def recorded(sequences: Sequence[SequenceState], drafts: Sequence[Sequence[int]]) -> Logits:
        sizes.append([len(draft) for draft in drafts])
        return verify(sequences, drafts)

    async def reply_together(count: int) -> None:
        """All prompts are there before the first pass begins."""
        complete = False

        def step_when_complete() -> None:
            nonlocal complete
            complete = complete or sum(scheduler.counts) == count
            if complete:
                step()

        monkeypatch.setattr(scheduler, "step", step_when_complete)
        prompts = [Prompt((*[next(letters)] * 9, *b" ok:")) for _ in range(count)]
        await asyncio.gather(*(run(engine, prompt, alike) for prompt in prompts))

    monkeypatch.setattr(DraftLookup, "propose", lambda *_: ())
    monkeypatch.setattr(runner, "verify_drafts", recorded)
    for count in (1, 1, 4, 5, 20):
        await reply_together(count)
    await engine.close()
    assert [OPENING_TOKENS] * 4 in sizes
    assert [MAX_ROWS // 5 - 1] * 5 in sizes
    assert all(len(drafts) + sum(drafts) <= MAX_ROWS for drafts in sizes)


SPROUT = Path(palaver.models.__file__).parent / "sprout"
SENTENCE = "The red fox and the grey owl met at the old mill, and the red fox and the grey owl ate at the old mill."
ITEM = {"type": "object", "properties": {"name": {"enum": ["red", "blue"]}, "n": {"type": "integer"}}}
REQUIRED = {"required": ["name", "n"], "additionalProperties": False}
SCHEMA = json.dumps({"type": "array", "items": {**ITEM, **REQUIRED}, "minItems": 4, "maxItems": 4})


def spelled(ids: list[int]) -> MarkerConstraint:
    """Makes a model write these tokens."""
    return MarkerConstraint(Grammar.LARK, "start: " + " ".join(f"<[{id}]>" for id in ids), tuple(sorted(set(ids))))


@needs_a_compiler
@pytest.mark.usefixtures("free_drafts")
def test_fifty_sampled_replies_of_sprout_are_those_without_drafts() -> None:
    """With everything that follows the tokens: grammars, budgets, stop strings, penalties, healing, alternatives."""
    tokenizer = load_tokenizer(SPROUT)
    format = load_format(SPROUT, tokenizer)
    stored = Sampling(temperature=0.6, top_k=20, top_p=0.95, logprobs=5, max_tokens=60)
    changed = tokenizer.encode([SENTENCE.replace("ate at", "slept in")])
    copied = format.render([user(f"Write it again:\n{SENTENCE}")], options=RenderOptions(thinking=False))
    asked = format.render([user("What is 4857 + 2968?")])
    partial = assistant("The sum is the sum is the su")
    healed = format.render([user("What is 2 + 2?")], options=RenderOptions(healing=True), partial_reply=partial)
    assert healed.healing
    cases = [
        (copied, replace(stored, constraint=spelled(changed))),
        (copied, replace(stored, constraint=Constraint(Grammar.JSON_SCHEMA, SCHEMA))),
        (copied, replace(stored, stop=("owl", "mill"), min_tokens=5)),
        (asked, replace(stored, thinking_budget=12, temperature=1.0)),
        (asked, replace(stored, repetition_penalty=1.1, presence_penalty=0.3, xtc_probability=0.5)),
        (healed, replace(stored, temperature=1.2, top_k=0, dry_multiplier=0.8)),
        (replace(asked, answer_at=7), stored),
    ]
    options = [EngineOptions(cache_bytes=1 << 24, drafts=on) for on in (True, False)]
    pair = [load(SPROUT, vocabulary=tokenizer.vocabulary, options=one) for one in options]
    drafting, plain = pair

    async def compare() -> None:
        for number in range(50):
            prompt, sampling = cases[number % len(cases)]
            sampling = replace(sampling, seed=number)
            one, other = await asyncio.gather(*(run(e, prompt, sampling, choice=number % 3) for e in pair))
            assert (one.steps, one.ended) == (other.steps, other.ended)
            if number % 5 == 0 and len(one.ids) > 4:
                cut = len(one.ids) // 2
                first = await run(drafting, prompt, sampling, number % 3, stop_after=cut)
                rest = await run(drafting, continued(prompt, first.ids), sampling, number % 3)
                assert first.ids + rest.ids == one.ids

    try:
        asyncio.run(compare())
        assert drafting.statistics.accepted_tokens > 300
        assert plain.statistics.draft_tokens == 0
    finally:
        for engine in pair:
            asyncio.run(engine.close())
