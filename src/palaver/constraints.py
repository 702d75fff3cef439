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
