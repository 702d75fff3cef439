"""Learns what each variable of a template does: its values are tried, and what comes out is compared.

What is tried comes from the template's own syntax; what a variable is for shows in what it changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any

from palaver.formats import efforts
from palaver.formats.facts import Confidence, ThinkingFacts
from palaver.formats.inputs import Use
from palaver.formats.probes import NUMBER, WORD, Prober
from palaver.formats.scenes import Stage
from palaver.formats.switches import Switch, SwitchKind, listed
from palaver.formats.variables import Variable, is_number

_ABOUT_THINKING = re.compile(r"think|thought|reason|reflect|effort|deliberat|ponder", re.IGNORECASE)
_ABOUT_LENGTH = re.compile(r"token|budget|length", re.IGNORECASE)
_ABOUT_DAY = re.compile(r"\b(date|today|day|time|now)\b", re.IGNORECASE)
_ABOUT_TOOLS = re.compile(r"\b(tool|function)s?\b", re.IGNORECASE)
_FORMS = (
    "%d %b %Y", "%d %B %Y", "%Y-%m-%d", "%B %d, %Y", "%b %d, %Y", "%b %d %Y", "%A, %B %d, %Y", "%d/%m/%Y", "%m/%d/%Y",
    "%d.%m.%Y", "%Y/%m/%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%b %d %Y %H:%M:%S GMT",
)  # fmt: skip
_LONG_FORM = "%b %d %Y %H:%M:%S GMT"
_TOOL_SCENES = {"tools", "calls", "calls, arguments as text"}
_MANY = 64
"""A number from here on counts tokens; smaller ones are levels."""


class Switching:
    """`note(about, fact, seen, confidence)` takes down what a fact was learned from."""

    def __init__(
        self, prober: Prober, note: Callable[..., None], thinking: ThinkingFacts | None, reasoning_field: str | None
    ) -> None:
        self._inputs = prober.inputs
        self._note = note
        self._stage = Stage(prober, thinking, reasoning_field)

    def learn(self) -> tuple[Switch, ...]:
        """One for each variable, in the order of their names. What shows nothing by itself is tried beside those
        that switch thinking."""
        alone = [Variable(self._stage, given, {}) for given in self._inputs]
        switching = [variable for variable in alone if variable.switches_thinking]
        contexts = [context for variable in switching for context in variable.states_shown()]
        found = (variable if variable.shows else self._beside(variable, contexts) for variable in alone)
        return tuple(_Study(self._stage, self._note, variable).switch(not switching) for variable in found)

    def _beside(self, variable: Variable, contexts: list[dict[str, Any]]) -> Variable:
        tried = (Variable(self._stage, variable.given, c) for c in contexts if variable.name not in c)
        return next((beside for beside in tried if beside.shows), variable)


class _Study:
    """What one variable is for, and its facts."""

    def __init__(self, stage: Stage, note: Callable[..., None], variable: Variable) -> None:
        self._stage = stage
        self._note_down = note
        self._variable = variable
        self._given = variable.given

    def _note(self, fact: str, seen: str, confidence: Confidence) -> None:
        self._note_down(f"switches.{self._variable.name}", fact, seen, confidence)

    def switch(self, by_name: bool) -> Switch:
        """`by_name` allows what it is called to count, where nothing else shows what it is for."""
        kind, confidence, seen = self._kind(by_name)
        made = self._made(kind)
        if kind is SwitchKind.THINKING and made.off is None:
            made = self._made(SwitchKind.OTHER)
        told = f"{made.name} ({made.kind}) changes {made.changes}"
        if made.default is not None:
            told += f"; left out it is as {made.default!r}"
        if context := self._variable.context:
            told += f"; seen with {', '.join(f'{name} = {value!r}' for name, value in context.items())}"
        self._note(told, seen or self._variable.excerpt(), confidence)
        return made

    # -- what it is for ----------------------------------------------------------------------------------------------

    def _kind(self, by_name: bool) -> tuple[SwitchKind, Confidence, str]:
        if self._variable.switches_thinking:
            seen = ", ".join(f"{value} {state}" for value, state in self._variable.states.items() if state)
            return self._thinking_kind(), Confidence.SEEN, f"the reply opens in a thought, closed or free: {seen}"
        if len(set(self._variable.keeping.values())) > 1 and self._variable.touches_thoughts_alone():
            return SwitchKind.KEEPING, Confidence.SEEN, _kept(self._variable.keeping)
        if self._is_day():
            return SwitchKind.DATE, Confidence.INFERRED, self._variable.written_after()
        about = self._variable.mentions(_ABOUT_THINKING)
        named = self._variable.name if by_name and _ABOUT_THINKING.search(self._variable.name) else ""
        if self._variable.shows and self._type not in ("list", "object") and (about or named) and self._words():
            return self._thinking_kind(), Confidence.INFERRED, about or named
        if self._is_about_tools():
            return SwitchKind.TOOLS, Confidence.SEEN, ""
        return SwitchKind.OTHER, Confidence.SEEN if self._variable.shows else Confidence.INFERRED, ""

    def _thinking_kind(self) -> SwitchKind:
        if self._type == "integer":
            return SwitchKind.BUDGET if self._counts_tokens() else SwitchKind.EFFORT
        if self._type != "text":
            return SwitchKind.THINKING
        values = self._text_values()
        on = [value for value in values if value not in self._off_values(values)]
        if efforts.only_switches(values) or (len(on) == 1 and efforts.rank(on[0]) is None):
            return SwitchKind.THINKING if values else SwitchKind.EFFORT
        return SwitchKind.EFFORT

    def _words(self) -> bool:
        """Whether a text that is about thinking is a choice among words, not a text of its own."""
        if self._type != "text":
            return True
        values = self._text_values()
        return bool(values) and all(len(str(value).split()) == 1 for value in values)

    def _counts_tokens(self) -> bool:
        numbers = [*self._given.bounds, *self._given.values, *self._given.defaults]
        large = any(isinstance(n, int) and (n >= _MANY or n == -1) for n in numbers)
        return large or bool(self._variable.mentions(_ABOUT_LENGTH))

    def _is_day(self) -> bool:
        if self._type not in ("text", "any"):
            return False
        return any(_form(value) for value in self._given.defaults) or bool(
            _ABOUT_DAY.search(self._variable.written_after())
        )

    def _is_about_tools(self) -> bool:
        changed = set(self._variable.changed)
        told = self._variable.is_as_tools()
        return told or bool(changed and changed <= _TOOL_SCENES) or bool(self._variable.mentions(_ABOUT_TOOLS))

    # -- its facts ---------------------------------------------------------------------------------------------------

    def _made(self, kind: SwitchKind) -> Switch:
        values, on, off = self._values(kind)
        form = ""
        if kind is SwitchKind.DATE:
            written = next((form for value in self._given.defaults if (form := _form(value))), "")
            form = written or self._stage.asked_form() or _LONG_FORM
        return Switch(
            name=self._variable.name,
            kind=kind,
            type=self._type,
            values=values,
            others=self._takes_others(values, kind),
            default=self._default(values),
            on=on,
            off=off,
            form=form,
            changes=self._variable.changes(),
        )

    @cached_property
    def _type(self) -> str:
        given = self._given
        known = [*given.values, *given.defaults]
        if any(isinstance(value, str) for value in known):
            return "text"
        if any(isinstance(value, bool) for value in known):
            return "boolean"
        if Use.NUMBER in given.uses or any(isinstance(value, int) for value in known):
            return "integer"
        for use, type_ in ((Use.OBJECT, "object"), (Use.LIST, "list"), (Use.TEXT, "text"), (Use.MEMBERS, "any")):
            if use in given.uses:
                return type_
        return "boolean" if Use.TRUTH in given.uses else "any"

    def _values(self, kind: SwitchKind) -> tuple[tuple[Any, ...], Any, Any]:
        """The known values, and those that switch on and off."""
        if self._type == "boolean":
            on, off = self._on_and_off(kind, (True, False))
            return (True, False), on, off
        if self._type == "integer":
            return self._numbers(kind)
        values = self._text_values() if self._type == "text" else ()
        if kind is SwitchKind.EFFORT and not any(value != d for value in values for d in self._given.defaults):
            known = {efforts.rank(value) for value in values}
            values = (*(word for word in efforts.CONVENTIONAL if efforts.rank(word) not in known), *values)
            said = f"{self._variable.name} is written as it is given: any word goes, these are usual"
            self._note(said, listed(values), Confidence.CONVENTION)
        if kind in (SwitchKind.THINKING, SwitchKind.EFFORT, SwitchKind.KEEPING):
            values = efforts.ordered(values)
            on, off = self._on_and_off(kind, values)
            return values, on, off
        return (values if self._given.values else ()), None, None

    def _numbers(self, kind: SwitchKind) -> tuple[tuple[Any, ...], Any, Any]:
        exact = [value for value in self._given.values if isinstance(value, int)]
        values = efforts.ordered(exact)
        if kind not in (SwitchKind.EFFORT, SwitchKind.BUDGET):
            return values, None, None
        off = next(iter(self._off_values(tuple(filter(is_number, self._variable.values)))), None)
        default = self._default(values)
        on = default if default != off else values[-1] if kind is SwitchKind.EFFORT and values else None
        return values, on, off

    def _on_and_off(self, kind: SwitchKind, values: tuple[Any, ...]) -> tuple[Any, Any]:
        if kind is SwitchKind.KEEPING:
            kept = self._variable.keeping
            on, off = (next((v for v in values if kept.get(repr(v)) is wanted), None) for wanted in (True, False))
            return on, off
        if kind not in (SwitchKind.THINKING, SwitchKind.EFFORT):
            return None, None
        offs = self._off_values(values)
        ons = [value for value in values if value not in offs and not efforts.is_automatic(value)]
        if not offs or not ons:
            return None, next(iter(offs), None)
        default = self._default(values)
        return default if default in ons else ons[-1 if kind is SwitchKind.EFFORT else 0], offs[0]

    def _off_values(self, values: tuple[Any, ...]) -> list[Any]:
        """Those that shut thinking off: by how the reply opens, else by what the word means."""
        states = {repr(value): self._variable.state(value) for value in values}
        order = {"open": 2, "free": 1, "closed": 0}
        known = [order[state] for state in states.values() if state]
        if len(set(known)) > 1:
            least = min(known)
            return [v for v in values if (state := states[repr(v)]) and order[state] == least]
        return [value for value in values if value is False or (isinstance(value, str) and efforts.is_off(value))]

    def _text_values(self) -> tuple[Any, ...]:
        found = (v for v in (*self._given.values, *self._given.defaults) if isinstance(v, str) and v)
        return tuple(value for value in dict.fromkeys(found) if self._variable.takes(value))

    def _default(self, values: tuple[Any, ...]) -> Any:
        """A stand-in that the template names, or a value; what it makes must be what leaving it out makes."""
        for value in (*self._given.defaults, *values):
            if value is not None and self._variable.is_as_unset(value):
                others = (other for other in self._variable.values if repr(other) != repr(value))
                if value in self._given.defaults or not all(map(self._variable.is_as_unset, others)):
                    return value
        return None

    def _takes_others(self, values: tuple[Any, ...], kind: SwitchKind) -> bool:
        if self._type == "boolean":
            return False
        if self._type == "integer":
            return kind is not SwitchKind.EFFORT or self._variable.takes(NUMBER)
        if not values or not self._variable.takes(WORD):
            return not values
        return self._variable.prints(WORD) or not self._given.values


def _form(value: Any) -> str:
    """How a date is written; empty for what is none."""
    for form in _FORMS if isinstance(value, str) else ():
        try:
            datetime.strptime(value, form)
        except ValueError:
            continue
        return form
    return ""


def _kept(keeping: dict[str, bool]) -> str:
    return ", ".join(f"{value} {'kept' if kept else 'dropped'}" for value, kept in keeping.items())
