"""Templates that the code was not written for: variables are learned, replies are read, facts have evidence."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from palaver.commands.format_trials import Roundtrip
from palaver.events import fold
from palaver.formats.base import RenderOptions
from palaver.formats.facts import Confidence, Facts, facts_from_json, facts_to_json
from palaver.messages import user
from tests.formats.families import FAMILIES, TOOLS
from tests.formats.families import make_format as make_family_format
from tests.formats.test_families import cut, meaning
from tests.formats.unseen import FOLDER, NAMES, SWITCHES, cases, make_format

EACH_TEMPLATE = pytest.mark.parametrize("name", NAMES)


@EACH_TEMPLATE
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
def test_every_variable_is_learned(name: str, tokens: bool) -> None:
    format, _ = make_format(name, tokens)
    found = {switch.name: switch for switch in format.switches}
    assert set(found) == set(SWITCHES[name])
    for variable, expected in SWITCHES[name].items():
        assert {key: getattr(found[variable], key) for key in expected} == expected, variable


@EACH_TEMPLATE
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
def test_replies_are_read_in_every_cut(name: str, tokens: bool) -> None:
    format, pieces = make_format(name, tokens)
    for case in cases(name):
        options = RenderOptions(**case["options"])
        expected = case["expect"]
        for rng in (None, random.Random(1), random.Random(2)):
            reader = format.reader(format.render([user("q")], TOOLS, options), (), TOOLS, options)
            events = reader.open()
            for token in cut(pieces, case["input"], rng):
                events += reader.feed(token)
            thinking, answer, calls = meaning(fold([*events, *reader.close()]).message)
            assert (thinking.strip(), answer.strip()) == (expected["thinking"], expected["answer"]), case["input"]
            assert [list(call) for call in calls] == expected["calls"]


def continuations(path: Path, tokens: bool) -> tuple[int, int]:
    trials = list(Roundtrip(path, tokens).trials())
    return sum(trial.exact for trial in trials), sum(trial.count for trial in trials)


@pytest.mark.parametrize("name", ["ember", "jade"])
def test_continuations_are_byte_exact(name: str) -> None:
    exact, count = continuations(FOLDER / f"{name}.jinja", True)
    assert exact == count > 100


@pytest.mark.slow
@EACH_TEMPLATE
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
def test_all_continuations_are_byte_exact(name: str, tokens: bool) -> None:
    exact, count = continuations(FOLDER / f"{name}.jinja", tokens)
    assert exact == count


@EACH_TEMPLATE
def test_switches_are_the_same_after_writing_and_reading_them(name: str) -> None:
    facts = make_format(name)[0].facts
    assert facts_from_json(json.loads(json.dumps(facts_to_json(facts)))) == facts


def facts_without_evidence(facts: Facts) -> list[str]:
    """The names of facts that differ from the default and have no evidence."""
    plain, about = Facts(), {evidence.about for evidence in facts.evidence}
    names = [name for name in Facts.__dataclass_fields__ if name not in ("evidence", "switches")]
    learned = [name for name in names if getattr(facts, name) != getattr(plain, name)]
    return [name for name in (*learned, *(f"switches.{switch.name}" for switch in facts.switches)) if name not in about]


@EACH_TEMPLATE
def test_every_fact_of_an_unseen_template_has_evidence(name: str) -> None:
    for tokens in (True, False):
        assert facts_without_evidence(make_format(name, tokens)[0].facts) == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_every_fact_of_a_family_has_evidence(family: object) -> None:
    facts = make_family_format(family)[0].facts  # type: ignore[arg-type]
    assert facts_without_evidence(facts) == []
    assert all(evidence.seen and evidence.about for evidence in facts.evidence)


def test_the_confidence_of_a_switch_depends_on_its_evidence() -> None:
    def confidences(name: str, about: str) -> list[Confidence]:
        return [e.confidence for e in make_format(name)[0].facts.evidence if e.about == f"switches.{about}"]

    assert confidences("heath", "level") == [Confidence.SEEN]
    assert confidences("amber", "depth") == [Confidence.INFERRED]
    assert confidences("grove", "reasoning") == [Confidence.CONVENTION, Confidence.INFERRED]
