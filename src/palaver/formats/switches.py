"""The variables by which a template can be told what to do, and how a wish is said with them.

A wish is neutral (think, or not; how hard; how long); the template's own names and values are its format's matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from palaver.errors import BadParameter

if TYPE_CHECKING:
    from palaver.formats.base import RenderOptions

CONVENTIONAL = ("low", "medium", "high")
"""What is offered where a template writes the word as it is given and shows no other."""

_SCALE = (
    "none off no never disabled disable no_think nothink no_thinking zero without silent quiet",
    "minimal min minimum tiny least lowest",
    "low light lite brief briefly short shallow quick fast small little",
    "medium mid normal moderate standard balanced middle default regular",
    "high heavy deep long large thorough hard strong much",
    "max maximum xhigh extra_high very_high highest ultra most extreme",
)
_RANKS = {word: rank for rank, words in enumerate(_SCALE) for word in words.split()}
_AUTOMATIC = {"auto", "automatic", "adaptive", "dynamic"}
_SWITCHES = {*_SCALE[0].split(), *_AUTOMATIC, "on", "yes", "enabled", "enable", "true", "false"}


def effort_rank(word: Any) -> int | None:
    """Where a word stands from nothing (0) up; None for one that is not of the scale."""
    return _RANKS.get(str(word).casefold().replace("-", "_").replace(" ", "_"))


def is_effort_off(word: Any) -> bool:
    return effort_rank(word) == 0


def is_effort_automatic(word: Any) -> bool:
    """Whether the word leaves it to the model."""
    return str(word).casefold() in _AUTOMATIC


def are_only_switches(words: Iterable[Any]) -> bool:
    """Whether the words say on, off or automatic, and nothing about how much."""
    return all(str(word).casefold() in _SWITCHES for word in words)


def order_efforts(words: Iterable[Any]) -> tuple[Any, ...]:
    """Weakest first, where all have a place; else as they came."""
    given = list(words)
    if all(isinstance(word, int) for word in given):
        return tuple(sorted(given))
    if any(effort_rank(word) is None for word in given):
        return tuple(given)
    return tuple(sorted(given, key=lambda word: effort_rank(word) or 0))


def match_effort(asked: str, words: Iterable[Any]) -> Any:
    """The word that was asked for: by its letters, or as the only one of the same strength; else None."""
    given = list(words)
    same = [word for word in given if str(word).casefold() == asked.casefold()]
    place = effort_rank(asked)
    alike = [word for word in given if place is not None and effort_rank(word) == place]
    return same[0] if same else alike[0] if len(alike) == 1 else None


class SwitchKind(StrEnum):
    THINKING = "thinking"
    """Whether the model thinks."""
    EFFORT = "effort"
    """How hard it thinks, in words or levels."""
    BUDGET = "budget"
    """How many tokens it may think for."""
    KEEPING = "keeping"
    """Whether the thinking of earlier turns stays in the prompt."""
    DATE = "date"
    TOOLS = "tools"
    """Which tools are told, or how."""
    OTHER = "other"


TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "text": (str,),
    "integer": (int,),
    "list": (list, tuple),
    "object": (dict, list, tuple),
    "any": (object,),
}


@dataclass(frozen=True, slots=True)
class Switch:
    """One variable of a template."""

    name: str
    kind: SwitchKind = SwitchKind.OTHER
    type: str = "any"
    """One of `TYPES`."""
    values: tuple[Any, ...] = ()
    """What it is known to take; efforts from the weakest on."""
    others: bool = True
    """Whether it takes other values, too."""
    default: Any = None
    """The value that does what leaving it out does; None where that is unknown or is no value."""
    on: Any = None
    """What switches thinking (or keeping it) on, and off; None where no value does."""
    off: Any = None
    form: str = ""
    """How a date is written, as `strftime` takes it."""
    changes: str = ""
    """What it changes, for people."""

    def thinks(self, variables: Mapping[str, Any]) -> bool:
        """Whether the model thinks with these variables; without this one among them, whether it does by default."""
        if self.name in variables:
            return bool(variables[self.name] != self.off)
        return bool(self.default == self.on)

    def check(self, value: Any) -> None:
        """Raises BadParameter for a value that the template can't be meant to get."""
        fits = isinstance(value, TYPES[self.type]) and (self.type != "integer" or not isinstance(value, bool))
        if not fits:
            raise BadParameter(self.name, value, f"must be {_A[self.type]} for this model's chat template")
        if not self.others and not any(value == known and type(value) is type(known) for known in self.values):
            raise BadParameter(self.name, value, f"this model's chat template takes {list_values(self.values)}")


_A = {"boolean": "true or false", "text": "a text", "integer": "a whole number", "list": "a list",
      "object": "an object", "any": "something"}  # fmt: skip


def list_values(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def thinking_switch(switches: Iterable[Switch]) -> Switch | None:
    """What turns thinking on and off: a switch for it, or else an effort or a budget that can be nothing."""
    given = list(switches)
    for kind in (SwitchKind.THINKING, SwitchKind.EFFORT, SwitchKind.BUDGET):
        for switch in given:
            if switch.kind is kind and switch.off is not None:
                return switch
    return None


def switch_of_kind(switches: Iterable[Switch], kind: SwitchKind) -> Switch | None:
    return next((switch for switch in switches if switch.kind is kind), None)


class SwitchResolver:
    """Says wishes with one template's switches."""

    def __init__(self, switches: tuple[Switch, ...], known: Iterable[str]) -> None:
        self._switches = {switch.name: switch for switch in switches}
        self._known = {*self._switches, *known}

    def variables(self, options: RenderOptions) -> dict[str, Any]:
        """The variables that the options come to. What the template can't be told is a BadParameter."""
        thinking = _settled(options)
        told = {**self._effort(options, thinking), **self._budget(options)}
        if thinking is not None:
            told = {**self._thinking(thinking, told), **told}
        for name, value in options.variables.items():
            self._check(name, value)
            if name in told and told[name] != value:
                raise BadParameter(name, value, f"contradicts what was asked for, which is {told[name]!r}")
        return told

    def _check(self, name: str, value: Any) -> None:
        if name in self._switches:
            self._switches[name].check(value)
        elif name not in self._known:
            has = list_values(self._switches) or "none"
            raise BadParameter(name, value, f"this model's chat template asks for no such variable; it has {has}")

    def _thinking(self, thinking: bool, told: Mapping[str, Any]) -> dict[str, Any]:
        """Where the effort or the budget is what switches, it has been said with it already."""
        switch = thinking_switch(self._switches.values())
        if switch is None:
            if thinking and told:
                return {}  # asked for by an effort, and nothing stands in its way
            wanted = "on" if thinking else "off"
            raise BadParameter("think", wanted, "this model's chat template has no switch for thinking")
        value = switch.on if thinking else switch.off
        return {} if value is None else {switch.name: value}

    def _effort(self, options: RenderOptions, thinking: bool | None) -> dict[str, Any]:
        if options.effort is None or (thinking is False and is_effort_off(options.effort)):
            return {}
        switch = switch_of_kind(self._switches.values(), SwitchKind.EFFORT)
        if switch is None:
            raise BadParameter("effort", options.effort, f"this model's chat template knows no effort{self._has()}")
        value = match_effort(options.effort, [value for value in switch.values if value != switch.off])
        if value is None and switch.type == "integer" and switch.others and options.effort.isdecimal():
            value = int(options.effort)
        if value is None:
            takes = list_values(switch.values) or "a whole number"
            raise BadParameter("effort", options.effort, f"this model's chat template takes {takes}")
        return {switch.name: value}

    def _budget(self, options: RenderOptions) -> dict[str, Any]:
        if not options.budget:
            return {}
        switch = switch_of_kind(self._switches.values(), SwitchKind.BUDGET)
        if switch is None:
            raise BadParameter("budget", options.budget, f"this model's chat template knows no budget{self._has()}")
        switch.check(options.budget)
        return {switch.name: options.budget}

    def _has(self) -> str:
        kinds = (SwitchKind.THINKING, SwitchKind.EFFORT, SwitchKind.BUDGET)
        has = [f"{s.name} ({s.kind})" for s in self._switches.values() if s.kind in kinds]
        return f"; it has {', '.join(has)}" if has else " and no other switch for thinking"


def _settled(options: RenderOptions) -> bool | None:
    """Whether thinking is wanted: said outright, or by an effort or a budget, which must not contradict it."""
    said: list[tuple[str, Any, bool]] = []
    if options.thinking is not None:
        said.append(("think", "on" if options.thinking else "off", options.thinking))
    if options.effort is not None:
        said.append(("effort", options.effort, not is_effort_off(options.effort)))
    if options.budget is not None:
        said.append(("budget", options.budget, options.budget != 0))
    for name, value, wish in said[1:]:
        if wish != said[0][2]:
            raise BadParameter(name, value, f"contradicts {said[0][0]} = {said[0][1]!r}")
    return said[0][2] if said else None
