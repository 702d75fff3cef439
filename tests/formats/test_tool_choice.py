"""Forced calls: every reply sampled under the grammar is a call with a valid name and valid arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palaver.commands.format_trials import STRINGS, control_strings
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
from tests.formats.forced import PLAIN, CallSampler, find_error
from tests.tiny import MERGES, byte_level

pytest.importorskip("llguidance")
CALLING = [family for family in FAMILIES.values() if family.calls is not None]
PUBLISHED = sorted((Path(__file__).parents[3] / "shared" / "formats" / "templates").glob("*.jinja"))
END = "<|the end|>"


def make_format(source: str, control: set[str], strings: dict[str, str]) -> TemplateFormat:
    special = sorted(text for text in control if looks_special(text))
    tokenizer = FastTokenizer(byte_level([END, *special], sorted(control - set(special)), MERGES))
    return TemplateFormat(Template(source, "forced"), tokenizer, strings)


def check_forced_calls(format: TemplateFormat, seeds: int) -> None:
    sampler = CallSampler(format, format.tokenizer.control[END])
    for seed in range(seeds):
        for forced in (sampler.tools, sampler.tools[seed % len(sampler.tools) :][:1]):
            message, text = sampler.message(forced, seed)
            assert not find_error(message, forced), text


@pytest.mark.parametrize("tokens", [True, False], ids=["markers are tokens", "markers are text"])
@pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)
def test_forced_calls_read_back_as_calls(family: Family, tokens: bool) -> None:
    control = {*family.turns, *family.markers} if tokens else set()
    check_forced_calls(make_format(family.source, control, family.strings), 2)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", unseen.NAMES)
def test_forced_calls_in_unseen_formats(name: str, tokens: bool) -> None:
    source = unseen.source(name)
    format = make_format(source, control_strings(source) | set(STRINGS.values()) if tokens else set(), STRINGS)
    if format.facts.calls is not None:
        check_forced_calls(format, 1)


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
def test_forced_calls_in_published_formats(published: tuple[Path, bool]) -> None:
    path, tokens = published
    source = path.read_text(encoding="utf-8")
    format = make_format(source, control_strings(source) | set(STRINGS.values()) if tokens else set(), STRINGS)
    if format.facts.calls is None:
        with pytest.raises((BadParameter, TemplateError), match=r"has no tool calls|failed"):
            format.render((user("Hi"),), PLAIN, RenderOptions(must_call=("now",)))
        return
    check_forced_calls(format, 1)


def render_forced(family: str, schema: dict[str, Any], name: str = "f") -> None:
    tool = Tool(name, "", {"type": "object", **schema})
    format = make_format(FAMILIES[family].source, set(), FAMILIES[family].strings)
    format.render((user("Hi"),), (tool,), RenderOptions(must_call=(name,)))


@pytest.mark.parametrize(
    ("family", "schema", "why"),
    [
        ("Python calls", {"properties": {"a-b": {}}}, "can't be the name of an argument in Python"),
        ("function XML", {"properties": {"a<b": {}}}, "can't be the name of an argument"),
        ("function XML", {"anyOf": [{"required": ["a"]}]}, "'anyOf' is not supported"),
        ("braces with own quotes", {"properties": {"a": {"not": {}}}}, "a value has no type"),
        ("braces with own quotes", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "has no target"),
        ("braces with own quotes", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ("JSON in tags", {"type": "string"}, "its arguments must be an object"),
        ("no thinking", {}, "has no tool calls"),
    ],
)
def test_an_unsupported_schema_is_refused_by_name(family: str, schema: dict[str, Any], why: str) -> None:
    with pytest.raises(BadParameter, match=why):
        render_forced(family, schema)


def test_a_name_that_no_call_can_hold_is_refused() -> None:
    with pytest.raises(BadParameter, match="its name has characters"):
        render_forced("JSON in tags", {}, 'f"')


def test_a_tool_that_is_not_offered_can_not_be_called() -> None:
    format = make_format(FAMILIES["JSON in tags"].source, set(), FAMILIES["JSON in tags"].strings)
    for tools, options in (
        ((), RenderOptions(must_call=("f",))),
        (PLAIN, RenderOptions(must_call=("now",), calls=False)),
    ):
        with pytest.raises(BadParameter, match="no such tool"):
            format.render((user("Hi"),), tools, options)


def test_schemas_that_are_too_long_are_refused() -> None:
    listed = {"properties": {f"key_{place}": {"type": "string", "description": "x" * 500} for place in range(400)}}
    with pytest.raises(BadParameter, match="the limit is 200000"):
        render_forced("JSON in tags", listed)
