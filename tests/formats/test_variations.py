"""Templates that vary rarer habits: learned, read however a reply is cut, and continued byte for byte."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest

from palaver.commands.format_trials import Roundtrip
from palaver.events import fold
from palaver.formats.base import RenderOptions
from palaver.messages import Message, Role, Text, Thinking, ToolCall, tool, user
from palaver.phases import Phase
from tests.formats.families import TOOLS, Family, Kind, ids
from tests.formats.families import make_format as make_uncached
from tests.formats.test_families import cut, meaning, read, replies
from tests.formats.test_unseen import facts_without_evidence
from tests.formats.variations import GOES_ON, PYTHON_ARGUMENTS, VARIATIONS

EACH = pytest.mark.parametrize("family", VARIATIONS.values(), ids=lambda family: family.name)
make_format = cache(make_uncached)


@EACH
@pytest.mark.parametrize("kind", Kind)
def test_replies_are_read_however_they_are_cut(family: Family, kind: Kind) -> None:
    format, pieces = make_format(family, kind)
    assert (format.facts.calls.family if format.facts.calls else None) == family.calls
    assert format.facts.reasoning_field == family.reasoning
    for case in replies(family, kind):
        options = RenderOptions(thinking=case.thinks)
        for tokens in (ids(pieces, case.text), *(list(cut(pieces, case.text, r)) for r in (None, random.Random(1)))):
            found = meaning(fold(read(format, tokens, family, options)).message)
            assert found == (case.thinking, case.answer, case.calls), case.text


@EACH
def test_continuations_are_byte_exact(family: Family, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(family.source, encoding="utf-8")
    trials = [trial for tokens in (True, False) for trial in Roundtrip(path, tokens).trials()]
    assert [trial for trial in trials if trial.expressed and trial.exact < trial.count] == []
    history = "its history does not begin with its own generation prompt"
    assert sum(trial.count for trial in trials) > 80 or any(history in trial.why for trial in trials)


@EACH
def test_every_fact_has_evidence(family: Family) -> None:
    assert facts_without_evidence(make_format(family, Kind.ADDED)[0].facts) == []


def test_an_unsplit_reply_has_the_marker_that_the_prompt_wrote() -> None:
    family = VARIATIONS["a closing marker alone, opened by the prompt"]
    format, pieces = make_format(family, Kind.ADDED)
    options = RenderOptions(unsplit=True)
    prompt = format.render([user("q")], options=options)
    for text, expected in (
        ("hm<|/thought|>Hello", "<|thought|>hm<|/thought|>Hello"),
        ("<|/thought|>Hello", "<|thought|><|/thought|>Hello"),
        ("hm", "<|thought|>hm"),
    ):
        reader = format.reader(prompt, options=options)
        assert reader.open() == []
        events = [event for token in ids(pieces, text) for event in reader.feed(token)]
        assert fold([*events, *reader.close()]).message.text == expected


@pytest.mark.parametrize("name", [name for name in VARIATIONS if name.startswith("Python calls")])
def test_arguments_of_python_calls_are_continued_as_the_template_writes_them(name: str) -> None:
    format, pieces = make_format(VARIATIONS[name], Kind.ADDED)
    calls = [ToolCall("1", "look_up", json.dumps(PYTHON_ARGUMENTS)), ToolCall("2", "now", '{"utc": true, "zone": ')]
    written = pieces.text(
        format.partial_reply_ids(Message(Role.ASSISTANT, tuple(calls)), RenderOptions(), Phase.ANSWER)
    )
    known = VARIATIONS[name].replies[0].text.removesuffix("]<|/calls|>")
    assert written == f"{known}, now(utc={'true' if 'flag=true' in known else 'True'}, zone="


def test_a_thought_in_which_tools_were_called_goes_on_if_the_template_writes_it_so() -> None:
    """A template that opens the next thought anew leaves that to the model; one that does not says that it is open."""
    call = ToolCall("1", "look_up", '{"word": "x"}')
    messages = [user("q"), Message(Role.ASSISTANT, (Thinking("a"), call)), tool("1", "found", "look_up")]
    for name, expected in {
        GOES_ON: Phase.THINKING,
        "calls in tags follow a thought that is not closed": Phase.ANSWER,
    }.items():
        format, _ = make_format(VARIATIONS[name], Kind.ADDED)
        phases = format.render(messages, TOOLS).phases
        assert phases.states[phases.start].phase is expected
        assert format.render([*messages, Message(Role.ASSISTANT, (Text("b"),)), user("r")], TOOLS).phases.start == 0
