import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palaver.engines.torch import TorchEngine, load
from palaver.generation import Ended, Finish, Prefilled, Prompt, Step
from palaver.phases import Phase, Phases, State, Trigger
from palaver.sampling import Sampling
from tests.engines.generate import continued, run
from tests.engines.reference import reference
from tests.engines.tiny import END, THINK, THINK_END, VOCABULARY

THINKING = Phases(
    states=(
        State(Phase.THINKING, (Trigger(THINK_END, 1), Trigger(b"\x80", 1)), closing=(10, THINK_END, 10)),
        State(Phase.ANSWER, (Trigger(THINK, 0),)),
    ),
    ends=frozenset({END}),
)
PROMPT = Prompt(tuple(b"What is the answer?"))
SAMPLINGS = {
    "greedy": Sampling(temperature=0, max_tokens=24),
    "sampled": Sampling(temperature=1.2, top_k=60, top_p=0.95, min_p=0.01, seed=5, max_tokens=24, min_tokens=12),
    "penalised": Sampling(
        temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3, seed=9, max_tokens=24
    ),
    "repetitions": Sampling(
        temperature=0.7,
        typical_p=0.9,
        dry_multiplier=2.0,
        dry_allowed_length=1,
        xtc_probability=0.5,
        xtc_threshold=0.02,
        dynatemp_range=0.3,
        seed=4,
        max_tokens=24,
    ),
    "budget": Sampling(temperature=0.9, seed=3, max_tokens=24, thinking_budget=5, banned_strings=("e", "t ")),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("phases", [Phases((State(Phase.ANSWER),)), THINKING], ids=["plain", "thinking"])
async def test_cut_anywhere_and_continued_is_the_uncut_reply(
    engine: TorchEngine, qwen3: Any, name: str, phases: Phases
) -> None:
    prompt, sampling = replace(PROMPT, phases=phases), SAMPLINGS[name]
    uncut = await run(engine, prompt, sampling)
    if name != "repetitions":  # which `test_filters.py` compares with a reference of its own
        assert reference(qwen3, prompt, sampling).agrees(uncut.ids)
    for cut in range(len(uncut.ids) + 1):
        rest = await run(engine, continued(prompt, uncut.ids[:cut]), sampling)
        assert uncut.ids[:cut] + rest.ids == uncut.ids
        assert rest.ended == uncut.ended


async def test_outputs_come_in_order_with_logprobs(engine: TorchEngine, qwen3: Any) -> None:
    sampling = Sampling(temperature=0, max_tokens=6, logprobs=2)
    async with engine.generate(PROMPT, sampling) as outputs:
        kinds = [type(output) async for output in outputs]
    assert kinds == [Prefilled, *[Step] * 6, Ended]
    out = await run(engine, PROMPT, sampling)
    assert [step.logprob for step in out.steps] == pytest.approx(reference(qwen3, PROMPT, sampling).logprobs, abs=1e-4)
    assert all(step.alternatives[0].token_id == step.token_id for step in out.steps)


async def test_the_end_token_is_said_before_the_end(engine: TorchEngine) -> None:
    out = await run(engine, PROMPT, Sampling(temperature=0, logit_bias=((END, 1000.0),), min_tokens=3))
    assert len(out.ids) == 4
    assert out.ids[-1] == END
    assert out.ended == Ended(Finish.END)


async def test_many_at_once_say_what_each_says_alone(engine: TorchEngine, qwen3: Any) -> None:
    prompts = [Prompt(tuple(text)) for text in (b"a", b"Longer than the others", b"xyz" * 20)]
    sampling = Sampling(temperature=0.7, seed=4, max_tokens=10)
    together = await asyncio.gather(*(run(engine, prompt, sampling) for prompt in prompts))
    for prompt, out in zip(prompts, together, strict=True):
        assert reference(qwen3, prompt, sampling).agrees(out.ids)


def test_the_models_files_say_how_it_is_run(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    for path in folder_of("qwen3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [260, 3]}'
    )
    engine = load(tmp_path, vocabulary=VOCABULARY)
    assert engine.info.defaults == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert engine.info.end_ids == {260, 3}
    asyncio.run(engine.close())


def test_loading_prints_nothing(folder_of: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    engine = load(folder_of("qwen3"), vocabulary=VOCABULARY)
    asyncio.run(engine.close())
    assert capfd.readouterr() == ("", "")
