"""Learning: deterministic facts, the cache of facts, overrides, and hostile templates."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from palaver.commands.format_trials import PieceTokenizer
from palaver.errors import BadParameter, TemplateError
from palaver.events import AnswerDelta
from palaver.formats import facts as facts_module
from palaver.formats.base import RenderOptions
from palaver.formats.facts import Confidence, Facts, apply_overrides, facts_from_json, facts_to_json
from palaver.formats.format import TemplateFormat
from palaver.formats.learn.learner import learn
from palaver.formats.template import MAX_STEPS, Template
from palaver.formats.tool_calls import parameters
from palaver.messages import assistant, user
from tests.formats.families import FAMILIES, STRINGS, TOOLS, Family, Kind, framed, make_format
from tests.formats.unseen import NAMES

ALL = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)

_PRINT_ALL = """
import json, sys
from palaver.formats.facts import facts_to_json
from palaver.formats.learn.learner import learn
from palaver.formats.template import Template
from palaver.messages import assistant, system, user
from tests.formats import unseen
from tests.formats.families import FAMILIES, TOOLS, Kind, make_format, tokenizer
for family in FAMILIES.values():
    facts = learn(Template(family.source), family.strings, tokenizer(family, Kind.ADDED).control)
    print(json.dumps(facts_to_json(facts)))
    format, _ = make_format(family)
    history = [system("s"), user("a"), assistant("b", thinking="c"), user("d")]
    print(format.render(history, TOOLS if family.calls else ()).context_ids)
for name in unseen.NAMES:
    print(json.dumps(facts_to_json(unseen.make_format(name)[0].facts)))
"""


def learned(family: Family, kind: Kind = Kind.ADDED) -> Facts:
    from tests.formats.families import tokenizer

    return learn(Template(family.source, family.name), family.strings, tokenizer(family, kind).control)


@ALL
def test_learning_twice_gives_the_same_facts_in_the_same_order(family: Family) -> None:
    assert json.dumps(facts_to_json(learned(family))) == json.dumps(facts_to_json(learned(family)))


def test_every_process_learns_and_renders_the_same(tmp_path: Path) -> None:
    outputs = set()
    for seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(tmp_path / seed)}
        environment["PYTHONPATH"] = os.pathsep.join(["src", "."])
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_ALL], env=environment, capture_output=True, text=True, check=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 2 * len(FAMILIES) + len(NAMES)


@ALL
def test_facts_are_the_same_after_writing_and_reading_them(family: Family) -> None:
    facts = learned(family)
    assert facts_from_json(json.loads(json.dumps(facts_to_json(facts)))) == facts


def test_learned_facts_are_cached_between_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "user_cache_path", lambda _: tmp_path)
    calls = []

    def learner() -> Facts:
        calls.append(1)
        return learned(FAMILIES["JSON in tags"])

    first = facts_module.cached_facts("source", STRINGS, {"<x>": 1}, learner)
    assert facts_module.cached_facts("source", STRINGS, {"<x>": 1}, learner) == first
    assert len(calls) == 1
    facts_module.cached_facts("another source", STRINGS, {"<x>": 1}, learner)
    facts_module.cached_facts("source", STRINGS, {"<y>": 1}, learner)
    assert len(calls) == 3
    for path in (tmp_path / "formats").iterdir():
        path.write_text("no facts", encoding="utf-8")
    assert facts_module.cached_facts("source", STRINGS, {"<x>": 1}, learner) == first
    assert len(calls) == 4


class Code:
    """A value that runs code when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def test_a_cache_in_which_there_is_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "user_cache_path", lambda _: tmp_path)
    facts_module.cached_facts("source", STRINGS, {}, Facts)
    (cached,) = (tmp_path / "formats").iterdir()
    cached.write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    pickle.loads(cached.read_bytes())
    assert (tmp_path / "ran").exists(), "the value would run"
    (tmp_path / "ran").unlink()
    facts = Facts(header="learned again")
    assert facts_module.cached_facts("source", STRINGS, {}, lambda: facts) == facts
    assert not (tmp_path / "ran").exists()


def test_a_cache_that_can_not_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(facts_module, "user_cache_path", lambda _: tmp_path / "file")
    assert facts_module.cached_facts("s", {}, {}, Facts) == Facts()


def override(tmp_path: Path, text: str, facts: Facts) -> Facts:
    path = tmp_path / "palaver-format.toml"
    path.write_text(text, encoding="utf-8")
    return apply_overrides(facts, path)


def test_an_operator_corrects_a_fact(tmp_path: Path) -> None:
    facts = learned(FAMILIES["JSON in tags"])
    better = override(tmp_path, 'turn_ends = ["<|x|>"]\n[thinking]\nclosing = "</think>"\n', facts)
    assert better.turn_ends == ("<|x|>",)
    assert better.thinking
    assert (better.thinking.opening, better.thinking.closing) == ("<think>\n", "</think>")
    assert better.calls == facts.calls
    assert "corrected by palaver-format.toml" in better.evidence[-1].fact
    assert better.evidence[-1].confidence is Confidence.GIVEN


def test_an_operator_gives_another_family_of_calls(tmp_path: Path) -> None:
    facts = learned(FAMILIES["JSON in tags"])
    text = """
[calls]
family = "parameters"
name_close = ">"
key_open = "<p="
key_close = ">"
key_close_json = ">"
value_close = "</p>"
between = ""
[calls.frame]
section_open = ""
call_open = "<f="
call_close = "</f>"
separator = ""
section_close = ""
"""
    better = override(tmp_path, text, facts)
    assert isinstance(better.calls, parameters.Syntax)
    assert better.calls.frame.call_open == "<f="


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense = 1", "nonsense"),
        ("[thinking]\nopner = 'x'", "thinking.opner"),
        ("[calls]\nfamily = 'no such'", "calls.family"),
        ("[calls]\nnonsense = 'x'", "calls.nonsense"),
        ("[calls]\nfamily = 'python_calls'\nopening = 'x'", "calls"),
        ("not = = toml", "palaver-format.toml"),
        ("turn_ends = 5", "turn_ends"),
        ("header = 5", "header"),
        ("keeps_thinking = 'yes'", "keeps_thinking"),
    ],
)
def test_a_correction_that_is_none_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadParameter) as error:
        override(tmp_path, text, learned(FAMILIES["JSON in tags"]))
    assert named in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for m in messages %}{{ m.content.__class__.__mro__[1].__subclasses__() }}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set x = 'a' * 40000000 %}{{ x | replace('a', 'b' * 1000) }}",
        "{% set x = 'a' * 40000000 %}{% for i in range(9999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
        "{% for i in range(1900) %}{% for j in range(1000) %}{% endfor %}{% endfor %}{{ messages[0].content }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_a_hostile_template_is_refused_by_its_steps(source: str) -> None:
    """Counted, not timed: no rendering does more steps than the bound, and every probe is refused."""
    template = Template(source, "hostile")
    spent = []
    render = template.render

    def counted(*given: Any) -> str:
        try:
            return render(*given)
        finally:
            spent.append(template.steps)

    template.render = counted  # type: ignore[method-assign, assignment]
    with pytest.raises(TemplateError, match="hostile"):
        TemplateFormat(template, PieceTokenizer(()), {})
    assert sum(spent) < 3 * MAX_STEPS
    assert len(spent) < 5


def test_ten_thousand_nested_blocks_are_refused() -> None:
    for source in ("{% if a %}" * 10_000 + "{% endif %}" * 10_000, "{% for a in b %}" * 10_000):
        with pytest.raises(TemplateError, match="nested"):
            Template(source, "hostile")


@pytest.mark.parametrize(
    "source",
    [
        "".join(f"{{% if v{i} == 'a' or v{i} < 5 %}}x{{% endif %}}" for i in range(600)),
        "".join(f"{{% set y{i} = y{i - 1} | default('q') %}}" for i in range(1, 4000)),
        "{% if e in [" + ",".join(map(str, range(20_000))) + "] %}{% endif %}",
    ],
)
def test_a_template_that_asks_for_too_much_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="hostile"):
        TemplateFormat(Template(source + "{{ messages[0].content }}", "hostile"), PieceTokenizer(()), {})


def test_a_template_that_teaches_too_little_still_chats() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    pieces = PieceTokenizer(())
    format = TemplateFormat(Template(source), pieces, {})
    assert format.facts.thinking is None
    assert format.facts.calls is None
    reader = format.reader(format.render([user("a"), assistant("b"), user("c")]))
    events = [*reader.open(), *reader.feed(pieces.piece("<think>x</think> <tool_call>{}")), *reader.close()]
    assert AnswerDelta("<think>x</think> <tool_call>{}") in events


def test_each_fact_says_how_sure_it_is() -> None:
    facts = learned(FAMILIES["JSON in tags"])
    assert {evidence.confidence for evidence in facts.evidence} <= set(Confidence)
    assert all(evidence.seen for evidence in facts.evidence)
    seen = [evidence.fact for evidence in facts.evidence if evidence.confidence is Confidence.SEEN]
    assert any("reasoning_content" in fact for fact in seen)
    assert any("json_calls" in fact for fact in seen)


def test_declared_stop_strings_are_learned() -> None:
    source = "{%- set stop_strings = ['</s>', 'User:'] %}" + framed()
    family = Family("stops", source, (), ())
    assert make_format(family)[0].facts.stop_strings == ("</s>", "User:")


def test_a_call_without_its_last_argument_shows_no_end_of_the_turn() -> None:
    """The template writes the names of the arguments, but no values."""
    source = (
        "{{ tools | tojson }}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for call in m.tool_calls or () %} Called: <|tool|>"
        "{{ call.function.name }} with {{ call.function.arguments | join(', ') }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    facts = learn(Template(source), {}, {})
    assert facts.calls is not None
    assert facts.turn_ends == ("<|end|>",)


def test_tools_may_be_offered_without_telling_the_reader() -> None:
    """A state of calls that is entered where the reader knows no tools is read all the same."""
    for family in (f for f in FAMILIES.values() if f.calls):
        format, pieces = make_format(family)
        reader = format.reader(format.render([user("q")], TOOLS), (), (), RenderOptions())
        case = family.replies[0]
        events = [*reader.open(), *(e for run in pieces.runs(case.text) for e in reader.feed(
            run if isinstance(run, int) else pieces.piece(run)))]  # fmt: skip
        assert [*events, *reader.close()]


@pytest.mark.parametrize("name", ["prompt", "messages_", "scene", "message", "mark", "before", "self_"])
def test_a_variable_of_any_name_is_learned(name: str) -> None:
    source = "{% if NAME is defined and NAME %}<|think|>{% endif %}" + framed()
    found = learn(Template(source.replace("NAME", name)), STRINGS, {})
    assert [switch.name for switch in found.switches] == [name]
