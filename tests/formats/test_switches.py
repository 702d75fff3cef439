"""Switches: neutral options become the variables of a template, or are refused by name."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from palaver.errors import BadParameter
from palaver.formats.base import RenderOptions
from palaver.formats.effort import match_effort, order_efforts
from palaver.formats.facts import Switch, SwitchKind, apply_overrides
from palaver.formats.learn.template_variables import TemplateVariable, template_variables
from palaver.formats.template import Template
from palaver.messages import user
from palaver.phases import Phase
from tests.formats.unseen import make_format


def resolve(name: str, **options: Any) -> dict[str, Any]:
    return make_format(name)[0].switch_variables(RenderOptions(**options))


def prompt(name: str, **options: Any) -> str:
    format, pieces = make_format(name)
    return pieces.text(format.render([user("q")], (), RenderOptions(**options)).context_ids)


@pytest.mark.parametrize(
    ("name", "options", "variables"),
    [
        ("amber", {"effort": "deep"}, {"depth": "deep"}),
        ("amber", {"effort": "High"}, {"depth": "deep"}),
        ("amber", {"effort": "medium"}, {"depth": "normal"}),
        ("amber", {"effort": "low", "thinking": True}, {"depth": "shallow"}),
        ("heath", {"effort": "3"}, {"level": 3}),
        ("heath", {"effort": "none"}, {"level": 0}),
        ("heath", {"thinking": False}, {"level": 0}),
        ("heath", {"thinking": True}, {"level": 2}),
        ("pine", {"effort": "7"}, {"thinking_level": 7}),
        ("lark", {"effort": "none"}, {"reasoning_effort": "none"}),
        ("lark", {"thinking": True, "effort": "low"}, {"reasoning_effort": "low"}),
        ("fjord", {"effort": "none"}, {"think": False}),
        ("fjord", {"effort": "low"}, {"strength": "low", "think": True}),
        ("moss", {"effort": "high"}, {"effort": "high", "reason": True}),
        ("cobalt", {"budget": 512}, {"max_thought_tokens": 512}),
        ("cobalt", {"budget": 0}, {"max_thought_tokens": 0}),
        ("cobalt", {"effort": "none"}, {"max_thought_tokens": 0}),
        ("cobalt", {"thinking": True}, {"max_thought_tokens": 4096}),
        ("reed", {"thinking": True}, {}),
        ("jade", {"budget": 9000}, {"budget_tokens": 9000}),
        ("kelp", {"thinking": False}, {"no_reasoning": True}),
        ("iris", {"thinking": True}, {}),
        ("ember", {"thinking": True}, {"mode": "reason"}),
        ("dune", {}, {}),
    ],
)
def test_an_option_becomes_a_variable_of_the_template(name: str, options: Any, variables: dict[str, Any]) -> None:
    assert resolve(name, **options) == variables


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("amber", {"effort": "banana"}, ["effort", "shallow, normal, deep"]),
        ("fjord", {"effort": "max"}, ["low, medium, high"]),
        ("basalt", {"effort": "low"}, ["no levels of effort", "ponder (thinking)"]),
        ("dune", {"effort": "low"}, ["no levels of effort", "no other switch"]),
        ("dune", {"thinking": True}, ["no switch for thinking"]),
        ("amber", {"thinking": False}, ["no switch for thinking"]),
        ("amber", {"effort": "none"}, ["no switch for thinking"]),
        ("fjord", {"budget": 5}, ["no thinking budget", "strength (effort)"]),
        ("fjord", {"thinking": False, "effort": "low"}, ["effort 'low'", "contradicts think = 'off'"]),
        ("fjord", {"thinking": True, "effort": "none"}, ["contradicts think = 'on'"]),
        ("cobalt", {"thinking": False, "budget": 5}, ["budget 5", "contradicts"]),
        ("fjord", {"thinking": True, "variables": {"think": False}}, ["think False", "contradicts"]),
        ("fjord", {"variables": {"no_such": 1}}, ["no_such", "strength, think"]),
        ("fjord", {"variables": {"think": "yes"}}, ["think must be true or false", "'yes'"]),
        ("fjord", {"variables": {"strength": "banana"}}, ["strength 'banana'", "low, medium, high"]),
        ("cobalt", {"variables": {"max_thought_tokens": True}}, ["max_thought_tokens must be a whole number", "True"]),
    ],
)
def test_what_a_template_does_not_have_is_refused_by_name(name: str, options: Any, words: list[str]) -> None:
    with pytest.raises(BadParameter) as error:
        prompt(name, **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_options_reach_the_prompt() -> None:
    assert "Think at length" in prompt("amber", effort="high")
    assert "reasoning strength=low" in prompt("fjord", effort="low")
    assert "Reasoning effort: high." in prompt("moss", effort="high")
    assert "may take 512 tokens" in prompt("cobalt", budget=512)
    assert "Use imperial units" in prompt("dune", variables={"units": "imperial"})
    assert "Reasoning: very <|" not in prompt("grove", variables={"reasoning": "very"})
    assert "Reasoning: very" in prompt("grove", variables={"reasoning": "very"})


def test_the_reply_opens_as_it_was_switched() -> None:
    def opens(name: str, **options: Any) -> Phase:
        return make_format(name)[0].render([user("q")], (), RenderOptions(**options)).phases.opens_in

    assert opens("heath") is Phase.THINKING
    assert opens("heath", effort="none") is Phase.ANSWER
    assert opens("ember") is Phase.ANSWER
    assert opens("ember", thinking=True) is Phase.THINKING
    assert opens("moss", effort="low") is Phase.THINKING


def test_a_constrained_answer_waits_for_no_thought_where_thinking_is_off() -> None:
    def may_think(name: str, **options: Any) -> bool:
        return make_format(name)[0].render([user("q")], (), RenderOptions(**options)).phases.may_think

    assert may_think("dune"), "it has no switch"
    assert may_think("reed"), "what it does by itself is unknown"
    assert may_think("heath")
    assert may_think("cobalt", budget=512)
    assert may_think("moss", thinking=True)
    assert not may_think("moss"), "it does not think by itself"
    assert not may_think("heath", effort="none")
    assert not may_think("reed", thinking=False)
    assert not may_think("kelp", variables={"no_reasoning": True})


def test_what_is_not_off_may_think() -> None:
    """Also where the model decides by itself."""
    switch = Switch("mode", SwitchKind.THINKING, "text", ("on", "off", "auto"), default="auto", on="on", off="off")
    assert switch.thinks({})
    assert switch.thinks({"mode": "auto"})
    assert not switch.thinks({"mode": "off"})
    assert not replace(switch, default="off").thinks({})


def test_a_day_is_written_as_the_template_writes_it() -> None:
    now = datetime(2031, 5, 6)
    assert "Current date: 2031-05-06" in prompt("opal", now=now)
    assert "Today is 06 May 2031." in prompt("dune", now=now)
    assert "Today is soon." in prompt("dune", now=now, variables={"today": "soon"})


def override(tmp_path: Path, name: str, text: str) -> dict[str, Switch]:
    path = tmp_path / "palaver-format.toml"
    path.write_text(text, encoding="utf-8")
    return {switch.name: switch for switch in apply_overrides(make_format(name)[0].facts, path).switches}


def test_an_operator_corrects_a_switch_or_gives_a_new_one(tmp_path: Path) -> None:
    text = '[switches.reasoning]\nvalues = ["low", "high", "extreme"]\n'
    text += '[switches.other]\nkind = "budget"\ntype = "integer"\n'
    switches = override(tmp_path, "grove", text)
    assert switches["reasoning"].values == ("low", "high", "extreme")
    assert switches["reasoning"].default == "medium"
    assert switches["other"] == Switch("other", SwitchKind.BUDGET, "integer")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[switches.reasoning]\nkind = "colour"', "switches.reasoning.kind"),
        ('[switches.reasoning]\ntype = "number"', "switches.reasoning.type"),
        ("[switches.reasoning]\nvalues = 5", "switches.reasoning.values"),
        ("[switches.reasoning]\nnonsense = 5", "switches.reasoning.nonsense"),
        ("[switches]\nreasoning = 5", "switches.reasoning"),
        ("switches = 5", "switches"),
    ],
)
def test_a_correction_of_a_switch_that_is_none_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadParameter) as error:
        override(tmp_path, "grove", text)
    assert named in str(error.value)


def find_variables(source: str) -> dict[str, TemplateVariable]:
    return {variable.name: variable for variable in template_variables(Template(source).tree, {"messages"})}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ a }}{% set b = 1 %}{{ b }}", {"a"}),
        ("{% if messages %}{% set b = 1 %}{% endif %}{{ b }}", set()),
        ("{% if b is not defined %}{% set b = 1 %}{% endif %}{{ b }}", {"b"}),
        ("{% set b = b | default(1) %}{{ b }}", {"b"}),
        ("{% for m in messages %}{% set c = m %}{{ c }}{{ loop.index }}{% endfor %}", set()),
        ("{% macro f(x) %}{{ x }}{{ y }}{% endmacro %}{% set y = 2 %}{{ f(z) }}", {"z"}),
        ("{% if messages %}{% set s = 1 %}{% set s = s + 1 %}{{ s }}{% endif %}", set()),
        ("{% set ns = namespace(a=1) %}{% set ns.a = q %}{{ ns.a }}", {"q"}),
    ],
)
def test_only_names_that_the_template_does_not_set_are_variables(source: str, names: set[str]) -> None:
    assert set(find_variables(source)) == names


@pytest.mark.parametrize(
    ("source", "values", "defaults"),
    [
        ("{% if e == 'a' %}{% elif 'b' != e %}{% endif %}", ("a", "b"), ()),
        ("{% if e in ['a', 'b'] %}{% endif %}", ("a", "b"), ()),
        ("{% set m = {'a': 1, 'b': 2} %}{{ m[e | default('b')] }}", ("a", "b"), ("b",)),
        ("{% set m = {'a': 1} %}{{ m.get(e) }}", ("a",), ()),
        ("{% set x = (e or 'c') | lower %}{% if x == 'a' %}{% endif %}", ("a",), ("c",)),
        ("{% set x = e if e is defined else 'c' %}{% if x is equalto('a') %}{% endif %}", ("a",), ("c",)),
        ("{% set ns = namespace(l=e) %}{% if ns.l == 'a' %}{% endif %}", ("a",), ()),
        ("{% macro f(l) %}{% if l == 'a' %}{% endif %}{% endmacro %}{{ f(e) }}", ("a",), ()),
        ("{% if e is not defined %}{% set e = 'd' %}{% endif %}{{ e }}", (), ("d",)),
        ("{% if e is true %}{% endif %}", (True,), ()),
    ],
)
def test_the_syntax_tells_values_and_defaults(source: str, values: tuple[Any, ...], defaults: tuple[Any, ...]) -> None:
    assert (find_variables(source)["e"].values, find_variables(source)["e"].defaults) == (values, defaults)


def test_words_of_effort_have_an_order() -> None:
    assert order_efforts(["max", "none", "low", "high", "medium", "minimal"]) == (
        "none", "minimal", "low", "medium", "high", "max",
    )  # fmt: skip
    assert order_efforts(["gentle", "low"]) == ("gentle", "low")
    assert match_effort("low", ["brief", "deep"]) == "brief"
    assert match_effort("low", ["brief", "short"]) is None
