"""Constraints: grammars that the generated text must match."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_CONSTRAINT = 200_000
"""The maximum length of a grammar in characters."""


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
