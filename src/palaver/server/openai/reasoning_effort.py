"""A level of effort that a request names, as the nearest one that the model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaver.chat.parameters import sets_thinking
from palaver.formats.base import Format
from palaver.formats.effort import effort_rank, is_effort_off, match_effort
from palaver.formats.facts import Switch, SwitchKind, switch_of_kind


def effort_parameters(level: str, given: Mapping[str, Any], format: Format) -> dict[str, Any]:
    """The parameters nearest to a level of effort. Empty where the model has no switch, or `given` contradicts it.

    An unknown level is passed on: it is refused later, with the list of the template's levels.
    """
    if is_effort_off(level):
        return _thinking_off(given, format)
    if given.get("thinking") is False or _is_switched_off(given, format):
        return {}
    effort = switch_of_kind(format.switches, SwitchKind.EFFORT)
    if effort is not None and effort.name in (given.get("variables") or {}):
        return {}
    if effort_rank(level) is None:
        return {"effort": level}
    if effort is not None:
        return _nearest_effort(level, effort)
    if format.thinking_switch is not None and not sets_thinking(given, format):
        return {"thinking": True}
    return {}


def _thinking_off(given: Mapping[str, Any], format: Format) -> dict[str, Any]:
    if sets_thinking(given, format):
        return {}
    if format.thinking_switch is not None:
        return {"thinking": False}
    return {"thinking_budget": 0} if format.thinks else {}


def _is_switched_off(given: Mapping[str, Any], format: Format) -> bool:
    switch = format.thinking_switch
    return switch is not None and (given.get("variables") or {}).get(switch.name, switch) == switch.off


def _nearest_effort(level: str, switch: Switch) -> dict[str, Any]:
    if match_effort(level, [value for value in switch.values if value != switch.off]) is not None:
        return {"effort": level}
    target = effort_rank(level) or 0
    ranked = [(abs(rank - target), rank, value) for value in switch.values if (rank := effort_rank(value))]
    return {"effort": str(min(ranked)[2])} if ranked else {}
