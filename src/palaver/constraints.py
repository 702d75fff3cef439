"""Constraints: grammars that the generated text must match."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_CONSTRAINT = 200_000
"""The maximum length of a grammar in characters."""
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""The formats of strings that grammars of JSON schemas enforce."""
_MAPPINGS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords whose values are schemas by names that may be anything."""
_VALUES = frozenset(("const", "enum", "default", "example", "examples"))
"""Keywords whose values are no schemas."""


class Grammar(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Constraint:
    grammar: Grammar
    text: str


@dataclass(frozen=True, slots=True)
class MarkerConstraint(Constraint):
    """A constraint with special tokens, built for the chat format of a reply."""

    ids: tuple[int, ...] = ()
    """Token ids that the grammar names, as in `<[7]>`. These tokens never match text, whatever their bytes."""
    about: str = ""
    """The request field that it was built from, for error messages."""


def without_other_formats(schema: Any) -> Any:
    """The schema without formats that grammars can't enforce: in JSON Schema these are annotations."""
    match schema:
        case dict():
            return {
                name: _without_other_formats(name, value)
                for name, value in schema.items()
                if not (name == "format" and isinstance(value, str) and value not in FORMATS)
            }
        case list():
            return [without_other_formats(one) for one in schema]
        case _:
            return schema


def _without_other_formats(keyword: str, value: Any) -> Any:
    if keyword in _VALUES:
        return value
    if keyword in _MAPPINGS and isinstance(value, dict):
        return {name: without_other_formats(one) for name, one in value.items()}
    return without_other_formats(value)
