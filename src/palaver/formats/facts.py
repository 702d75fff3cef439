"""The facts of a format with their evidence, the cache of learned facts, and the overrides in `palaver-format.toml`.

Switches are facts, too: the variables of a template that a request can set, such as `enable_thinking` or
`reasoning_effort`. A request is neutral (thinking on or off, effort, budget). `SwitchResolver` translates it to
template variables."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum, StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from platformdirs import user_cache_path

from palaver import __version__
from palaver.encoding import Annotation
from palaver.errors import BadParameter
from palaver.formats.effort import is_effort_off, match_effort
from palaver.formats.markers import CONTROL_LIKE, split_marker
from palaver.formats.tool_calls.syntaxes import CallSyntax

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from palaver.formats.base import RenderOptions


_PACKAGE = __name__.rpartition(".")[0]


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
        """Whether the model may think with these variables; without this variable, whether it may by default."""
        if self.name in variables:
            return bool(variables[self.name] != self.off)
        return bool(self.on is None if self.default is None else self.default != self.off)

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


FILE_NAME = "palaver-format.toml"
_VERSION = 3
"""The version of the cached JSON."""


@dataclass(frozen=True)
class ThinkingFacts:
    """`opening` and `closing` are the text around a thought, white space included."""

    opening: str
    closing: str
    by_convention: bool = False
    """Nothing in the template shows it; most models use these markers."""
    closing_marker: str = ""
    """The marker that closes the thought, if it is not the first control token of `closing`."""
    first_line: bool = False
    """The opening is no marker but the first line of the thought, which the generation prompt writes."""

    @cached_property
    def opener(self) -> str:
        return self.opening.strip()

    @cached_property
    def closer(self) -> str:
        """The marker that closes the thought; the rest of `closing` opens the answer."""
        if self.closing_marker:
            return self.closing_marker
        found = split_marker(self.closing)
        first = next((place for place, part in enumerate(found) if CONTROL_LIKE.fullmatch(part)), None)
        return self.closing.strip() if first is None else " ".join(found[: first + 1])

    @cached_property
    def closing_before_calls(self) -> str:
        """`closing` up to the end of the marker that closes the thought: the rest opens an answer."""
        last = split_marker(self.closer)[-1]
        return self.closing[: self.closing.index(last) + len(last)]


@dataclass(frozen=True, slots=True)
class SectionTags:
    """The control tokens of sections that are named by text: `open name end ... close name end`."""

    open: str
    close: str
    end: str


class Confidence(StrEnum):
    SEEN = "seen"
    """The template wrote it for a probe."""
    INFERRED = "inferred"
    """It follows from text that the template wrote, dropped or described."""
    CONVENTION = "convention"
    """Nothing in the template shows it; most models do it this way."""
    GIVEN = "given"
    """It comes from an operator's `palaver-format.toml`."""


@dataclass(frozen=True, slots=True)
class Evidence:
    fact: str
    seen: str
    confidence: Confidence = Confidence.SEEN
    about: str = ""
    """The key of the fact it is evidence for."""


def _family() -> tuple[Any, ...]:
    from pydantic import Discriminator

    return (Discriminator("family"),)


@dataclass(frozen=True, slots=True)
class Facts:
    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "strict": True}

    header: str = ""
    """The text that opens the assistant's turn, without any part of the reply."""
    sections: SectionTags | None = None
    reasoning_field: str | None = None
    """The message field that the template reads thinking from; `content` for typed parts."""
    thinking: ThinkingFacts | None = None
    switches: tuple[Switch, ...] = ()
    """The variables that the template reads, beside those that every template gets."""
    keeps_thinking: bool = False
    """Whether the thinking of earlier turns stays in the prompt."""
    answer_opening: str = ""
    """The text before an answer, beside a closed thought."""
    answer_closing: str = ""
    turn_ends: tuple[str, ...] = ()
    """The strings that end the assistant's turn."""
    stop_strings: tuple[str, ...] = ()
    """Stop strings that the template itself declares."""
    calls: Annotated[CallSyntax, Annotation(_family)] | None = None
    call_header: str = ""
    """The header of a message with a call, after `header`, if messages are addressed to tools by name. The name of the
    tool in it is that of the sample."""
    called_text_opening: str = ""
    """The text before an answer that calls follow, if it is another than `answer_opening`."""
    called_text_closing: str = ""
    """The marker after such an answer."""
    space_before_calls: str = ""
    """The text between an answer and the calls after it."""
    space_after_thought: str = ""
    """The text between the marker that closes a thought and the calls after it."""
    calls_in_thought: bool = False
    """Whether a call inside an open thought is a call. If not, its markup is part of the thought."""
    no_tools: str = "null"
    """The value of `tools` that means no tools to the template: null, empty or absent."""
    asks_for: tuple[str, ...] = ()
    """Undeclared names in the template, beside those that every template gets."""
    arguments_as_text: bool = False
    """Whether the template takes the arguments of a call as JSON text instead of an object."""
    evidence: tuple[Evidence, ...] = field(default=())

    @property
    def empty_answer(self) -> str:
        """The text around an answer, without an answer."""
        return self.answer_opening.strip() + self.answer_closing.strip() if self.answer_closing.strip() else ""

    @property
    def empty_called_text(self) -> str:
        """The text around an answer that calls follow, without an answer."""
        return self.called_text_opening.strip() + self.called_text_closing.strip()

    @property
    def switch(self) -> Switch | None:
        """The switch that turns thinking on and off."""
        return thinking_switch(self.switches)

    @property
    def keeping(self) -> Switch | None:
        """The switch that keeps the thinking of earlier turns."""
        return switch_of_kind(self.switches, SwitchKind.KEEPING)

    def tool_variables(self, schemas: list[dict[str, Any]]) -> dict[str, Any]:
        """The template variables for these tools."""
        if not schemas:
            return no_tool_variables(self.no_tools)
        functions = {"functions": json.dumps(schemas, indent=4)} if "functions" in self.asks_for else {}
        return {"tools": schemas, **functions}


def no_tool_variables(how: str) -> dict[str, Any]:
    """The template variables for no tools."""
    if how == "absent":
        return {}
    return {"tools": None if how == "null" else [], "functions": ""}


@cache
def _adapter() -> TypeAdapter[Facts]:
    from pydantic import TypeAdapter

    return TypeAdapter(Facts)


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """The facts as JSON values. The syntax of tool calls has a `family`; switches are keyed by name."""
    values: dict[str, Any] = _adapter().dump_python(facts, mode="json")
    return {**values, "switches": {switch.pop("name"): switch for switch in values["switches"]}}


def facts_from_json(values: Mapping[str, Any], base: Facts | None = None) -> Facts:
    """Facts from JSON values, on top of `base`. BadParameter names an unknown key or a value of another type."""
    from pydantic import ValidationError

    merged = _merge(facts_to_json(base or Facts()), dict(values))
    try:
        return _adapter().validate_json(json.dumps({**merged, "switches": _switch_list(merged["switches"])}))
    except ValidationError as error:
        raise _bad_parameter(merged, error) from None


def _switch_list(table: Any) -> Any:
    """The switches of a table keyed by name, sorted by name; anything else as it is."""
    if not isinstance(table, Mapping):
        return table
    return [
        {**table[name], "name": name} if isinstance(table[name], Mapping) else table[name] for name in sorted(table)
    ]


def _bad_parameter(values: Mapping[str, Any], error: ValidationError) -> BadParameter:
    first = error.errors()[0]
    place = [str(step) for step in first["loc"]]
    if place[0] == "switches" and len(place) > 1:
        place[1] = sorted(values["switches"])[int(place[1])]
    if place[0] == "calls" and len(place) > 1:
        del place[1]  # the family
    if first["type"].startswith("union_tag"):
        place.append("family")
    return BadParameter(".".join(place), first["input"], first["msg"])


def _merge(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values on top of the base, table by table. Calls of another family replace those of the base."""
    out = dict(base)
    for key, value in values.items():
        inner = base.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and value.get("family") in (None, inner.get("family")):
            out[key] = _merge(inner, value)
        else:
            out[key] = value
    return out


def apply_overrides(facts: Facts, path: Path) -> Facts:
    """The facts with those of the file on top. An unknown key is an error that names it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadParameter(path.name, "...", f"can't be read as TOML: {error}") from None
    merged = facts_from_json(values, facts)
    note = Evidence(f"corrected by {path.name}", ", ".join(values), Confidence.GIVEN)
    return replace(merged, evidence=(*merged.evidence, note))


def cached_facts(
    source: str, strings: Mapping[str, str], control: Mapping[str, int], learn: Callable[[], Facts]
) -> Facts:
    """The facts from the cache; if there are none, they are learned and cached."""
    key = json.dumps([_VERSION, __version__, _code_version(), source, sorted(strings.items()), sorted(control)])
    path = user_cache_path("palaver") / "formats" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.pickle"
    cached = _read(path)
    if cached is not None:
        return cached
    facts = learn()
    with suppress(OSError):
        _write(path, pickle.dumps(facts))
    return facts


def _code_version() -> int:
    """Changes with the code of this package, so that changed code never reads facts of older code."""
    return max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))


class _FactsUnpickler(pickle.Unpickler):
    """Reads values of the formats' own types, and calls nothing else. Quicker than JSON, which needs pydantic."""

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(sys.modules.get(module), name, None) if module.startswith(f"{_PACKAGE}.") else None
        if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum)):
            return kind
        raise pickle.UnpicklingError(f"{module}.{name} is no fact")


def _read(path: Path) -> Facts | None:
    try:
        with path.open("rb") as file:
            facts = _FactsUnpickler(file).load()
    except Exception:  # whatever is in a damaged file
        return None
    return facts if isinstance(facts, Facts) else None


def _write(path: Path, data: bytes) -> None:
    """Writes the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)
