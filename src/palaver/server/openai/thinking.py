"""Whether and how hard the model thinks: what requests and operators ask for, as parameters a template can follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaver.formats.base import Format
from palaver.formats.switches import Switch, SwitchKind, effort_rank, is_effort_off, match_effort, switch_of_kind

_WISHES = ("thinking", "effort", "budget")


def follow_effort(level: str, given: Mapping[str, Any], format: Format) -> dict[str, Any]:
    """The parameters nearest to a level of effort. Empty where it changes nothing, or `given` says otherwise.

    A word that is no level is passed on, to be refused with what the template takes.
    """
    if is_effort_off(level):
        return _without_thinking(given, format)
    if given.get("thinking") is False or _switched_off(given, format):
        return {}
    effort = switch_of_kind(format.switches, SwitchKind.EFFORT)
    if effort is not None and effort.name in (given.get("variables") or {}):
        return {}
    if effort_rank(level) is None:
        return {"effort": level}
    if effort is not None:
        return _nearest(level, effort)
    if format.thinking_switch is not None and not _sets_thinking(given, format):
        return {"thinking": True}
    return {}


def _without_thinking(given: Mapping[str, Any], format: Format) -> dict[str, Any]:
    if _sets_thinking(given, format):
        return {}
    if format.thinking_switch is not None:
        return {"thinking": False}
    return {"thinking_budget": 0} if format.thinks else {}


def _sets_thinking(given: Mapping[str, Any], format: Format) -> bool:
    """Whether thinking is switched by name already."""
    switch = format.thinking_switch
    return given.get("thinking") is not None or (switch is not None and switch.name in (given.get("variables") or {}))


def _switched_off(given: Mapping[str, Any], format: Format) -> bool:
    switch = format.thinking_switch
    return switch is not None and (given.get("variables") or {}).get(switch.name, switch) == switch.off


def _nearest(level: str, switch: Switch) -> dict[str, Any]:
    if match_effort(level, [value for value in switch.values if value != switch.off]) is not None:
        return {"effort": level}
    wanted = effort_rank(level) or 0
    ranked = [(abs(rank - wanted), rank, value) for value in switch.values if (rank := effort_rank(value))]
    return {"effort": str(min(ranked)[2])} if ranked else {}


def operator_parameters(
    defaults: Mapping[str, Any], given: Mapping[str, Any], forced: Mapping[str, Any], format: Format
) -> dict[str, Any]:
    """A request's parameters between the operator's: defaults give way to it, and it to what is forced.

    A wish to think can be put in several ways, so that the layers are compared by what they mean.
    """
    if any(given.get(name) is not None for name in _WISHES) or _sets_thinking(given, format):
        defaults = {name: value for name, value in defaults.items() if name not in _WISHES}
    if "thinking" in forced:
        given = _give_way(given, forced["thinking"], format)
    return {**_followable(defaults, format), **given, **_followable(forced, format)}


def _give_way(given: Mapping[str, Any], thinking: bool, format: Format) -> dict[str, Any]:
    """Without what contradicts the operator's word."""
    switch, effort = format.thinking_switch, given.get("effort")
    left = {name: value for name, value in given.items() if name != "thinking"}
    if effort is not None and (not thinking or is_effort_off(effort)):
        del left["effort"]
    if thinking and left.get("thinking_budget") == 0:
        del left["thinking_budget"]
    if switch is not None and switch.name in (left.get("variables") or {}):
        left["variables"] = {name: value for name, value in left["variables"].items() if name != switch.name}
    return left


def _followable(operators: Mapping[str, Any], format: Format) -> dict[str, Any]:
    """An operator's wish is for every model: where a template has no switch, a thought is closed as it opens."""
    thinking = operators.get("thinking")
    if thinking is None or format.thinking_switch is not None:
        return dict(operators)
    others = {name: value for name, value in operators.items() if name != "thinking"}
    return {**others, "thinking_budget": 0} if format.thinks and not thinking else others
