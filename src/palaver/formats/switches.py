"""Switches: the variables of a template that a request can set, such as `enable_thinking` or `reasoning_effort`.

A request is neutral (thinking on or off, effort, budget). `SwitchResolver` translates it to template variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from palaver.errors import BadParameter

if TYPE_CHECKING:
    from palaver.formats.base import RenderOptions

CONVENTIONAL_EFFORTS = ("low", "medium", "high")
"""Efforts that are offered if a template writes the word as it is given and names no values."""

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
_SWITCH_WORDS = {*_SCALE[0].split(), *_AUTOMATIC, "on", "yes", "enabled", "enable", "true", "false"}


def effort_rank(word: Any) -> int | None:
    """The rank of an effort, from none (0) up; None for an unknown word."""
    return _RANKS.get(str(word).casefold().replace("-", "_").replace(" ", "_"))


def is_effort_off(word: Any) -> bool:
    return effort_rank(word) == 0


def is_effort_automatic(word: Any) -> bool:
    """Whether the word leaves the effort to the model."""
    return str(word).casefold() in _AUTOMATIC


def are_only_switches(words: Iterable[Any]) -> bool:
    """Whether the words mean on, off or automatic only, and no effort."""
    return all(str(word).casefold() in _SWITCH_WORDS for word in words)


def order_efforts(words: Iterable[Any]) -> tuple[Any, ...]:
    """Weakest first, if all words have a rank; else in the given order."""
    given = list(words)
    if all(isinstance(word, int) for word in given):
        return tuple(sorted(given))
    if any(effort_rank(word) is None for word in given):
        return tuple(given)
    return tuple(sorted(given, key=lambda word: effort_rank(word) or 0))


def match_effort(effort: str, words: Iterable[Any]) -> Any:
    """The word for this effort: the same word, or the only one of the same rank; else None."""
    given = list(words)
    equal = [word for word in given if str(word).casefold() == effort.casefold()]
    rank = effort_rank(effort)
    same_rank = [word for word in given if rank is not None and effort_rank(word) == rank]
    return equal[0] if equal else same_rank[0] if len(same_rank) == 1 else None


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
    """Which tools are in the prompt, or how they are written."""
    OTHER = "other"


SwitchType = Literal["boolean", "text", "integer", "list", "object", "any"]
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
    """One variable of a template that a request can set."""

    name: str
    kind: SwitchKind = SwitchKind.OTHER
    type: SwitchType = "any"
    values: tuple[Any, ...] = ()
    """The known values; efforts from the weakest to the strongest."""
    others: bool = True
    """Whether other values are accepted, too."""
    default: Any = None
    """The value that is equivalent to leaving the variable out; None if it is unknown or there is none."""
    on: Any = None
    """The values that switch thinking (or keeping it) on and off; None if no value does."""
    off: Any = None
    form: str = ""
    """The `strftime` format of a date."""
    changes: str = ""
    """A description of what it changes."""

    def thinks(self, variables: Mapping[str, Any]) -> bool:
        """Whether the model thinks with these variables; without this variable, whether it thinks by default."""
        if self.name in variables:
            return bool(variables[self.name] != self.off)
        return bool(self.default == self.on)

    def check(self, value: Any) -> None:
        """Raises BadParameter for a value that the template does not accept."""
        fits = isinstance(value, TYPES[self.type]) and (self.type != "integer" or not isinstance(value, bool))
        if not fits:
            raise BadParameter(self.name, value, f"must be {_TYPE_NAMES[self.type]} for this model's chat template")
        if not self.others and not any(value == known and type(value) is type(known) for known in self.values):
            raise BadParameter(self.name, value, f"this model's chat template takes {list_values(self.values)}")


_TYPE_NAMES = {"boolean": "true or false", "text": "a text", "integer": "a whole number", "list": "a list",
      "object": "an object", "any": "something"}  # fmt: skip


def list_values(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def thinking_switch(switches: Iterable[Switch]) -> Switch | None:
    """The switch that turns thinking on and off: a thinking switch, or else an effort or budget that can be off."""
    given = list(switches)
    for kind in (SwitchKind.THINKING, SwitchKind.EFFORT, SwitchKind.BUDGET):
        for switch in given:
            if switch.kind is kind and switch.off is not None:
                return switch
    return None


def switch_of_kind(switches: Iterable[Switch], kind: SwitchKind) -> Switch | None:
    return next((switch for switch in switches if switch.kind is kind), None)


class SwitchResolver:
    """Translates render options to the variables of one template."""

    def __init__(self, switches: tuple[Switch, ...], variables: Iterable[str]) -> None:
        self._switches = {switch.name: switch for switch in switches}
        self._variables = {*self._switches, *variables}

    def variables(self, options: RenderOptions) -> dict[str, Any]:
        """The variables that express the options. BadParameter if the template has no variable for one."""
        thinking = _requested_thinking(options)
        resolved = {**self._effort(options, thinking), **self._budget(options)}
        if thinking is not None:
            resolved = {**self._thinking(thinking, resolved), **resolved}
        for name, value in options.variables.items():
            self._check(name, value)
            if name in resolved and resolved[name] != value:
                raise BadParameter(name, value, f"contradicts the other options, which set it to {resolved[name]!r}")
        return resolved

    def _check(self, name: str, value: Any) -> None:
        if name in self._switches:
            self._switches[name].check(value)
        elif name not in self._variables:
            has = list_values(self._switches) or "none"
            raise BadParameter(name, value, f"this model's chat template has no such variable; it has {has}")

    def _thinking(self, thinking: bool, resolved: Mapping[str, Any]) -> dict[str, Any]:
        """`resolved` are the variables for effort and budget, which may switch thinking already."""
        switch = thinking_switch(self._switches.values())
        if switch is None:
            if thinking and resolved:
                return {}  # the effort or budget implies thinking, and no switch turns it off
            state = "on" if thinking else "off"
            raise BadParameter("think", state, "this model's chat template has no switch for thinking")
        value = switch.on if thinking else switch.off
        return {} if value is None else {switch.name: value}

    def _effort(self, options: RenderOptions, thinking: bool | None) -> dict[str, Any]:
        if options.effort is None or (thinking is False and is_effort_off(options.effort)):
            return {}
        switch = switch_of_kind(self._switches.values(), SwitchKind.EFFORT)
        if switch is None:
            raise BadParameter(
                "effort", options.effort, f"this model's chat template has no levels of effort{self._hint()}"
            )
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
            raise BadParameter(
                "budget", options.budget, f"this model's chat template has no thinking budget{self._hint()}"
            )
        switch.check(options.budget)
        return {switch.name: options.budget}

    def _hint(self) -> str:
        kinds = (SwitchKind.THINKING, SwitchKind.EFFORT, SwitchKind.BUDGET)
        has = [f"{s.name} ({s.kind})" for s in self._switches.values() if s.kind in kinds]
        return f"; it has {', '.join(has)}" if has else " and no other switch for thinking"


def _requested_thinking(options: RenderOptions) -> bool | None:
    """Whether thinking is requested, directly or by an effort or budget. They must not contradict each other."""
    requests: list[tuple[str, Any, bool]] = []
    if options.thinking is not None:
        requests.append(("think", "on" if options.thinking else "off", options.thinking))
    if options.effort is not None:
        requests.append(("effort", options.effort, not is_effort_off(options.effort)))
    if options.budget is not None:
        requests.append(("budget", options.budget, options.budget != 0))
    for name, value, thinking in requests[1:]:
        if thinking != requests[0][2]:
            raise BadParameter(name, value, f"contradicts {requests[0][0]} = {requests[0][1]!r}")
    return requests[0][2] if requests else None
