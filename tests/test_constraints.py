"""What is done to JSON schemas before they become grammars."""

from __future__ import annotations

import json

import llguidance
import pytest

from palaver.constraints import FORMATS, without_other_formats


@pytest.mark.parametrize("name", [*sorted(FORMATS), "password", "binary", "uri-reference", "int64"])
def test_the_formats_that_are_kept_are_those_of_the_library(name: str) -> None:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
    assert (llguidance.LLMatcher.validate_grammar(grammar) == "") == (name in FORMATS)


def test_other_formats_are_left_out_where_they_are_keywords() -> None:
    secret = {"type": "string", "format": "password", "maxLength": 9}
    day = {"type": "string", "format": "date"}
    schema = {
        "properties": {"format": secret, "enum": {"anyOf": [secret, day]}},
        "$defs": {"default": {"items": secret}},
        "enum": [{"format": "password"}],
        "default": {"format": "password"},
    }
    plain = {"type": "string", "maxLength": 9}
    assert without_other_formats(schema) == {
        "properties": {"format": plain, "enum": {"anyOf": [plain, day]}},
        "$defs": {"default": {"items": plain}},
        "enum": [{"format": "password"}],
        "default": {"format": "password"},
    }
    assert without_other_formats(True) is True
