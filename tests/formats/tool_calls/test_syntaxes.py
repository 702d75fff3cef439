"""Details of single syntaxes of tool calls."""

from __future__ import annotations

import pytest

from palaver.events import fold
from palaver.formats.base import RenderOptions
from palaver.formats.tool_calls import syntaxes
from palaver.messages import Tool, ToolCall, user
from tests.formats.families import FAMILIES, Kind, ids, make_format


def written(family: str, arguments: str, is_open: bool = False) -> str:
    calls = make_format(FAMILIES[family])[0].facts.calls
    assert calls
    return syntaxes.write(calls, (ToolCall("id", "look_up", arguments),), is_open)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"word": "Paris, France", "times": 2}', '{word:<|"|>Paris, France<|"|>,times:2}'),
        ('{"word": "a\\nb: \\"c\\",   d"}', '{word:<|"|>a\nb: "c",   d<|"|>}'),
        ('{"word": {"x": [1,  2]}}', "{word:{x:[1,2]}}"),
    ],
)
def test_white_space_inside_strings_is_kept_between_braces(arguments: str, expected: str) -> None:
    assert expected in written("braces with own quotes", arguments)


def test_a_string_that_stops_in_an_escape_stays_open() -> None:
    assert written("braces with own quotes", '{"word": "a, b\\', True).endswith('{word:<|"|>a, b')


@pytest.mark.parametrize(("arguments", "expected"), [("[1, 2]", "look_up([1, 2])"), ('"tree"', 'look_up("tree")')])
def test_arguments_that_are_no_object_are_positional_in_python(arguments: str, expected: str) -> None:
    assert expected in written("Python calls", arguments)


@pytest.mark.parametrize("name", ["look_up_all", "relook_up", "look_up.deep", "other.look_up", "look_up-x"])
def test_an_unoffered_tool_keeps_its_name(name: str) -> None:
    format, pieces = make_format(FAMILIES["name, separator, JSON"], Kind.ADDED)
    tools = (Tool("look_up", "", {"type": "object"}),)
    reader = format.reader(format.render([user("q")], tools), (), tools, RenderOptions())
    events = reader.open()
    for token in ids(pieces, f"<|section|><|call|>{name}<|args|>{{}}<|/call|><|/section|>"):
        events += reader.feed(token)
    assert [call.name for call in fold([*events, *reader.close()]).message.tool_calls] == [name]
