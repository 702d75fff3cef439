"""Sample tool calls, and their rendering by a template, from which a syntax is learned."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

NAME, OTHER_NAME = "probe_alpha_q", "probe_beta_q"
TEXT_KEY, TEXT_VALUE = "first_key_q", "text value q"
NUMBER_KEY, NUMBER_VALUE = "second_key_q", 47113
LISTED_VALUE = "listed_value_q"
IDS = ("probeid01", "probeid02")
ARGUMENTS: dict[str, Any] = {TEXT_KEY: TEXT_VALUE, NUMBER_KEY: NUMBER_VALUE}
LISTED_ARGUMENTS: dict[str, Any] = {TEXT_KEY: [LISTED_VALUE, True], NUMBER_KEY: True}


@dataclass(frozen=True, slots=True)
class CallSamples:
    """Rendered assistant turns, from the start of the reply to the end of the turn."""

    one: str
    """One call with two arguments."""
    two: str | None
    """Two calls to different tools; None if the template allows one call only."""
    none: str | None
    """One call without arguments."""
    ends: tuple[str, ...]
    """The markers that end a turn."""
    listed: str | None = None
    """One call with a list of a text and true, and with true itself."""


def sample_tools() -> list[dict[str, Any]]:
    properties = {
        TEXT_KEY: {"type": "string", "description": "a text"},
        NUMBER_KEY: {"type": "integer", "description": "a number"},
    }
    schema = {"type": "object", "properties": properties, "required": [TEXT_KEY]}
    return [
        {"type": "function", "function": {"name": name, "description": "a probe", "parameters": schema}}
        for name in (NAME, OTHER_NAME)
    ]


def sample_calls(count: int, as_text: bool, arguments: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    given = ARGUMENTS if arguments is None else arguments
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given) if as_text else dict(given)},
        }
        for name, call_id in list(zip((NAME, OTHER_NAME), IDS, strict=True))[:count]
    ]


def strip_turn_end(text: str, ends: tuple[str, ...]) -> str:
    """The text up to the first marker that ends a turn."""
    cuts = [at for end in ends if end and (at := text.find(end)) >= 0]
    return text[: min(cuts)] if cuts else text
