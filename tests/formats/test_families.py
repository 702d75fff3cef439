"""Every family of formats: learned facts, reading however a reply is split, escaping, continuations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from palaver.commands.format_trials import PieceTokenizer, run_roundtrips
from palaver.events import Notice, PhaseOpened, ReadEvent, fold
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.messages import Message, user
from palaver.phases import Phase
from tests.formats.adversarial import COUNT, contents, control_ids
from tests.formats.families import FAMILIES, TOOLS, Case, Family, Kind, ids
from tests.formats.families import make_format as make_uncached
from tests.formats.variations import VARIATIONS

ALL = [pytest.param(family, kind, id=f"{name}, {kind}") for name, family in FAMILIES.items() for kind in Kind]
make_format = cache(make_uncached)


def cut(pieces: PieceTokenizer, text: str, rng: random.Random | None) -> Iterator[int]:
    for run_ in pieces.runs(text):
        if isinstance(run_, int):
            yield run_
            continue
        data = run_.replace("\0", "").encode()
        while data:
            size = rng.randint(1, 7) if rng else 1
            yield pieces.piece(data[:size])
            data = data[size:]


def read(format: TemplateFormat, tokens: list[int], family: Family, options: RenderOptions) -> list[ReadEvent]:
    tools = TOOLS if family.calls else ()
    reader = format.reader(format.render([user("q")], tools, options), (), tools, options)
    return [*reader.open(), *(event for token in tokens for event in reader.feed(token)), *reader.close()]


def meaning(message: Message) -> tuple[str, str, tuple[tuple[str, object], ...]]:
    calls = tuple((call.name, json.loads(call.arguments)) for call in message.tool_calls)
    return message.thinking, message.text, calls


def replies(family: Family, kind: Kind) -> list[Case]:
    return [case for case in family.replies if kind is not Kind.TEXT or case.as_text]


@pytest.mark.parametrize(("family", "kind"), ALL)
def test_what_is_learned(family: Family, kind: Kind) -> None:
    facts = make_format(family, kind)[0].facts
    assert (facts.calls.family if facts.calls else None) == family.calls
    assert (facts.switch.name if facts.switch else None) == family.switch
    assert facts.reasoning_field == family.reasoning
    if family.thinking:
        assert facts.thinking
        assert (facts.thinking.opening, facts.thinking.closing) == family.thinking
    assert facts.header
    assert facts.turn_ends
    assert facts.evidence


@pytest.mark.parametrize(("family", "kind"), ALL)
def test_replies_are_read_however_they_are_cut(family: Family, kind: Kind) -> None:
    format, pieces = make_format(family, kind)
    for case in replies(family, kind):
        options = RenderOptions(thinking=case.thinks)
        for rng in (None, *map(random.Random, range(4))):
            tokens = list(cut(pieces, case.text, rng))
            assert meaning(fold(read(format, tokens, family, options)).message) == (
                case.thinking,
                case.answer,
                case.calls,
            )
        events = read(format, ids(pieces, case.text), family, options)
        assert meaning(fold(events).message) == (case.thinking, case.answer, case.calls)
        assert not any(isinstance(event, Notice) for event in events)


@pytest.mark.parametrize(("family", "kind"), ALL)
def test_the_events_up_to_any_token_are_a_prefix_of_the_message(family: Family, kind: Kind) -> None:
    format, pieces = make_format(family, kind)
    tools = TOOLS if family.calls else ()
    for case in replies(family, kind):
        options = RenderOptions(thinking=case.thinks)
        reader = format.reader(format.render([user("q")], tools, options), (), tools, options)
        events = reader.open()
        for token in cut(pieces, case.text, random.Random(1)):
            events += reader.feed(token)
            message = fold(events).message
            names = [call.name for call in message.tool_calls]
            assert case.thinking.startswith(message.thinking)
            assert case.answer.startswith(message.text)
            assert names == [name for name, _ in case.calls][: len(names)]


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.calls], ids=lambda f: f.name)
def test_without_calls_allowed_the_markup_of_calls_is_text(family: Family) -> None:
    format, pieces = make_format(family, Kind.TEXT)
    called = next(case for case in reversed(family.replies) if case.calls)
    options = RenderOptions(calls=False, thinking=called.thinks)
    folded = fold(read(format, ids(pieces, called.text), family, options))
    assert not folded.message.tool_calls
    shown = folded.message.thinking + folded.message.text + " ".join(folded.notices)
    assert "look_up" in shown
    assert "tree" in shown or "lines" in shown


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_no_content_changes_the_control_tokens(family: Family) -> None:
    format, pieces = make_format(family, Kind.ADDED)
    count = 2 * COUNT
    hostile = contents(sorted(pieces.control), count)
    for calls in (False, True) if family.calls else (False,):
        harmless = control_ids(format, ["harmless"] * 9, calls, True)
        for number in range(count):
            texts = [hostile[(number + 37 * place) % count] for place in range(9)]
            assert control_ids(format, texts, calls, True) == harmless, texts


def test_continuations_are_byte_exact(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        (tmp_path / f"{name}.jinja").write_text(family.source, encoding="utf-8")
    trials = list(run_roundtrips(tmp_path))
    assert [trial for trial in trials if trial.exact < trial.count] == []
    assert sum(trial.count for trial in trials) > 8000
    assert {trial.template for trial in trials if trial.count} == set(FAMILIES)


def test_a_phase_that_the_prompt_opens_is_announced_before_the_first_token() -> None:
    format, _ = make_format(FAMILIES["tags, opened by the prompt"], Kind.ADDED)
    assert format.reader(format.render([user("q")])).open() == [PhaseOpened(Phase.THINKING)]
    off = RenderOptions(thinking=False)
    assert format.reader(format.render([user("q")], options=off), options=off).open() == []


def test_what_looks_like_a_call_and_is_none_is_text_with_a_notice() -> None:
    family = FAMILIES["JSON in tags"]
    for kind in Kind:
        format, pieces = make_format(family, kind)
        events = read(format, ids(pieces, "<tool_call>\nno JSON at all\n</tool_call>\nafter"), family, RenderOptions())
        folded = fold(events)
        assert folded.message.text.split() == "<tool_call> no JSON at all </tool_call> after".split()
        assert len(folded.notices) == 1
        assert not folded.message.tool_calls


def test_a_call_inside_a_thought_leads_back_into_it() -> None:
    family = VARIATIONS["calls with control tokens count in a thought"]
    case = family.replies[0]
    for kind in Kind:
        format, pieces = make_format(family, kind)
        message = fold(read(format, ids(pieces, case.text), family, RenderOptions())).message
        assert [type(part).__name__ for part in message.parts] == [
            "Thinking",
            "ToolCall",
            "ToolCall",
            "Thinking",
            "Text",
        ]
        assert all(call.in_thought for call in message.tool_calls)


def test_positional_arguments_go_by_the_names_that_the_tool_has() -> None:
    family = FAMILIES["Python calls"]
    format, pieces = make_format(family, Kind.ADDED)
    events = read(format, ids(pieces, '<|calls|>[look_up("tree", 2, 3)]<|/calls|>'), family, RenderOptions())
    (call,) = fold(events).message.tool_calls
    assert json.loads(call.arguments) == {"word": "tree", "times": 2, "argument_3": 3}


def test_words_between_calls_are_in_a_notice() -> None:
    family = FAMILIES["name, separator, JSON"]
    format, pieces = make_format(family, Kind.SPECIAL)
    text = "<|section|><|call|>now<|args|>{}<|/call|> and by the way <|/section|>"
    folded = fold(read(format, ids(pieces, text), family, RenderOptions()))
    assert [call.name for call in folded.message.tool_calls] == ["now"]
    assert "and by the way" in folded.notices[0]
