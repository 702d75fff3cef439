"""The parameters of a conversation or a turn: names and JSON values, checked and resolved for a reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

from palaver.constraints import Constraint, Grammar
from palaver.errors import BadParameter, UnknownParameter
from palaver.formats.base import RenderOptions
from palaver.messages import Tool
from palaver.sampling import NUMBERS, STRINGS, Sampling, apply_settings, check_strings

Overflow = Literal["refuse", "shorten"]
LOGPROBS = 5
"""The number of alternatives stored for every token of a reply."""

MAX_ID = 2**31 - 1
"""An upper bound for token ids and choice indices."""


@dataclass(frozen=True, slots=True)
class ReplyParameters:
    sampling: Sampling
    options: RenderOptions
    tools: tuple[Tool, ...]
    choice: int = 0
    overflow: Overflow = "refuse"
    system: str | None = None
    """The system prompt of this turn, instead of the conversation's."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the client that is stored with the reply. It has no effect."""


def merge_parameters(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers override earlier ones; None removes a parameter."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    return {name: value for name, value in merged.items() if value is not None}


def check_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters. Raises BadParameter for the first that is unknown or out of bounds."""
    for name, value in parameters.items():
        if name not in NAMES:
            raise UnknownParameter(name, value)
    resolve_parameters(Sampling(), {name: value for name, value in parameters.items() if value is not None}, 0, None)
    return dict(parameters)


def resolve_parameters(
    defaults: Sampling, parameters: Mapping[str, Any], seed: int, now: datetime | None
) -> ReplyParameters:
    """`seed` is used if the parameters have none; `now` is the time for the template."""
    numbers = {name: NUMBERS[name].check(value) for name, value in parameters.items() if name in NUMBERS}
    strings = {name: _strings(name, parameters[name]) for name in STRINGS if name in parameters}
    sampling = apply_settings(defaults, {"seed": seed, **numbers, **strings, **_parse(_SAMPLING, parameters)})
    others = _parse(_OTHERS, parameters)
    return ReplyParameters(
        sampling,
        RenderOptions(now=now, **_parse(_OPTIONS, parameters)),
        others.get("tools", ()),
        others.get("choice", 0),
        others.get("overflow", "refuse"),
        others.get("system"),
        others.get("note", {}),
    )


def _parse(parsers: Mapping[str, Parse], parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: parse(name, parameters[name]) for name, parse in parsers.items() if name in parameters}


def options_to_json(options: RenderOptions) -> dict[str, Any]:
    """Only options that differ from the defaults, so that a new option does not change old records."""
    defaults = RenderOptions()
    values = {one.name: getattr(options, one.name) for one in fields(RenderOptions)}
    found = {name: value for name, value in values.items() if value != getattr(defaults, name)}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in found.items()}


def options_from_json(value: Mapping[str, Any]) -> RenderOptions:
    known = {one.name for one in fields(RenderOptions)}
    found = {name: one for name, one in value.items() if name in known}
    if "now" in found:
        found["now"] = datetime.fromisoformat(found["now"])
    return RenderOptions(**found)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise BadParameter(name, value, "must be a list of strings")
    return check_strings(name, tuple(value))


def _tools(name: str, value: Any) -> tuple[Tool, ...]:
    if not isinstance(value, list | tuple):
        raise BadParameter(name, value, "must be a list of tools")
    return tuple(_tool(tool) for tool in value)


def _tool(value: Any) -> Tool:
    match value:
        case Tool():
            return value
        case {"type": "function", "function": dict(function)}:
            return _tool(function)
        case {"name": str(name)} if isinstance(schema := value.get("parameters") or {"type": "object"}, Mapping):
            return Tool(name, str(value.get("description") or ""), schema)
        case _:
            raise BadParameter("tools", value, "a tool is an object with a name, a description and parameters")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadParameter(name, value, "must be true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadParameter(name, value, "must be a text")
    return value


def _count(name: str, value: Any) -> int:
    if not _is_id(value):
        raise BadParameter(name, value, "must be a whole number, not below 0")
    return int(value)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadParameter(name, value, "must be an object")
    return value


def _overflow(name: str, value: Any) -> Overflow:
    if value not in ("refuse", "shorten"):
        raise BadParameter(name, value, "must be refuse or shorten")
    return value  # type: ignore[no-any-return]


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(map(_is_id, value)):
        raise BadParameter(name, value, "must be a list of token ids")
    return tuple(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = value.items() if isinstance(value, Mapping) else value
        biases = tuple((int(token), float(bias)) for token, bias in pairs)
    except (TypeError, ValueError, OverflowError):
        biases = ()
    if (not biases and value) or not all(_is_id(token) and math.isfinite(bias) for token, bias in biases):
        raise BadParameter(name, value, "must give a number for each token id")
    return biases


def _constraint(name: str, value: Any) -> Constraint:
    match value:
        case Constraint():
            return value
        case {"grammar": str(grammar), "text": str(text)} if grammar in set(Grammar):
            return Constraint(Grammar(grammar), text)
        case _:
            raise BadParameter(name, value, f"must have a grammar ({', '.join(Grammar)}) and its text")


Parse = Callable[[str, Any], Any]
_SAMPLING: dict[str, Parse] = {
    "logit_bias": _biases,
    "banned_ids": _ids,
    "stop_ids": _ids,
    "constraint": _constraint,
    "spoken": _flag,
}
_OPTIONS: dict[str, Parse] = {
    "thinking": _flag,
    "effort": _text,
    "budget": _count,
    "variables": _object,
    "calls": _flag,
    "must_call": _strings,
    "one_call": _flag,
    "response_prefix": _text,
    "json_answer": _flag,
    "healing": _flag,
}
_OTHERS: dict[str, Parse] = {
    "tools": _tools,
    "overflow": _overflow,
    "choice": _count,
    "system": _text,
    "note": _object,
}
NAMES = frozenset((*NUMBERS, *STRINGS, *_SAMPLING, *_OPTIONS, *_OTHERS))
