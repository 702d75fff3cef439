import json
import re
from dataclasses import replace

import pytest

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar
from palaver.engines.torch import TorchEngine
from palaver.errors import BadParameter
from palaver.generation import Ended, Finish, Prompt
from palaver.phases import Phase, Phases, State, Trigger
from palaver.sampling import Sampling
from tests.engines.running import Run, continued, run
from tests.engines.tiny import CALL, CALL_END, END, THINK, THINK_END, VOCABULARY

pytest.importorskip("llguidance")

PROMPT = Prompt(tuple(b"Answer:"))
DIGITS = Constraint(Grammar.REGEX, r"[0-9]{3,5}")
POINT = Constraint(
    Grammar.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"x": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
            "required": ["x", "ok"],
            "additionalProperties": False,
        }
    ),
)
GREETING = Constraint(Grammar.LARK, 'start: "hello " NAME\nNAME: /[a-z]{2,4}/')
CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bern"]}}, "required": ["city"]}
CALL_SCHEMA = Constraint(Grammar.JSON_SCHEMA, json.dumps(CITY | {"additionalProperties": False}))


def sampling(constraint: Constraint | None, **settings: object) -> Sampling:
    return replace(Sampling(temperature=1.0, max_tokens=80, constraint=constraint), **settings)  # type: ignore[arg-type]


def text(out: Run) -> bytes:
    return b"".join(VOCABULARY[i] for i in out.ids)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_answer_keeps_to_its_grammar(engine: TorchEngine, seed: int, temperature: float) -> None:
    digits = await run(engine, PROMPT, sampling(DIGITS, seed=seed, temperature=temperature))
    assert re.fullmatch(rb"[0-9]{3,5}<end>", text(digits))
    assert digits.ended == Ended(Finish.END)
    hello = await run(engine, PROMPT, sampling(GREETING, seed=seed, temperature=temperature))
    assert re.fullmatch(rb"hello [a-z]{2,4}<end>", text(hello))


@pytest.mark.parametrize("seed", range(3))
async def test_json_that_is_whole_is_what_the_schema_says(engine: TorchEngine, seed: int) -> None:
    no_spaces = tuple(b" \n\t\r")
    out = await run(engine, PROMPT, sampling(POINT, seed=seed, banned_ids=no_spaces))
    assert out.ended == Ended(Finish.END)
    point = json.loads(text(out).removesuffix(b"<end>"))
    assert isinstance(point["x"], int)
    assert isinstance(point["ok"], bool)


THINKING = Phases(
    states=(
        State(Phase.ANSWER, (Trigger(THINK, 1),)),
        State(Phase.THINKING, (Trigger(THINK_END, 2),), closing=(10, THINK_END, 10)),
        State(Phase.ANSWER),
    ),
    ends=frozenset({END}),
)


async def test_thinking_is_never_constrained(engine: TorchEngine) -> None:
    """The model may open a thought instead of the answer; what it thinks is free, what it answers isn't."""
    prompt = replace(PROMPT, phases=THINKING)
    thoughtful = sampling(DIGITS, logit_bias=((THINK, 1000.0),), thinking_budget=12, banned_ids=(THINK_END,))
    out = await run(engine, prompt, thoughtful)
    thought, answer = text(out).split(b"</think>")
    assert thought.startswith(b"<think>")
    assert re.search(rb"[^0-9]", thought.removeprefix(b"<think>"))
    assert re.fullmatch(rb"\n[0-9]{3,5}<end>", answer)


async def test_a_constrained_reply_cut_anywhere_goes_on_the_same(engine: TorchEngine) -> None:
    prompt = replace(PROMPT, phases=THINKING)
    for constraint in (POINT, DIGITS):
        options = sampling(constraint, thinking_budget=4, logit_bias=((THINK, 9.0),), seed=5)
        uncut = await run(engine, prompt, options)
        for cut in range(len(uncut.ids)):
            rest = await run(engine, continued(prompt, uncut.ids[:cut]), options)
            assert uncut.ids[:cut] + rest.ids == uncut.ids


@pytest.mark.parametrize("marker", ["token", "text"])
async def test_a_call_keeps_to_its_grammar_from_its_marker_on(engine: TorchEngine, marker: str) -> None:
    opening, closing = (CALL, CALL_END) if marker == "token" else (b"[[", b"]]")
    phases = Phases(
        states=(
            State(Phase.ANSWER, (Trigger(opening, 1),)),
            State(Phase.TOOL_CALL, (Trigger(closing, 2),), constraint=CALL_SCHEMA),
            State(Phase.ANSWER),
        ),
        ends=frozenset({END}),
    )
    begin = (65, CALL) if marker == "token" else (65, *b"[[")
    end = b"</tool_call>" if marker == "token" else b"]]"
    prompt = Prompt(PROMPT.context_ids, begin, phases)
    out = await run(engine, prompt, sampling(None, seed=2, max_tokens=120, banned_ids=tuple(b" \n\t\r")))
    call = text(out).split(end)[0]
    assert json.loads(call)["city"] in ("Ulm", "Bern")
    assert end in text(out), "the call is left by its marker"


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(Grammar.JSON_SCHEMA, "{"),
        Constraint(Grammar.JSON_SCHEMA, "[1]"),
        Constraint(Grammar.JSON_SCHEMA, '{"type": "nonsense"}'),
        Constraint(Grammar.REGEX, "(unclosed"),
        Constraint(Grammar.LARK, "start: nobody"),
        Constraint(Grammar.LARK, "x" * (MAX_CONSTRAINT + 1)),
    ],
    ids=["no json", "no schema", "no type", "regex", "lark", "long"],
)
async def test_a_bad_constraint_fails_its_request_alone(engine: TorchEngine, constraint: Constraint) -> None:
    async with engine.generate(PROMPT, Sampling(temperature=0, max_tokens=5)) as other:
        with pytest.raises(BadParameter, match="constraint"):
            await run(engine, PROMPT, sampling(constraint))
        assert [output async for output in other][-1] == Ended(Finish.LENGTH)


async def test_without_the_package_a_constraint_is_refused(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BadParameter, match="llguidance"):
        await run(engine, PROMPT, sampling(DIGITS))
