"""A call that must come comes, in every format that has calls: its name, and arguments by its schema, whatever is
drawn under the grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palaver.commands.format_trials.cases import STRINGS
from palaver.commands.format_trials.piece_tokenizer import control_strings
from palaver.errors import BadParameter, TemplateError
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.formats.markers import looks_special
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.messages import Tool, user
from tests.formats import unseen
from tests.formats.expected_failures import FORCED_CALLS, expected
from tests.formats.families import FAMILIES, Family
from tests.formats.forced import PLAIN, Drawn, wrong
from tests.tiny import MERGES, byte_level

pytest.importorskip("llguidance")
CALLING = [family for family in FAMILIES.values() if family.calls is not None]
PUBLISHED = sorted((Path(__file__).parents[3] / "shared" / "formats" / "templates").glob("*.jinja"))
END = "<|the end|>"


def made(source: str, control: set[str], strings: dict[str, str]) -> TemplateFormat:
    special = sorted(text for text in control if looks_special(text))
    tokenizer = FastTokenizer(byte_level([END, *special], sorted(control - set(special)), MERGES))
    return TemplateFormat(Template(source, "forced"), tokenizer, strings)


def show(format: TemplateFormat, seeds: int) -> None:
    drawn = Drawn(format, format.tokenizer.control[END])
    for seed in range(seeds):
        for called in (drawn.tools, drawn.tools[seed % len(drawn.tools) :][:1]):
            message, text = drawn.message(called, seed)
            assert not wrong(message, called), text


@pytest.mark.parametrize("tokens", [True, False], ids=["markers are tokens", "markers are text"])
@pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)
def test_forced_calls_read_back_as_calls(family: Family, tokens: bool) -> None:
    control = {*family.turns, *family.markers} if tokens else set()
    show(made(family.source, control, family.strings), 2)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", unseen.NAMES)
def test_formats_that_nobody_had_seen_too(name: str, tokens: bool) -> None:
    source = unseen.source(name)
    format = made(source, control_strings(source) | set(STRINGS.values()) if tokens else set(), STRINGS)
    if format.facts.calls is not None:
        show(format, 1)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED, reason="NOTHING IS SHOWN HERE: the published templates are not at hand")
@pytest.mark.parametrize(
    "published",
    [
        expected((path, kind == "tokens"), f"{path.stem}-{kind}", FORCED_CALLS)
        for path in PUBLISHED
        for kind in ("tokens", "text")
    ],
)
def test_published_formats_too(published: tuple[Path, bool]) -> None:
    path, tokens = published
    source = path.read_text(encoding="utf-8")
    format = made(source, control_strings(source) | set(STRINGS.values()) if tokens else set(), STRINGS)
    if format.facts.calls is None:
        with pytest.raises((BadParameter, TemplateError), match=r"knows no tool calls|failed"):
            format.render((user("Hi"),), PLAIN, RenderOptions(must_call=("now",)))
        return
    show(format, 1)


def forced(family: str, schema: dict[str, Any], name: str = "f") -> None:
    tool = Tool(name, "", {"type": "object", **schema})
    format = made(FAMILIES[family].source, set(), FAMILIES[family].strings)
    format.render((user("Hi"),), (tool,), RenderOptions(must_call=(name,)))


@pytest.mark.parametrize(
    ("family", "schema", "why"),
    [
        ("Python calls", {"properties": {"a-b": {}}}, "can't be the name of an argument in Python"),
        ("function XML", {"properties": {"a<b": {}}}, "can't be the name of an argument"),
        ("function XML", {"anyOf": [{"required": ["a"]}]}, "'anyOf' can't be held"),
        ("braces with own quotes", {"properties": {"a": {"not": {}}}}, "the type of a value is missing"),
        ("braces with own quotes", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "leads nowhere"),
        ("braces with own quotes", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ("JSON in tags", {"type": "string"}, "its arguments are no object"),
        ("no thinking", {}, "knows no tool calls"),
    ],
)
def test_what_can_not_be_held_is_refused_with_what_it_is(family: str, schema: dict[str, Any], why: str) -> None:
    with pytest.raises(BadParameter, match=why):
        forced(family, schema)


def test_a_name_that_no_call_can_hold_is_refused() -> None:
    with pytest.raises(BadParameter, match="its name has letters"):
        forced("JSON in tags", {}, 'f"')


def test_a_tool_that_is_not_offered_can_not_be_called() -> None:
    format = made(FAMILIES["JSON in tags"].source, set(), FAMILIES["JSON in tags"].strings)
    for tools, options in (
        ((), RenderOptions(must_call=("f",))),
        (PLAIN, RenderOptions(must_call=("now",), calls=False)),
    ):
        with pytest.raises(BadParameter, match="no such tool"):
            format.render((user("Hi"),), tools, options)


def test_schemas_that_are_too_long_are_refused() -> None:
    listed = {"properties": {f"key_{place}": {"type": "string", "description": "x" * 500} for place in range(400)}}
    with pytest.raises(BadParameter, match="at most 200000 can be held"):
        forced("JSON in tags", listed)
