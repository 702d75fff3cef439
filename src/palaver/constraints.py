"""What a text must look like: a grammar that the engine holds the model to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_CONSTRAINT = 200_000
"""Characters of a grammar."""


class Grammar(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Constraint:
    grammar: Grammar
    text: str


@dataclass(frozen=True, slots=True)
class Marked(Constraint):
    """One that holds markers, too, made for a reply's own format."""

    ids: tuple[int, ...] = ()
    """Token ids that its grammar names, as in `<[7]>`: these tokens are no text to it, whatever they spell."""
    about: str = ""
    """What it was made of: errors tell of that instead."""
