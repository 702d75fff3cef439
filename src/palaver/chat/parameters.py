"""The parameters of a conversation or a turn: names and JSON values, checked and resolved for a reply."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

from palaver.constraints import Constraint, Grammar
from palaver.errors import BadParameter, UnknownParameter
from palaver.formats.base import Format, RenderOptions
from palaver.messages import Tool
from palaver.sampling import CHOICES, NUMBERS, STRINGS, Sampling, apply_settings, check_choice, check_strings
from palaver.tools.toolbox import ToolPolicy, parse_policy

Overflow = Literal["refuse", "shorten"]
LOGPROBS = 5
"""The number of alternatives stored for every token of a reply."""

MAX_STACKED_FRAMES = 16
MEDIA_LIMITS = {
    "max_slice_nums": (1, 64),
    "use_image_id": (0, 1),
    "stack_frames": (1, MAX_STACKED_FRAMES),
    "frames_per_second": (1, 10),
    "max_frames": (1, 256),
}
"""The parameters inside `media`: whole numbers, with their bounds."""
MAX_SERVERS = 64
LOOP = "loop"
"""The entry of a reply's options that makes its calls run: its servers, the names of their tools (as offered, with the
full ones), and the parameters of its turn."""
OFFER = "tool_offer"
"""Added to the parameters of a turn: `tools`, the names under which tools of servers are offered, with their full ones,
`approvals`, the tools that always or never need an approval, `failed`, the servers whose tools are not offered, with
the reasons, and `notices` about tools, by server."""
ONCE_ONLY = ("must_call", "note", "response_prefix", "choice")
"""Parameters of a turn that apply to its first reply alone."""

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
    tool_servers: tuple[str, ...] = ()
    """The tool servers whose tools are offered, and whose calls run."""
    tool_policies: Mapping[str, ToolPolicy] = field(default_factory=dict)
    """By server: which of its tools are offered, and which need an approval."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the client that is stored with the reply. It has no effect."""


def merge_parameters(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers override earlier ones; None removes a parameter."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    return {name: value for name, value in merged.items() if value is not None}


def sets_thinking(given: Mapping[str, Any], format: Format) -> bool:
    """Whether `given` sets thinking explicitly."""
    switch = format.thinking_switch
    return given.get("thinking") is not None or (switch is not None and switch.name in (given.get("variables") or {}))


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
        others.get("tool_servers", ()),
        others.get("tool_policies", {}),
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


def loop_options(servers: Sequence[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The entry in the options of a reply whose calls run."""
    kept = {name: value for name, value in parameters.items() if name not in ("tools", OFFER, *ONCE_ONLY)}
    try:
        json.dumps(kept)
    except (TypeError, ValueError):
        kept = {}
    return {"servers": list(servers), "tools": {}, "failed": {}, **parameters.get(OFFER, {}), "parameters": kept}


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise BadParameter(name, value, "must be a list of strings")
    return check_strings(name, tuple(value))


def _names(name: str, value: Any) -> tuple[str, ...]:
    if (
        not isinstance(value, list | tuple)
        or not all(isinstance(one, str) for one in value)
        or len(value) > MAX_SERVERS
    ):
        raise BadParameter(name, value, f"must be a list of at most {MAX_SERVERS} names")
    return tuple(value)


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


def _media_options(name: str, value: Any) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        raise BadParameter(name, value, "must be an object")
    for option, number in value.items():
        if option not in MEDIA_LIMITS:
            raise BadParameter(f"{name}.{option}", number, f"must be one of {', '.join(MEDIA_LIMITS)}")
        low, high = MEDIA_LIMITS[option]
        if not isinstance(number, int) or not low <= number <= high:
            raise BadParameter(f"{name}.{option}", number, f"must be from {low} to {high}")
    return {option: int(number) for option, number in value.items()}


def _policies(name: str, value: Any) -> Mapping[str, ToolPolicy]:
    if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
        raise BadParameter(name, value, "must give an object for each tool server")
    try:
        return {server: parse_policy(policy) for server, policy in value.items()}
    except ValueError as error:
        raise BadParameter(f"{name}.{error}", "...", "must be as in an mcp tool of OpenAI's API") from None


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
    **dict.fromkeys(CHOICES, check_choice),
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
    "media": _media_options,
    "max_prompt_tokens": _count,
}
_OTHERS: dict[str, Parse] = {
    "tools": _tools,
    "overflow": _overflow,
    "choice": _count,
    "system": _text,
    "tool_servers": _names,
    "tool_policies": _policies,
    "note": _object,
    "model": _text,
}
NAMES = frozenset((*NUMBERS, *STRINGS, *_SAMPLING, *_OPTIONS, *_OTHERS))
