"""Learns the switches of a template: renders every variable with its values and compares the results.

The values come from the template's syntax tree; the kind of a switch follows from the text that it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cached_property
from typing import Any

from palaver.formats.effort import (
    CONVENTIONAL_EFFORTS,
    are_only_switches,
    effort_rank,
    is_effort_automatic,
    is_effort_off,
    order_efforts,
)
from palaver.formats.facts import Confidence, Switch, SwitchKind, SwitchType, ThinkingFacts, list_values
from palaver.formats.learn.probes import (
    NUMBER,
    QUESTION,
    WORD,
    Prober,
    ProbeStage,
    Texts,
)
from palaver.formats.learn.template_variables import TemplateVariable, VariableUse
from palaver.formats.markers import common_end, common_start
from palaver.formats.tool_calls.samples import sample_tools

_ABOUT_THINKING = re.compile(r"think|thought|reason|reflect|effort|deliberat|ponder", re.IGNORECASE)
_ABOUT_LENGTH = re.compile(r"token|budget|length", re.IGNORECASE)
_ABOUT_DATE = re.compile(r"\b(date|today|day|time|now)\b", re.IGNORECASE)
_ABOUT_TOOLS = re.compile(r"\b(tool|function)s?\b", re.IGNORECASE)
_DATE_FORMATS = (
    "%d %b %Y", "%d %B %Y", "%Y-%m-%d", "%B %d, %Y", "%b %d, %Y", "%b %d %Y", "%A, %B %d, %Y", "%d/%m/%Y", "%m/%d/%Y",
    "%d.%m.%Y", "%Y/%m/%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%b %d %Y %H:%M:%S GMT",
)  # fmt: skip
_LONG_DATE_FORMAT = "%b %d %Y %H:%M:%S GMT"
_PLAIN = ("plain", "system")
_TOOL_SCENES = {"tools", "calls", "calls, arguments as text"}
_SCENE_CHANGES = {
    "tools": "how tools are listed",
    "pictures": "pictures",
    "documents": "documents",
    "earlier turns": "how earlier turns are written",
}
"""What a variable changes that changes a scene, but not the plain one."""
_MIN_TOKEN_COUNT = 64
"""Numbers from here on count tokens; smaller ones are levels."""


class VariableTrial:
    """What the template renders with each value of one variable. `context` are other variables that are set
    meanwhile."""

    def __init__(self, stage: ProbeStage, variable: TemplateVariable, context: dict[str, Any]) -> None:
        self._stage = stage
        self.variable = variable
        self.name = variable.name
        self.context = context
        self.unset = stage.render_scenes(**context)
        self._values: dict[str, Any] = {}
        """The values that the template accepts, by their `repr`: 1 and True are different values."""
        self._texts: dict[str, Texts] = {}
        for key, value in {repr(value): value for value in _candidates(variable)}.items():
            texts = stage.render_scenes(**self._with(value))
            if self._is_accepted(texts) or (isinstance(value, list) and any(texts)):
                self._values[key], self._texts[key] = value, texts

    def _with(self, value: Any) -> dict[str, Any]:
        return {**self.context, self.name: value}

    def _is_accepted(self, texts: Texts) -> bool:
        """Whether the template renders every scene that it renders without the variable."""
        return all(text is not None or before is None for text, before in zip(texts, self.unset, strict=True))

    @property
    def values(self) -> list[Any]:
        """The values that the template accepts."""
        return list(self._values.values())

    def accepts(self, value: Any) -> bool:
        return repr(value) in self._values

    def equals_unset(self, value: Any) -> bool:
        return self._texts_with(value) == self.unset

    def holds_tools(self) -> bool:
        """Whether tools in this variable are rendered like the standard `tools`."""
        first = next(iter(self._texts_with(sample_tools())), None)
        return first is not None and first == self._stage.rendered_tools()

    def _texts_with(self, value: Any) -> Texts:
        return self._texts.get(repr(value), ())

    @property
    def _all_texts(self) -> list[Texts]:
        return [self.unset, *self._texts.values()]

    @property
    def has_effect(self) -> bool:
        return bool(self.changed)

    @cached_property
    def changed(self) -> list[str]:
        """The scenes that the variable changes."""
        return [name for name, *texts in zip(self._stage.scenes, *self._all_texts, strict=True) if len(set(texts)) > 1]

    @cached_property
    def openings(self) -> dict[str, str | None]:
        """How the reply opens with each value."""
        return {"left out": self._stage.reply_opening(**self.context)} | {
            key: self.opening(value) for key, value in self._values.items()
        }

    def opening(self, value: Any) -> str | None:
        """How the reply opens with this value."""
        return self._stage.reply_opening(**self._with(value))

    @cached_property
    def switches_thinking(self) -> bool:
        """Whether the values open the reply differently as to thinking."""
        return len({state for state in self.openings.values() if state}) > 1

    def contexts(self) -> Iterator[dict[str, Any]]:
        """One value for each way to open the reply."""
        found = {self.openings[key]: value for key, value in reversed(self._values.items()) if self.openings[key]}
        return ({self.name: value} for value in found.values())

    def changes_only_thoughts(self) -> bool:
        """Whether only thoughts and their markers change."""
        scenes = zip(*self._all_texts, strict=True)
        return all(len({self._stage.without_thoughts(text) for text in texts}) == 1 for texts in scenes)

    @cached_property
    def keeping(self) -> dict[str, bool]:
        """Whether the thinking of earlier turns is kept with each value."""
        kept = {key: self._stage.keeps_thinking(**self._with(value)) for key, value in self._values.items()}
        return {key: value for key, value in kept.items() if value is not None}

    def prints(self, value: Any) -> bool:
        return any(text is not None and str(value) in text for text in self._texts_with(value))

    def text_before_value(self) -> str:
        """The text before the value in the same sentence, if the template writes the value."""
        for text in self._texts_with(WORD):
            if text and WORD in text:
                return re.split(r"[.;!?>\]]\s*|\n", text[: text.index(WORD)])[-1][-60:]
        return ""

    def mentions(self, pattern: re.Pattern[str]) -> str:
        """The first changed text that matches the pattern."""
        scenes = [index for index, name in enumerate(self._stage.scenes) if name in _PLAIN]
        for value in (WORD, NUMBER):
            for text in self._texts_with(value)[: len(scenes)]:
                for found in re.finditer(re.escape(str(value)), text or ""):
                    around = (text or "")[max(0, found.start() - 60) : found.end() + 30]
                    if pattern.search(around):
                        return around
        for key, value in self._values.items():
            for index in scenes if value != sample_tools() else ():
                changed = _difference(self.unset[index], self._texts[key][index])
                if pattern.search(changed):
                    return changed
        return ""

    def description(self) -> str:
        """A description of what the variable changes."""
        changed = [] if "plain" in self.changed else self.changed
        out = [*self._describe_plain(), *(phrase for name, phrase in _SCENE_CHANGES.items() if name in changed)]
        if "earlier thoughts" in changed and "earlier turns" not in changed:
            out.append("whether thinking of earlier turns is kept")
        if any(name.startswith("calls") for name in self.changed) and not out:
            out.append("turns with tools")
        if "last turn" in self.changed and not out:
            out.append("how the last turn is written")
        return ", ".join(out) or "nothing in the probes"

    def _describe_plain(self) -> Iterator[str]:
        """Descriptions of changes before and after the question."""
        scenes = [texts for name, *texts in zip(self._stage.scenes, *self._all_texts, strict=True) if name in _PLAIN]
        for part, phrase in ((0, "the text before the conversation"), (2, "how the reply opens")):
            if any(len({text.partition(QUESTION)[part] for text in texts if text is not None}) > 1 for texts in scenes):
                yield phrase

    def excerpt(self) -> str:
        """An excerpt of the text that one of the values changes."""
        for texts in self._texts.values():
            for unset, text in zip(self.unset, texts, strict=True):
                if text is not None and text != unset:
                    return _difference(unset, text)[-200:]
        return self.name


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _candidates(variable: TemplateVariable) -> Iterator[Any]:
    """Values to try: those that the template names, those next to its bounds, and some generic ones."""
    yield from (value for value in (*variable.values, *variable.defaults) if value is not None)
    if VariableUse.NUMBER in variable.uses or any(map(is_number, variable.defaults)):
        yield from (near for bound in variable.bounds for near in (bound - 1, bound, bound + 1))
        yield from (0, NUMBER)
    if not variable.uses & {VariableUse.LIST, VariableUse.OBJECT}:
        yield WORD
    yield from (True, False)
    if variable.uses & {VariableUse.LIST, VariableUse.MEMBERS}:
        yield [WORD]
        yield sample_tools()


def _difference(before: str | None, after: str | None) -> str:
    """The difference of two texts, from the start of the line."""
    one, two = before or "", after or ""
    if one == two:
        return ""
    start = len(common_start(one, two))
    end = len(common_end(one[start:], two[start:]))
    line = max(one.rfind("\n", 0, start) + 1, start - 60, 0)
    return " / ".join(text[line : len(text) - end] for text in (one, two))


class SwitchLearner:
    """`note(about, fact, seen, confidence)` records the evidence for a fact."""

    def __init__(
        self, prober: Prober, note: Callable[..., None], thinking: ThinkingFacts | None, reasoning_field: str | None
    ) -> None:
        self._inputs = prober.inputs
        self._note = note
        self._stage = ProbeStage(prober, thinking, reasoning_field)

    def learn(self) -> tuple[Switch, ...]:
        """One switch per variable, in alphabetical order. A variable without an effect is tried again with
        thinking on and off."""
        trials = [VariableTrial(self._stage, variable, {}) for variable in self._inputs]
        switching = [trial for trial in trials if trial.switches_thinking]
        contexts = [context for trial in switching for context in trial.contexts()]
        effective = (trial if trial.has_effect else self._in_context(trial, contexts) for trial in trials)
        return tuple(_SwitchBuilder(self._stage, self._note, trial).build(not switching) for trial in effective)

    def _in_context(self, trial: VariableTrial, contexts: list[dict[str, Any]]) -> VariableTrial:
        trials = (VariableTrial(self._stage, trial.variable, c) for c in contexts if trial.name not in c)
        return next((other for other in trials if other.has_effect), trial)


class _SwitchBuilder:
    """Builds the switch of one variable from its trial."""

    def __init__(self, stage: ProbeStage, note: Callable[..., None], trial: VariableTrial) -> None:
        self._stage = stage
        self._record = note
        self._trial = trial
        self._variable = trial.variable

    def _note(self, fact: str, seen: str, confidence: Confidence) -> None:
        self._record(f"switches.{self._trial.name}", fact, seen, confidence)

    def build(self, by_name: bool) -> Switch:
        """`by_name` allows the name of the variable as evidence, if nothing else shows its kind."""
        kind, confidence, seen = self._kind(by_name)
        switch = self._switch(kind)
        if kind is SwitchKind.THINKING and switch.off is None:
            switch = self._switch(SwitchKind.OTHER)
        fact = f"{switch.name} ({switch.kind}) changes {switch.changes}"
        if switch.default is not None:
            fact += f"; the default is {switch.default!r}"
        if context := self._trial.context:
            fact += f"; seen with {', '.join(f'{name} = {value!r}' for name, value in context.items())}"
        self._note(fact, seen or self._trial.excerpt(), confidence)
        return switch

    # -- the kind ----------------------------------------------------------------------------------------------------

    def _kind(self, by_name: bool) -> tuple[SwitchKind, Confidence, str]:
        if self._trial.switches_thinking:
            seen = ", ".join(f"{value} {state}" for value, state in self._trial.openings.items() if state)
            return self._thinking_kind(), Confidence.SEEN, f"the reply opens in a thought, closed or free: {seen}"
        if len(set(self._trial.keeping.values())) > 1 and self._trial.changes_only_thoughts():
            return SwitchKind.KEEPING, Confidence.SEEN, _describe_keeping(self._trial.keeping)
        if self._is_date():
            return SwitchKind.DATE, Confidence.INFERRED, self._trial.text_before_value()
        about = self._trial.mentions(_ABOUT_THINKING)
        named = self._trial.name if by_name and _ABOUT_THINKING.search(self._trial.name) else ""
        if self._trial.has_effect and self._type not in ("list", "object") and (about or named) and self._is_choice():
            return self._thinking_kind(), Confidence.INFERRED, about or named
        if self._is_about_tools():
            return SwitchKind.TOOLS, Confidence.SEEN, ""
        return SwitchKind.OTHER, Confidence.SEEN if self._trial.has_effect else Confidence.INFERRED, ""

    def _thinking_kind(self) -> SwitchKind:
        if self._type == "integer":
            return SwitchKind.BUDGET if self._counts_tokens() else SwitchKind.EFFORT
        if self._type != "text":
            return SwitchKind.THINKING
        values = self._text_values()
        on = [value for value in values if value not in self._off_values(values)]
        if are_only_switches(values) or (len(on) == 1 and effort_rank(on[0]) is None):
            return SwitchKind.THINKING if values else SwitchKind.EFFORT
        return SwitchKind.EFFORT

    def _is_choice(self) -> bool:
        """Whether the value is one of some words, and not free text."""
        if self._type != "text":
            return True
        values = self._text_values()
        return bool(values) and all(len(str(value).split()) == 1 for value in values)

    def _counts_tokens(self) -> bool:
        numbers = [*self._variable.bounds, *self._variable.values, *self._variable.defaults]
        large = any(isinstance(n, int) and (n >= _MIN_TOKEN_COUNT or n == -1) for n in numbers)
        return large or bool(self._trial.mentions(_ABOUT_LENGTH))

    def _is_date(self) -> bool:
        if self._type not in ("text", "any"):
            return False
        return any(_date_format(value) for value in self._variable.defaults) or bool(
            _ABOUT_DATE.search(self._trial.text_before_value())
        )

    def _is_about_tools(self) -> bool:
        changed = set(self._trial.changed)
        only_tools = bool(changed) and changed <= _TOOL_SCENES
        return self._trial.holds_tools() or only_tools or bool(self._trial.mentions(_ABOUT_TOOLS))

    # -- the values --------------------------------------------------------------------------------------------------

    def _switch(self, kind: SwitchKind) -> Switch:
        values, on, off = self._values(kind)
        form = ""
        if kind is SwitchKind.DATE:
            written = next((form for value in self._variable.defaults if (form := _date_format(value))), "")
            form = written or self._stage.date_format() or _LONG_DATE_FORMAT
        return Switch(
            name=self._trial.name,
            kind=kind,
            type=self._type,
            values=values,
            others=self._takes_others(values, kind),
            default=self._default(values),
            on=on,
            off=off,
            form=form,
            changes=self._trial.description(),
        )

    @cached_property
    def _type(self) -> SwitchType:
        variable = self._variable
        known = [*variable.values, *variable.defaults]
        if any(isinstance(value, str) for value in known):
            return "text"
        if any(isinstance(value, bool) for value in known):
            return "boolean"
        if VariableUse.NUMBER in variable.uses or any(isinstance(value, int) for value in known):
            return "integer"
        by_use: dict[VariableUse, SwitchType] = {
            VariableUse.OBJECT: "object",
            VariableUse.LIST: "list",
            VariableUse.TEXT: "text",
            VariableUse.MEMBERS: "any",
        }
        for use, type_ in by_use.items():
            if use in variable.uses:
                return type_
        return "boolean" if VariableUse.TRUTH in variable.uses else "any"

    def _values(self, kind: SwitchKind) -> tuple[tuple[Any, ...], Any, Any]:
        """The known values, and those that switch thinking on and off."""
        if self._type == "boolean":
            on, off = self._on_and_off(kind, (True, False))
            return (True, False), on, off
        if self._type == "integer":
            return self._numbers(kind)
        values = self._text_values() if self._type == "text" else ()
        if kind is SwitchKind.EFFORT and not any(value != d for value in values for d in self._variable.defaults):
            known = {effort_rank(value) for value in values}
            values = (*(word for word in CONVENTIONAL_EFFORTS if effort_rank(word) not in known), *values)
            fact = f"{self._trial.name} is written as it is given: any word goes, these are usual"
            self._note(fact, list_values(values), Confidence.CONVENTION)
        if kind in (SwitchKind.THINKING, SwitchKind.EFFORT, SwitchKind.KEEPING):
            values = order_efforts(values)
            on, off = self._on_and_off(kind, values)
            return values, on, off
        return (values if self._variable.values else ()), None, None

    def _numbers(self, kind: SwitchKind) -> tuple[tuple[Any, ...], Any, Any]:
        exact = [value for value in self._variable.values if isinstance(value, int)]
        values = order_efforts(exact)
        if kind not in (SwitchKind.EFFORT, SwitchKind.BUDGET):
            return values, None, None
        off = next(iter(self._off_values(tuple(filter(is_number, self._trial.values)))), None)
        default = self._default(values)
        on = default if default != off else values[-1] if kind is SwitchKind.EFFORT and values else None
        return values, on, off

    def _on_and_off(self, kind: SwitchKind, values: tuple[Any, ...]) -> tuple[Any, Any]:
        if kind is SwitchKind.KEEPING:
            kept = self._trial.keeping
            on, off = (next((v for v in values if kept.get(repr(v)) is keeps), None) for keeps in (True, False))
            return on, off
        if kind not in (SwitchKind.THINKING, SwitchKind.EFFORT):
            return None, None
        offs = self._off_values(values)
        ons = [value for value in values if value not in offs and not is_effort_automatic(value)]
        if not offs or not ons:
            return None, next(iter(offs), None)
        default = self._default(values)
        return default if default in ons else ons[-1 if kind is SwitchKind.EFFORT else 0], offs[0]

    def _off_values(self, values: tuple[Any, ...]) -> list[Any]:
        """The values that switch thinking off, by how the reply opens, or else by the meaning of the word."""
        states = {repr(value): self._trial.opening(value) for value in values}
        order = {"open": 2, "free": 1, "closed": 0}
        known = [order[state] for state in states.values() if state]
        if len(set(known)) > 1:
            lowest = min(known)
            return [v for v in values if (state := states[repr(v)]) and order[state] == lowest]
        return [value for value in values if value is False or (isinstance(value, str) and is_effort_off(value))]

    def _text_values(self) -> tuple[Any, ...]:
        found = (v for v in (*self._variable.values, *self._variable.defaults) if isinstance(v, str) and v)
        return tuple(value for value in dict.fromkeys(found) if self._trial.accepts(value))

    def _default(self, values: tuple[Any, ...]) -> Any:
        """The default in the template, or a value, with the same effect as leaving the variable out."""
        for value in (*self._variable.defaults, *values):
            if value is not None and self._trial.equals_unset(value):
                others = (other for other in self._trial.values if repr(other) != repr(value))
                if value in self._variable.defaults or not all(map(self._trial.equals_unset, others)):
                    return value
        return None

    def _takes_others(self, values: tuple[Any, ...], kind: SwitchKind) -> bool:
        if self._type == "boolean":
            return False
        if self._type == "integer":
            return kind is not SwitchKind.EFFORT or self._trial.accepts(NUMBER)
        if not values or not self._trial.accepts(WORD):
            return not values
        return self._trial.prints(WORD) or not self._variable.values


def _date_format(value: Any) -> str:
    """The `strftime` format of a date; empty for other values."""
    for form in _DATE_FORMATS if isinstance(value, str) else ():
        try:
            datetime.strptime(value, form)
        except ValueError:
            continue
        return form
    return ""


def _describe_keeping(keeping: dict[str, bool]) -> str:
    return ", ".join(f"{value} {'kept' if kept else 'dropped'}" for value, kept in keeping.items())
