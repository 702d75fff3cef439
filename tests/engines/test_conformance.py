"""What every engine must do, with the embedded model: torch, compiled steps (with a GGUF file, too), llama.cpp, MLX,
diffusion, vLLM (with its own sampler, too) and the scripted engine of the tests. What an engine can't do it declares
(`EngineInfo.lacks`) and refuses."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from palaver.engines.base import BY_BATCH, BY_TEXT, EXACTNESS_LABELS, Capability, Engine
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.sampler import HostLogits
from palaver.engines.host.supervisor import HostedEngine
from palaver.errors import BadParameter, ContextOverflow, EngineClosed
from palaver.generation import Draft, Ended, Finish, Prefilled, Prompt, Step
from palaver.sampling import Sampling
from tests.engines.cycles import (
    SETTINGS,
    Cycles,
    Difference,
    Tally,
    continuable,
    continues_samples,
    find_difference,
    lacking_filters,
    measure_rounding,
    prompt_for,
    setting_for,
)
from tests.engines.engine_cases import CONTEXT, EXACT_MODES, NAMES, EngineCases, missing
from tests.engines.generate import Run, continued, run
from tests.engines.reference import choose
from tests.engines.threaded import ThreadedEngine

GREEDY = SETTINGS["greedy"]
ENDLESS = Sampling(temperature=0, min_tokens=600)
VARIED = 2.0
"""vLLM's own sampler takes no higher temperature."""
MEANINGLESS = tuple(range(300, 330))
"""Tokens after which the embedded model is unsure: replies to them differ."""
CYCLES = 10
"""`benchmarks/engine_cycles.py` runs a thousand."""
EXACT_CYCLES = 6
"""Exact passes are slower, and one difference is enough."""


@dataclass
class Subject:
    """An engine, and how much its rounding may change logits."""

    name: str
    exact: bool
    engine: Engine
    cases: EngineCases
    rounding: float

    def prompt(self, text: str = "What is the capital of France?", **fields: str) -> Prompt:
        return replace(self.cases.prompt(text), **fields)  # type: ignore[arg-type]

    def text(self, ids: list[int]) -> str:
        return b"".join(self.cases.vocabulary[token_id] for token_id in ids).decode(errors="replace")

    @property
    def reuses(self) -> bool:
        """Whether prefixes are reused to the token. An engine that doesn't says so."""
        assert self.engine.info.reuse.startswith(("to the token", "whole chunks", "whole blocks", "none"))
        return self.engine.info.reuse == "to the token"

    def assert_computed(self, out: Run, expected: int) -> None:
        """How many prompt tokens had to be computed."""
        assert out.prefilled is not None
        if self.reuses:
            assert out.prefilled.prompt_tokens - out.prefilled.cached_tokens == expected

    async def assert_same(
        self, prompt: Prompt, sampling: Sampling, out: Run, expected: Run, start: int = 0, choice: int = 0
    ) -> None:
        """The run is the expected one from its token `start` on: to the bit if bits depend on the text alone,
        otherwise up to a token at which rounding may have decided."""
        if self.engine.info.exactness == BY_TEXT:
            assert out.steps == expected.steps[start:]
        ids = expected.ids[:start] + out.ids
        if (ids, out.ended) != (expected.ids, expected.ended):
            position, margin = await find_difference(self.engine, prompt, sampling, ids, expected.ids, choice)
            assert self.engine.info.exactness != BY_TEXT, position
            assert margin <= 2 * self.rounding, position


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> EngineCases:
    return EngineCases(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def loaded(cases: EngineCases) -> Iterator[Callable[[str, bool], Subject]]:
    """Loads each engine once."""
    subjects: dict[tuple[str, bool], Subject] = {}

    def load(name: str, exact: bool) -> Subject:
        if reason := missing(name):
            pytest.skip(reason)
        if (name, exact) not in subjects:
            engine = cases.load(name, exact)
            is_exact = engine.info.exactness == BY_TEXT
            rounding = 0.0 if is_exact else asyncio.run(measure_rounding(engine, cases))
            subjects[name, exact] = Subject(name, exact, engine, cases, rounding)
        return subjects[name, exact]

    yield load
    for subject in subjects.values():
        asyncio.run(subject.engine.close())


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest, loaded: Callable[[str, bool], Subject]) -> Subject:
    name, _, mode = request.param.partition(" ")
    return loaded(name, mode == "exact")


EXACT = [f"{name} exact" for name in EXACT_MODES]
IN_EXACT_MODE_TOO = pytest.mark.parametrize("subject", [*NAMES, *EXACT], indirect=True)


async def assert_refused(engine: Engine, capability: Capability, *request: Any) -> None:
    with pytest.raises(BadParameter) as refused:
        await run(engine, *request)
    assert str(refused.value).startswith(capability.value)
    assert str(refused.value).endswith(f"{engine.info.lacks[capability]}.")
    assert "\n" not in str(refused.value)


# stop and continue


@pytest.mark.parametrize(
    ("subject", "setting"),
    [*product(NAMES, SETTINGS), *((name, "sampled") for name in EXACT)],
    indirect=["subject"],
)
async def test_a_reply_continues_at_every_token(subject: Subject, setting: str) -> None:
    engine, prompt = subject.engine, prompt_for(subject.cases, 0, setting)
    sampling = setting_for(engine, setting)
    if sampling != SETTINGS[setting]:
        first = lacking_filters(engine)[0]
        refusal = f"^{first} {getattr(SETTINGS[setting], first)}: .*{engine.info.lacks[Capability.FILTERS]}.$"
        with pytest.raises(BadParameter, match=refusal):
            await run(engine, prompt, SETTINGS[setting])
    if sampling.constraint is not None and Capability.CONSTRAINTS in engine.info.lacks:
        await assert_refused(engine, Capability.CONSTRAINTS, prompt, sampling)
        return
    whole = await run(engine, prompt, sampling)
    check_setting(setting, subject, whole)
    if not continues_samples(engine):
        await subject.assert_same(prompt, sampling, await run(engine, prompt, sampling), whole)
        sampling = continuable(engine, sampling)
        whole = await run(engine, prompt, sampling)
        check_setting(setting, subject, whole)
    starts = range(len(whole.ids) + 1)
    rests = await asyncio.gather(*(run(engine, continued(prompt, whole.ids[:start]), sampling) for start in starts))
    for start, rest in zip(starts, rests, strict=True):
        await subject.assert_same(prompt, sampling, rest, whole, start)


async def test_sampled_replies_continue_exactly_or_the_engine_says_so(subject: Subject) -> None:
    """An engine that lacks nothing must not declare that it does."""
    engine, prompt = subject.engine, Prompt(MEANINGLESS)
    sampling = Sampling(temperature=VARIED, min_tokens=14, max_tokens=16, seed=3)
    whole = await run(engine, prompt, sampling)
    starts = (2, 5, 8, 11)
    rests = [await run(engine, continued(prompt, whole.ids[:start]), sampling) for start in starts]
    if not continues_samples(engine):
        differ = [whole.ids[:start] + rest.ids != whole.ids for start, rest in zip(starts, rests, strict=True)]
        assert any(differ), "it need not declare a lack"
        return
    for start, rest in zip(starts, rests, strict=True):
        await subject.assert_same(prompt, sampling, rest, whole, start)


def check_setting(setting: str, subject: Subject, whole: Run) -> None:
    """The options are obeyed at all."""
    text = subject.text(whole.ids)
    match setting:
        case "budget":
            assert subject.text(whole.ids[4:]).startswith("\n</think>\n\n"), "the marker itself is not counted"
        case "stop":
            assert whole.ended is not None
            assert whole.ended.finish is Finish.STOP_STRING
            assert (whole.ended.stop or "nothing") in text
        case "schema":
            assert whole.ended == Ended(Finish.END)
            assert json.loads(text.removesuffix("<|im_end|>"))["city"] in ("Ulm", "Bern", "Paris")
        case _:
            assert len(whole.ids) > 5


@IN_EXACT_MODE_TOO
async def test_stops_and_continues_under_load(subject: Subject, record_property: Callable[[str, object], None]) -> None:
    cycles = Cycles(subject.engine, subject.cases, Tally(subject.rounding))
    tally = await (cycles.run(EXACT_CYCLES, together=2) if subject.exact else cycles.run(CYCLES))
    record_property("cycles", str(tally))
    print(subject.name, tally)
    assert tally.failures(subject.engine.info.exactness) == []
    assert tally.recomputed == 0


@IN_EXACT_MODE_TOO
@pytest.mark.slow  # each process imports its libraries
async def test_a_reply_goes_on_when_its_process_is_killed(subject: Subject) -> None:
    """The exact modes and the scripted engine are tried without a process: another engine goes on."""
    sampling = continuable(subject.engine, setting_for(subject.engine, "sampled"))
    sampling = replace(sampling, min_tokens=40, max_tokens=40)
    prompts = [subject.prompt(text) for text in ("Tell me a story.", "Hi!")]
    uncut = [await run(subject.engine, prompt, sampling) for prompt in prompts]
    if subject.exact or subject.name == "scripted":
        other = subject.cases.load(subject.name, subject.exact)
        for prompt, expected in zip(prompts, uncut, strict=True):
            rest = await run(other, continued(prompt, expected.ids[:9]), sampling)
            await subject.assert_same(prompt, sampling, rest, expected, 9)
        await other.close()
        return
    async with open_process(subject) as hosted:
        process = hosted.process_id
        assert process is not None
        maps = Path(f"/proc/{process}/maps")
        if subject.name in ("compiled", "quantised", "llamacpp") and maps.is_file():
            assert "libtorch" not in maps.read_text()
            assert ("xllamacpp" in maps.read_text()) == (subject.name == "llamacpp")
        outs = await asyncio.gather(*(run_and_kill(hosted, process, prompt, sampling) for prompt in prompts))
        assert hosted.process_id != process
    for prompt, out, expected in zip(prompts, outs, uncut, strict=True):
        await subject.assert_same(prompt, sampling, out, expected)


@asynccontextmanager
async def open_process(subject: Subject) -> AsyncIterator[HostedEngine | ThreadedEngine]:
    """The engine in a process of its own: the subject's, where it has one."""
    if isinstance(subject.engine, ThreadedEngine):
        yield subject.engine
        return
    async with HostedEngine(subject.cases.spec(subject.name)) as hosted:
        yield hosted


async def run_and_kill(engine: HostedEngine | ThreadedEngine, process: int, prompt: Prompt, sampling: Sampling) -> Run:
    """Whichever reply has five tokens first kills the process."""
    out, prefills = Run(), 0
    async with engine.generate(prompt, sampling) as outputs:
        async for output in outputs:
            out.add(output)
            prefills += isinstance(output, Prefilled)
            if len(out.ids) == 5 and engine.process_id == process:
                os.kill(process, signal.SIGKILL)
    assert prefills == 1
    return out


# the measure of the cycles


@pytest.mark.parametrize("subject", ["torch"], indirect=True)
async def test_an_engine_that_computes_continued_replies_otherwise_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = cast(LocalEngine, subject.engine)._runner
    compute, rng = runner.run, np.random.default_rng(1)

    def disturbed(sequences: Any, counts: Any, need_logits: bool = True) -> Any:
        logits = compute(sequences, counts, need_logits)
        noise = [(sequence.owner != "uncut") * rng.normal(0, 10, logits.array.shape[1]) for sequence in sequences]
        return HostLogits(logits.array + np.array(noise, np.float32)) if need_logits else logits

    monkeypatch.setattr(runner, "run", disturbed)
    tally = await Cycles(subject.engine, subject.cases, Tally(subject.rounding)).run(4, together=4)
    assert tally.differences
    assert tally.failures(BY_BATCH)


def test_differences_are_excused_within_twice_the_rounding_and_rarely() -> None:
    near, far = Difference("greedy", 1, 3, 1.9e-5), Difference("sampled", 2, 3, 2.1e-5)
    tally = Tally(1e-5, replies=400, differences=[near, near])
    assert tally.failures(BY_BATCH) == []
    assert len(tally.failures(BY_TEXT)) == 2
    assert tally.excused == [near, near]
    assert "sampled" in Tally(1e-5, replies=400, differences=[far]).failures(BY_BATCH)[0]
    assert "3 of 400" in Tally(1e-5, replies=400, differences=[near] * 3).failures(BY_BATCH)[0]
    assert "2 differ, 2 of them within twice the rounding" in str(tally)


def test_the_margin_is_the_distance_to_the_nearest_boundary() -> None:
    assert choose([1.0, 3.0, 2.5], Sampling(temperature=0), 0.5) == (1, 0.5)
    scores = [math.log(weight) for weight in (0.5, 0.3, 0.2)]
    assert choose(scores, Sampling(), 0.55) == pytest.approx((1, 0.05))
    assert choose(scores, Sampling(), 0.1) == pytest.approx((0, 0.4)), "nothing lies before the first token"
    assert choose(scores, Sampling(top_p=0.79), 0.25)[1] == pytest.approx(0.01), "the edge of the filter"
    assert choose([0.0, -math.inf], Sampling(temperature=0), 0.5) == (0, math.inf)


# prefix reuse


async def test_turns_compute_what_is_new_in_each(subject: Subject) -> None:
    engine = subject.engine
    history: tuple[int, ...] = ()
    for turn in range(4):
        question = subject.prompt(f"Question {turn}?").context_ids
        history += question
        out = await run(engine, Prompt(history, owner="turns"), replace(GREEDY, max_tokens=6))
        # the last token of a reply was sampled but not computed: the next turn computes it
        subject.assert_computed(out, len(question) + (turn > 0))
        history += tuple(out.ids)


async def test_a_retry_computes_nothing_and_an_edit_what_differs(subject: Subject) -> None:
    engine, prompt = subject.engine, subject.prompt("What do you think of the weather?", owner="retry")
    sampled = setting_for(engine, "sampled")
    first = await run(engine, prompt, sampled)
    retry = await run(engine, prompt, sampled)
    subject.assert_computed(retry, 0)
    await subject.assert_same(prompt, sampled, retry, first)
    subject.assert_computed(await run(engine, prompt, GREEDY), 0)
    for common in (len(prompt) - 2, 5):
        edited = replace(prompt, context_ids=(*prompt.context_ids[:common], 300, 301, common))
        out = await run(engine, edited, GREEDY)
        subject.assert_computed(out, 3)
        fresh = await run(engine, replace(edited, owner="another"), GREEDY)
        await subject.assert_same(edited, GREEDY, out, fresh)


async def test_owners_share_nothing(subject: Subject) -> None:
    prompt = subject.prompt("My secret is 1234.", owner="Ann")
    await run(subject.engine, prompt, GREEDY)
    for other in (replace(prompt, owner="Bob"), replace(prompt, adapter="tuned")):
        subject.assert_computed(await run(subject.engine, other, GREEDY), len(prompt))


async def test_a_forgotten_conversation_is_computed_again(subject: Subject) -> None:
    engine = subject.engine
    one = subject.prompt("Tell me about the first of two things.", owner="forget", conversation="one")
    two = replace(one, context_ids=(*one.context_ids[:-8], *range(300, 308)), conversation="two")
    for prompt in (one, two):
        await run(engine, prompt, GREEDY)
    await engine.forget("two")
    subject.assert_computed(await run(engine, replace(two, conversation="three"), GREEDY), 8)
    for conversation in ("one", "three"):
        await engine.forget(conversation)
    subject.assert_computed(await run(engine, replace(one, conversation="four"), GREEDY), len(one))
    await engine.forget("")
    subject.assert_computed(await run(engine, replace(one, conversation="four"), GREEDY), 0)


# alternatives


async def test_choices_differ_repeat_and_share_their_prompt(subject: Subject) -> None:
    engine, sampling = subject.engine, replace(setting_for(subject.engine, "sampled"), temperature=VARIED)
    prompt = Prompt(MEANINGLESS, owner="choices")
    if Capability.CHOICES in engine.info.lacks:
        await assert_refused(engine, Capability.CHOICES, prompt, sampling, 1)
        return
    together = await asyncio.gather(*(run(engine, prompt, sampling, choice) for choice in range(3)))
    assert len({tuple(out.ids) for out in together}) == 3
    if subject.reuses:
        computed = sorted(out.prefilled.cached_tokens for out in together if out.prefilled)
        assert computed == [0, len(prompt), len(prompt)]
    for choice, out in enumerate(together):
        cut = 7 if continues_samples(engine) else 0
        rest = await run(engine, continued(prompt, out.ids[:cut]), sampling, choice)
        await subject.assert_same(prompt, sampling, rest, out, cut, choice)


async def test_alternatives_come_with_each_token_and_after_a_continue(subject: Subject) -> None:
    engine, sampling = subject.engine, replace(GREEDY, logprobs=4, max_tokens=8)
    prompt = subject.prompt(owner="logprobs")
    if Capability.LOGPROBS in engine.info.lacks:
        await assert_refused(engine, Capability.LOGPROBS, prompt, sampling)
        return
    whole = await run(engine, prompt, sampling)
    for step in whole.steps:
        assert len(step.alternatives) == 4
        assert [one.logprob for one in step.alternatives] == sorted(
            (one.logprob for one in step.alternatives), reverse=True
        )
        assert step.alternatives[0].logprob == step.logprob <= 0
    rest = await run(engine, continued(prompt, whole.ids[:3]), sampling)
    for step, expected in zip(rest.steps, whole.steps[3:], strict=True):
        assert step.logprob == pytest.approx(expected.logprob, abs=2 * subject.rounding)


async def test_a_reply_that_ends_inside_a_token_goes_on(subject: Subject) -> None:
    engine, prompt = subject.engine, replace(subject.prompt(), healing=b" the")
    if Capability.TOKEN_HEALING in engine.info.lacks:
        await assert_refused(engine, Capability.TOKEN_HEALING, prompt, GREEDY)
        return
    assert subject.text((await run(engine, prompt, GREEDY)).ids).startswith(" the")


# what an engine says of itself


def test_an_engine_describes_itself(subject: Subject) -> None:
    info = subject.engine.info
    assert info.context_length == CONTEXT
    assert info.vocabulary_size == len(subject.cases.vocabulary) + (subject.name == "diffusion"), "its mask token"
    assert 2 in info.end_ids
    assert info.exactness in EXACTNESS_LABELS
    assert info.fingerprint
    assert subject.engine.status.reason == ""


# cancel, stop, close


async def test_leaving_cancels_and_stop_still_ends(subject: Subject) -> None:
    engine, prompt = subject.engine, subject.prompt("Go on and on.")
    beside = asyncio.create_task(run(engine, subject.prompt(), GREEDY))
    left = await run(engine, prompt, ENDLESS, stop_after=3)
    assert len(left.ids) == 3
    stopped = Run()
    async with engine.generate(prompt, ENDLESS) as outputs:
        async for output in outputs:
            stopped.add(output)
            if len(stopped.ids) == 4:
                outputs.stop()
    assert stopped.ended == Ended(Finish.STOPPED)
    assert stopped.ids[:3] == left.ids
    await subject.assert_same(subject.prompt(), GREEDY, await beside, await run(engine, subject.prompt(), GREEDY))
    while (await engine.metrics()).get("running"):
        await asyncio.sleep(0.01)
    whole = await run(engine, prompt, replace(ENDLESS, max_tokens=12, min_tokens=12))
    rest = await run(engine, continued(prompt, left.ids), replace(ENDLESS, max_tokens=12, min_tokens=12))
    await subject.assert_same(prompt, replace(ENDLESS, max_tokens=12, min_tokens=12), rest, whole, 3)


async def test_answer_now_closes_the_thought(subject: Subject) -> None:
    prompt = prompt_for(subject.cases, 0, "budget")
    ids: list[int] = []
    async with subject.engine.generate(prompt, replace(ENDLESS, max_tokens=60)) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                ids.append(output.token_id)
                if len(ids) == 3:
                    outputs.answer_now()
    closing = subject.text(ids).index("\n</think>\n\n")
    assert closing <= len(subject.text(ids[:40])), "at once, but for tokens that were on their way"


async def test_closing_ends_what_runs_and_refuses_what_comes(subject: Subject, cases: EngineCases) -> None:
    engine = cases.load(subject.name)
    async with engine.generate(subject.prompt(), ENDLESS) as outputs:
        await anext(outputs)
        await engine.close()
        with pytest.raises(EngineClosed):
            async for _ in outputs:
                pass
    await engine.close()
    with pytest.raises(EngineClosed):
        await run(engine, subject.prompt(), GREEDY)


# limits and errors


async def test_outputs_come_in_order(subject: Subject) -> None:
    async with subject.engine.generate(subject.prompt(), replace(GREEDY, max_tokens=6)) as outputs:
        kinds = [type(output) async for output in outputs if not isinstance(output, Draft)]
    assert kinds == [Prefilled, *[Step] * 6, Ended]


async def test_a_reply_that_has_ended_only_ends(subject: Subject) -> None:
    prompt = subject.prompt()
    for reply, sampling, finish in (
        ((400, 2), Sampling(), Finish.END),
        ((400, 401), Sampling(stop_ids=(401,)), Finish.END),
        ((400, 401), Sampling(max_tokens=2), Finish.LENGTH),
    ):
        out = await run(subject.engine, replace(prompt, reply_ids=reply), sampling)
        assert (out.ids, out.prefilled) == ([], None)
        assert out.ended is not None
        assert out.ended.finish is finish


async def test_a_full_context_is_a_length_and_a_longer_prompt_an_error(subject: Subject) -> None:
    limit = subject.engine.info.context_length
    sampling = Sampling(temperature=0, banned_ids=(0, 2))
    out = await run(subject.engine, Prompt((400,) * (limit - 3)), sampling)
    assert len(out.ids) == 3
    assert out.ended == Ended(Finish.LENGTH)
    with pytest.raises(ContextOverflow, match=f"{limit + 1:,} tokens long|{limit + 1} tokens long"):
        await run(subject.engine, Prompt((400,) * (limit + 1)), sampling)


async def test_bad_prompts_fail_alone(subject: Subject) -> None:
    beside = asyncio.create_task(run(subject.engine, subject.prompt(), GREEDY))
    for prompt in (Prompt(()), Prompt((1, 99999)), Prompt((-1,)), Prompt((1,), (99999,))):
        with pytest.raises(BadParameter):
            await run(subject.engine, prompt, Sampling(max_tokens=1))
    assert len((await beside).ids) > 5
