"""What is known of how a model talks, each fact with the evidence it was learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """`opening` and `closing` are what the model writes around a thought, white space included;
    `opener` and `closer` are the markers alone."""

    opener: str
    closer: str
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Switch:
    """The template variable that turns thinking on and off."""

    variable: str
    on: Any
    off: Any


@dataclass(frozen=True, slots=True)
class Evidence:
    fact: str
    seen: str


@dataclass(frozen=True, slots=True)
class Facts:
    reasoning_field: str | None = None
    """The name under which the template takes a message's thinking."""
    thinking: ThinkingMarkers | None = None
    switch: Switch | None = None
    turn_ends: tuple[str, ...] = ()
    """The control strings that end the assistant's turn."""
    evidence: tuple[Evidence, ...] = field(default=())
