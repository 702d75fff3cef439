import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar, MarkerConstraint
from palaver.engines.base import Capability
from palaver.engines.core.logits_changes import LogitsChanges
from palaver.engines.core.reply_grammar import AnswerGrammar
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.token_masks import VocabularyIndex
from palaver.engines.grammars import GrammarCompiler
from palaver.engines.torch import TorchEngine, load
from palaver.errors import BadParameter
from palaver.generation import Ended, Finish, Prompt
from palaver.phases import Phase, Phases, RequiredGrammar, State, Trigger
from palaver.sampling import Sampling
from tests.engines.generate import Run, continued, run
from tests.engines.tiny import CALL, CALL_END, END, START, THINK, THINK_END, VOCABULARY

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
CALL_SCHEMA = json.dumps(CITY | {"additionalProperties": False})


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


async def test_white_space_in_json_ends(engine: TorchEngine) -> None:
    """Some models would indent a JSON text for ever. A schema can say how much white space it allows."""
    fond = tuple((byte, 1000.0) for byte in b" \n\t\r")
    wanted = sampling(POINT, temperature=0, logit_bias=fond, max_tokens=None)
    out = await run(engine, PROMPT, wanted)
    assert out.ended == Ended(Finish.END)
    assert set(json.loads(text(out).removesuffix(b"<end>"))) == {"x", "ok"}
    assert re.search(rb"\s{20}", text(out))
    spaced = json.loads(POINT.text) | {"x-guidance": {"whitespace_pattern": " "}}
    out = await run(engine, PROMPT, replace(wanted, constraint=Constraint(Grammar.JSON_SCHEMA, json.dumps(spaced))))
    assert re.fullmatch(rb'\{ "x" : \d+ , "ok" : (true|false) \}<end>', text(out))


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


async def test_no_thought_is_opened_where_thinking_is_off(engine: TorchEngine) -> None:
    prompt = replace(PROMPT, phases=replace(THINKING, may_think=False))
    eager = sampling(DIGITS, logit_bias=((THINK, 1000.0), (10, 900.0)))
    out = await run(engine, prompt, eager)
    assert re.fullmatch(rb"[0-9]{3,5}<end>", text(out))
    for cut in range(len(out.ids)):
        assert out.ids[:cut] + (await run(engine, continued(prompt, out.ids[:cut]), eager)).ids == out.ids


CHANNELS = Phases(
    states=(
        State(Phase.ANSWER, (Trigger(START, 1),)),
        State(Phase.CONTROL, (Trigger(START, 1), Trigger(b"mull", 2)), other=0),
        State(Phase.THINKING, (Trigger(THINK_END, 0),)),
    ),
    ends=frozenset({END}),
)
"""As in formats where a token begins a channel, and a word says that it is a thought."""


async def test_a_marker_of_several_parts_opens_no_thought_where_thinking_is_off(engine: TorchEngine) -> None:
    eager = sampling(DIGITS, logit_bias=((START, 1000.0),), max_tokens=12)
    assert text(await run(engine, replace(PROMPT, phases=CHANNELS), eager)).startswith(b"<start>")
    out = await run(engine, replace(PROMPT, phases=replace(CHANNELS, may_think=False)), eager)
    assert re.fullmatch(rb"[0-9]{3,5}<end>", text(out))


@pytest.mark.parametrize("bias", [0.0, 1000.0])
async def test_a_marker_of_several_parts_is_completed(engine: TorchEngine, bias: float) -> None:
    """Other text, or the end, would come into the answer."""
    prompt = replace(PROMPT, phases=CHANNELS)
    eager = sampling(DIGITS, logit_bias=((START, bias), (END, bias)), max_tokens=12)
    for begun in (b"", b"m", b"mul"):
        out = await run(engine, continued(prompt, [START, *begun]), eager)
        assert text(out).startswith(b"mull"[len(begun) :])


WORDS = ((START, 1), (b"mull", 2), (b"say", 3), (b"call", 4))
MIXED = Phases(
    states=(
        State(Phase.ANSWER, (Trigger(START, 1),)),
        State(Phase.CONTROL, tuple(Trigger(word, to) for word, to in WORDS), other=0),
        State(Phase.CONTROL, (Trigger(CALL_END, 5),), other=0),
        State(Phase.CONTROL, (Trigger(CALL_END, 0),), other=0),
        State(Phase.TOOL_CALL, (Trigger(CALL_END, 0),)),
        State(Phase.THINKING, (Trigger(START, 6),), closing=(START, *b"end")),
        State(Phase.CONTROL, (Trigger(b"end", 0),), other=5),
    ),
    ends=frozenset({END}),
)
"""One token begins thoughts, answers and calls; the word behind it decides."""


@pytest.mark.parametrize("thinks", [True, False])
async def test_only_what_may_come_completes_a_marker(engine: TorchEngine, thinks: bool) -> None:
    prompt = replace(PROMPT, phases=replace(MIXED, may_think=thinks))
    eager = ((START, 1000.0), (ord("m"), 900.0), (ord("s"), 800.0), (ord("c"), 700.0), (END, 600.0))
    out = await run(engine, prompt, sampling(DIGITS, logit_bias=eager, max_tokens=12))
    assert text(out).startswith(b"<start>mull</tool_call>" if thinks else b"<start>say</tool_call><start>say")


async def test_a_marker_of_a_call_may_have_white_space_between_its_parts(engine: TorchEngine) -> None:
    prompt = continued(replace(PROMPT, phases=replace(MIXED, may_think=False)), [START, *b" "])
    out = await run(engine, prompt, sampling(DIGITS, logit_bias=((ord("c"), 1000.0), (END, 900.0)), max_tokens=6))
    assert text(out) == b"call"


async def test_no_turn_ends_in_a_thought_that_a_marker_of_several_parts_closes(engine: TorchEngine) -> None:
    prompt = continued(replace(PROMPT, phases=MIXED), [START, *b"mull", CALL_END])
    out = await run(engine, prompt, sampling(DIGITS, logit_bias=((END, 1000.0),), thinking_budget=3))
    assert re.search(rb"<start>end[0-9]{3,5}<end>$", text(out))


async def test_the_last_token_of_a_part_has_no_other_text() -> None:
    """A token may be longer than the part: its rest would lead into the answer."""
    vocabulary = (*VOCABULARY, b"mull", b"mulled", b"mull\n")
    grammars = GrammarCompiler(vocabulary)
    phases, index = replace(MIXED, start=1), VocabularyIndex(vocabulary)
    grammar = AnswerGrammar(phases, grammars.compile(DIGITS), index)
    changes, scores = LogitsChanges(len(vocabulary)), np.zeros(len(vocabulary), dtype=np.float32)
    grammar.apply_mask(changes, ReplyState(replace(PROMPT, phases=phases), Sampling(), vocabulary))
    changes.apply(scores)
    allowed = {vocabulary[i] for i in np.flatnonzero(scores > -np.inf)}
    assert allowed == {b"m", b"mull", b"mull\n", b"s", b"c", b" ", b"\n"}


TEXT_MARKERS = Phases(
    states=(
        State(Phase.ANSWER, (Trigger(b"[x", 1), Trigger(b"~~", 2))),
        State(Phase.THINKING, (Trigger(b"]", 0),), closing=(10, *b"]")),
        State(Phase.END),
    ),
    ends=frozenset({END}),
)


async def test_a_marker_that_is_text_is_spelled_to_its_end(engine: TorchEngine) -> None:
    """Other text, or the end, would leave a part of it in the answer."""
    prompt = replace(PROMPT, phases=TEXT_MARKERS)
    eager = sampling(DIGITS, max_tokens=12, logit_bias=((ord("["), 1000.0), (END, 900.0), (10, 900.0)))
    assert text(await run(engine, continued(prompt, [*b"["]), eager)).startswith(b"x")
    assert text(await run(engine, prompt, eager)).lstrip().startswith(b"[x")
    ends = replace(eager, logit_bias=((ord("~"), 1000.0), (END, 1500.0)))
    out = await run(engine, continued(prompt, [*b"12345~"]), ends)
    assert text(out) == b"~"


async def test_a_marker_that_is_text_ends_no_turn_before_its_answer(engine: TorchEngine) -> None:
    eager = sampling(DIGITS, logit_bias=((ord("~"), 1000.0),))
    out = await run(engine, replace(PROMPT, phases=TEXT_MARKERS), eager)
    assert re.fullmatch(rb"[0-9]{3,5}~~", text(out))


async def test_a_constrained_reply_cut_anywhere_goes_on_the_same(engine: TorchEngine) -> None:
    prompt = replace(PROMPT, phases=THINKING)
    for constraint in (POINT, DIGITS):
        options = sampling(constraint, thinking_budget=4, logit_bias=((THINK, 9.0),), seed=5)
        uncut = await run(engine, prompt, options)
        for cut in range(len(uncut.ids)):
            rest = await run(engine, continued(prompt, uncut.ids[:cut]), options)
            assert uncut.ids[:cut] + rest.ids == uncut.ids


def calling(marker: str) -> Phases:
    opening, closing = (CALL, CALL_END) if marker == "token" else (b"[[", b"]]")
    written = (f"<[{CALL}]>", f"<[{CALL_END}]>") if marker == "token" else ('"[["', '"]]"')
    grammar = f"call {written[1]}\ncall: {written[0]} %json {CALL_SCHEMA}"
    ids = (CALL, CALL_END) if marker == "token" else ()
    first = MarkerConstraint(Grammar.LARK, f"start: <[{THINK}]>? {grammar}", (THINK, *ids))
    return Phases(
        states=(
            State(Phase.ANSWER, (Trigger(opening, 1), Trigger(THINK, 2))),
            State(Phase.TOOL_CALL, (Trigger(closing, 0),)),
            State(Phase.THINKING, (Trigger(THINK_END, 0),), closing=(10, THINK_END)),
        ),
        ends=frozenset({END}),
        held=RequiredGrammar(first, MarkerConstraint(Grammar.LARK, f"start: {grammar}", ids)),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("marker", ["token", "text"])
async def test_a_call_that_must_come_is_all_that_comes(engine: TorchEngine, marker: str, seed: int) -> None:
    """With a thought before it, which is free, or without."""
    end = b"</tool_call>" if marker == "token" else b"]]"
    options = sampling(None, seed=seed, max_tokens=160, thinking_budget=9, banned_ids=tuple(b" \n\t\r"))
    for bias in (9.0, -9.0):
        out = await run(engine, replace(PROMPT, phases=calling(marker)), replace(options, logit_bias=((THINK, bias),)))
        call = text(out).removesuffix(b"<end>").removesuffix(end).rpartition(b"</think>")[2]
        assert json.loads(call.removeprefix(b"<tool_call>").removeprefix(b"[["))["city"] in ("Ulm", "Bern")
        assert (b"<think>" in text(out)) == (bias > 0)
        assert out.ended == Ended(Finish.END)


async def test_a_held_reply_cut_anywhere_goes_on_the_same(engine: TorchEngine) -> None:
    prompt = replace(PROMPT, phases=calling("token"))
    options = sampling(None, seed=3, max_tokens=160, thinking_budget=5, logit_bias=((THINK, 9.0),))
    uncut = await run(engine, prompt, options)
    for cut in range(len(uncut.ids)):
        rest = await run(engine, continued(prompt, uncut.ids[:cut]), options)
        assert uncut.ids[:cut] + rest.ids == uncut.ids


async def test_a_reply_begun_otherwise_stays_and_the_call_follows_it(engine: TorchEngine) -> None:
    prompt = Prompt(PROMPT.context_ids, tuple(b"Hello"), calling("token"))
    out = await run(engine, prompt, sampling(None, seed=1, max_tokens=160, banned_ids=tuple(b" \n\t\r")))
    assert text(out).startswith(b"<tool_call>")
    assert text(out).endswith(b"</tool_call><end>")


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
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = load(folder_of("qwen3"), vocabulary=VOCABULARY)
    engine.warm_grammars()
    assert Capability.CONSTRAINTS in engine.info.lacks
    with pytest.raises(BadParameter, match="can't do this: the package llguidance isn't installed"):
        await run(engine, PROMPT, sampling(DIGITS))
    assert (await run(engine, PROMPT, Sampling(max_tokens=1))).ids
    await engine.close()
