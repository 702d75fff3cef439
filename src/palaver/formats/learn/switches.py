"""Learns what each variable of a template does: its values are tried, and what comes out is compared.

What is tried comes from the template's own syntax; what a variable is for shows in what it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import nodes

from palaver.formats.facts import Confidence, ThinkingFacts
from palaver.formats.learn.probes import (
    NUMBER,
    QUESTION,
    RESULT,
    THOUGHT,
    WORD,
    Prober,
    probe_messages,
    thinking_message,
)
from palaver.formats.learn.template_variables import TemplateVariable, VariableUse
from palaver.formats.markers import common_end, common_start
from palaver.formats.switches import (
    CONVENTIONAL,
    Switch,
    SwitchKind,
    are_only_switches,
    effort_rank,
    is_effort_automatic,
    is_effort_off,
    list_values,
    order_efforts,
)
from palaver.formats.tool_calls.samples import NAME, sample_calls, sample_tools


@dataclass(frozen=True, slots=True)
class ProbeScene:
    """A conversation and what else the template is given with it."""

    messages: list[dict[str, Any]]
    given: dict[str, Any] = field(default_factory=dict)
    prompt: bool = True


@dataclass(frozen=True, slots=True)
class VariableEffect:
    """What the template makes of all scenes with one value; None for a scene that it refuses."""

    texts: tuple[str | None, ...]

    def taken(self, unset: VariableEffect) -> bool:
        """Whether the template takes the value wherever it takes none."""
        return all(text is not None or before is None for text, before in zip(self.texts, unset.texts, strict=True))


class ProbeStage:
    """Plays all scenes of one template, of which is known how thoughts are marked and under which name they go."""

    def __init__(self, prober: Prober, thinking: ThinkingFacts | None, reasoning_field: str | None) -> None:
        self._prober = prober
        self._thinking = thinking
        self._field = reasoning_field

    @cached_property
    def scenes(self) -> dict[str, ProbeScene]:
        """Conversations in which a variable may show, by what shows there. Only what the template takes."""
        result = {"role": "tool", "content": RESULT, "tool_call_id": "probeid01", "name": NAME}
        picture = {"type": "image", "image": "picture"}
        typed = {"role": "user", "content": [{"type": "text", "text": QUESTION}, picture, picture]}
        paper = {"title": "Title", "text": "Text", "content": "Content", "doc_id": 1}
        offered = {"tools": sample_tools()}
        found = {
            "plain": ProbeScene([probe_messages()]),
            "system": ProbeScene([{"role": "system", "content": "SYSTEMq7"}, probe_messages()]),
            "last turn": ProbeScene([probe_messages(), thinking_message(None)], prompt=False),
            "earlier turns": ProbeScene([probe_messages(), thinking_message(None), probe_messages()]),
            "earlier thoughts": ProbeScene([probe_messages(), thinking_message(self._field), probe_messages()]),
            "tools": ProbeScene([probe_messages()], offered),
            "pictures": ProbeScene([typed]),
            "documents": ProbeScene([probe_messages()], {"documents": [paper]}),
        }
        for as_text in (False, True):
            called = {"role": "assistant", "content": "", "tool_calls": sample_calls(1, as_text)}
            found["calls, arguments as text" if as_text else "calls"] = ProbeScene(
                [probe_messages(), called, result], offered
            )
        plain = self._prober.write([probe_messages()], True)
        return {
            name: scene for name, scene in found.items() if name == "plain" or self._written(scene) not in (None, plain)
        }

    def _written(self, scene: ProbeScene, **variables: Any) -> str | None:
        return self._prober.write(scene.messages, scene.prompt, **{**scene.given, **variables})

    def effect(self, **variables: Any) -> VariableEffect:
        """What comes of all scenes. Where a scene brings the variable itself, it is not left out there."""
        return VariableEffect(tuple(self._written(scene, **variables) for scene in self.scenes.values()))

    def told_as_tools(self) -> str | None:
        """What the template makes of tools that are given as everybody gives them."""
        return self._prober.write([probe_messages()], True, tools=sample_tools())

    def asked_form(self) -> str:
        """How the template writes the day where it asks for it by a function."""
        calls = self._prober.template.tree.find_all(nodes.Call)
        asked = (call.args for call in calls if getattr(call.node, "name", "") == "strftime_now")
        return next((str(args[0].value) for args in asked if args and isinstance(args[0], nodes.Const)), "")

    def without_thoughts(self, text: str | None) -> str:
        """The text but for a thought, its markers and white space."""
        bare = (text or "").replace(THOUGHT, "")
        for marker in (self._thinking.opener, self._thinking.closer) if self._thinking else ():
            bare = bare.replace(marker, "")
        return "".join(bare.split())

    def thought(self, **variables: Any) -> str | None:
        """How the reply opens: in an open thought, behind a closed one, or free. None where that can't be said."""
        whole = self._prober.write([probe_messages()], True, **variables)
        if self._thinking is None or whole is None or not self._prober.opening(**variables):
            return None
        tail = whole[whole.rfind(QUESTION) + len(QUESTION) :]
        if tail.rfind(self._thinking.opener) > tail.rfind(self._thinking.closer):
            return "open"
        return "closed" if tail.rstrip().endswith(self._thinking.closer) else "free"

    def keeps(self, **variables: Any) -> bool | None:
        """Whether a thought of an earlier turn is shown."""
        if self._field is None:
            return None
        whole = self._prober.write(
            [probe_messages(), thinking_message(self._field), probe_messages()], True, **variables
        )
        return None if whole is None else THOUGHT in whole


class VariableTrial:
    """`context` are other variables, beside which it is tried."""

    def __init__(self, stage: ProbeStage, given: TemplateVariable, context: dict[str, Any]) -> None:
        self._stage = stage
        self.given = given
        self.name = given.name
        self.context = context
        self.unset = stage.effect(**context)
        tried = {repr(value): value for value in _tries(given)}
        effects = {key: (value, stage.effect(**self._with(value))) for key, value in tried.items()}
        self._effects = {
            key: (value, effect)
            for key, (value, effect) in effects.items()
            if effect.taken(self.unset) or (isinstance(value, list) and any(effect.texts))
        }

    def _with(self, value: Any) -> dict[str, Any]:
        return {**self.context, self.name: value}

    @property
    def values(self) -> list[Any]:
        """Those that the template takes, of all that were tried."""
        return [value for value, _ in self._effects.values()]

    def takes(self, value: Any) -> bool:
        return repr(value) in self._effects

    def is_as_unset(self, value: Any) -> bool:
        return self._effect(value) == self.unset

    def is_as_tools(self) -> bool:
        """Whether tools under this name are told as tools are."""
        told = self._effect(sample_tools()).texts[:1]
        return told not in ((), (None,)) and told[0] == self._stage.told_as_tools()

    def _effect(self, value: Any) -> VariableEffect:
        return self._effects[repr(value)][1] if self.takes(value) else VariableEffect(())

    @property
    def shows(self) -> bool:
        return bool(self.changed)

    @cached_property
    def switches_thinking(self) -> bool:
        """Whether the reply opens otherwise, as far as thoughts go."""
        return len({state for state in self.states.values() if state}) > 1

    def states_shown(self) -> Iterator[dict[str, Any]]:
        """One value for each way in which the reply may open."""
        found = {self.states[key]: value for key, (value, _) in reversed(self._effects.items()) if self.states[key]}
        return ({self.name: value} for value in found.values())

    def state(self, value: Any) -> str | None:
        """How the reply opens with a value."""
        return self._stage.thought(**self._with(value))

    def touches_thoughts_alone(self) -> bool:
        """Whether nothing changes but thoughts and their markers."""
        texts = zip(*(effect.texts for effect in (self.unset, *(e for _, e in self._effects.values()))), strict=True)
        return all(len({self._stage.without_thoughts(text) for text in scene}) == 1 for scene in texts)

    @cached_property
    def states(self) -> dict[str, str | None]:
        """How the reply opens, by every value."""
        out = {"left out": self._stage.thought(**self.context)}
        return out | {key: self._stage.thought(**self._with(value)) for key, (value, _) in self._effects.items()}

    @cached_property
    def keeping(self) -> dict[str, bool]:
        """Whether thoughts of earlier turns are kept, by every value."""
        kept = {key: self._stage.keeps(**self._with(value)) for key, (value, _) in self._effects.items()}
        return {key: shown for key, shown in kept.items() if shown is not None}

    def prints(self, value: Any) -> bool:
        return any(text is not None and str(value) in text for text in self._effect(value).texts)

    def written_after(self) -> str:
        """What stands before the value where it is written, in the same sentence."""
        for text in self._effect(WORD).texts:
            if text and WORD in text:
                return re.split(r"[.;!?>\]]\s*|\n", text[: text.index(WORD)])[-1][-60:]
        return ""

    def mentions(self, pattern: re.Pattern[str]) -> str:
        """The first piece of changed text that speaks of it."""
        places = [place for place, name in enumerate(self._stage.scenes) if name in ("plain", "system")]
        for value in (WORD, NUMBER):
            for text in self._effect(value).texts[: len(places)]:
                for found in re.finditer(re.escape(str(value)), text or ""):
                    around = (text or "")[max(0, found.start() - 60) : found.end() + 30]
                    if pattern.search(around):
                        return around
        for value, effect in self._effects.values():
            for place in places if value != sample_tools() else ():
                changed = _changed(self.unset.texts[place], effect.texts[place])
                if pattern.search(changed):
                    return changed
        return ""

    @cached_property
    def changed(self) -> list[str]:
        """The scenes in which something shows."""
        effects = [self.unset, *(effect for _, effect in self._effects.values())]
        return [
            name
            for place, name in enumerate(self._stage.scenes)
            if len({effect.texts[place] for effect in effects}) > 1
        ]

    def changes(self) -> str:
        """In words, what it changes."""
        changed = self.changed
        out = list(self._in_plain())
        for name, phrase in (("tools", "how tools are told"), ("pictures", "pictures"), ("documents", "documents")):
            if name in changed and "plain" not in changed:
                out.append(phrase)
        if "earlier turns" in changed and "plain" not in changed:
            out.append("how earlier turns are written")
        elif "earlier thoughts" in changed and "plain" not in changed:
            out.append("whether thinking of earlier turns is kept")
        if any(name.startswith("calls") for name in changed) and not out:
            out.append("turns with tools")
        if "last turn" in changed and not out:
            out.append("how the last turn is written")
        return ", ".join(out) or "nothing that a probe shows"

    def _in_plain(self) -> Iterator[str]:
        """What differs before the question and behind it."""
        effects = [self.unset, *(effect for _, effect in self._effects.values())]
        for part, phrase in ((0, "what stands before the conversation"), (2, "how the reply opens")):
            for place, name in enumerate(self._stage.scenes):
                shown = {text.partition(QUESTION)[part] for e in effects if (text := e.texts[place]) is not None}
                if name in ("plain", "system") and len(shown) > 1:
                    yield phrase
                    break

    def excerpt(self) -> str:
        """An excerpt of what one of its values makes."""
        for _, effect in self._effects.values():
            for unset, text in zip(self.unset.texts, effect.texts, strict=True):
                if text is not None and text != unset:
                    return _changed(unset, text)[-200:]
        return self.name


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tries(given: TemplateVariable) -> Iterator[Any]:
    """Values worth trying: those the template names, those beside its bounds, and some that nobody names."""
    yield from (value for value in (*given.values, *given.defaults) if value is not None)
    if VariableUse.NUMBER in given.uses or any(map(is_number, given.defaults)):
        yield from (near for bound in given.bounds for near in (bound - 1, bound, bound + 1))
        yield from (0, NUMBER)
    if not given.uses & {VariableUse.LIST, VariableUse.OBJECT}:
        yield WORD
    yield from (True, False)
    if given.uses & {VariableUse.LIST, VariableUse.MEMBERS}:
        yield [WORD]
        yield sample_tools()


def _changed(before: str | None, after: str | None) -> str:
    """What two texts differ in, from the beginning of the line on."""
    one, two = before or "", after or ""
    if one == two:
        return ""
    start = len(common_start(one, two))
    end = len(common_end(one[start:], two[start:]))
    line = max(one.rfind("\n", 0, start) + 1, start - 60, 0)
    return " / ".join(text[line : len(text) - end] for text in (one, two))


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


class SwitchLearner:
    """`note(about, fact, seen, confidence)` takes down what a fact was learned from."""

    def __init__(
        self, prober: Prober, note: Callable[..., None], thinking: ThinkingFacts | None, reasoning_field: str | None
    ) -> None:
        self._inputs = prober.inputs
        self._note = note
        self._stage = ProbeStage(prober, thinking, reasoning_field)

    def learn(self) -> tuple[Switch, ...]:
        """One for each variable, in the order of their names. What shows nothing by itself is tried beside those
        that switch thinking."""
        alone = [VariableTrial(self._stage, given, {}) for given in self._inputs]
        switching = [variable for variable in alone if variable.switches_thinking]
        contexts = [context for variable in switching for context in variable.states_shown()]
        found = (variable if variable.shows else self._beside(variable, contexts) for variable in alone)
        return tuple(_VariableStudy(self._stage, self._note, variable).switch(not switching) for variable in found)

    def _beside(self, variable: VariableTrial, contexts: list[dict[str, Any]]) -> VariableTrial:
        tried = (VariableTrial(self._stage, variable.given, c) for c in contexts if variable.name not in c)
        return next((beside for beside in tried if beside.shows), variable)


class _VariableStudy:
    """What one variable is for, and its facts."""

    def __init__(self, stage: ProbeStage, note: Callable[..., None], variable: VariableTrial) -> None:
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
        if are_only_switches(values) or (len(on) == 1 and effort_rank(on[0]) is None):
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
        if VariableUse.NUMBER in given.uses or any(isinstance(value, int) for value in known):
            return "integer"
        for use, type_ in (
            (VariableUse.OBJECT, "object"),
            (VariableUse.LIST, "list"),
            (VariableUse.TEXT, "text"),
            (VariableUse.MEMBERS, "any"),
        ):
            if use in given.uses:
                return type_
        return "boolean" if VariableUse.TRUTH in given.uses else "any"

    def _values(self, kind: SwitchKind) -> tuple[tuple[Any, ...], Any, Any]:
        """The known values, and those that switch on and off."""
        if self._type == "boolean":
            on, off = self._on_and_off(kind, (True, False))
            return (True, False), on, off
        if self._type == "integer":
            return self._numbers(kind)
        values = self._text_values() if self._type == "text" else ()
        if kind is SwitchKind.EFFORT and not any(value != d for value in values for d in self._given.defaults):
            known = {effort_rank(value) for value in values}
            values = (*(word for word in CONVENTIONAL if effort_rank(word) not in known), *values)
            said = f"{self._variable.name} is written as it is given: any word goes, these are usual"
            self._note(said, list_values(values), Confidence.CONVENTION)
        if kind in (SwitchKind.THINKING, SwitchKind.EFFORT, SwitchKind.KEEPING):
            values = order_efforts(values)
            on, off = self._on_and_off(kind, values)
            return values, on, off
        return (values if self._given.values else ()), None, None

    def _numbers(self, kind: SwitchKind) -> tuple[tuple[Any, ...], Any, Any]:
        exact = [value for value in self._given.values if isinstance(value, int)]
        values = order_efforts(exact)
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
        ons = [value for value in values if value not in offs and not is_effort_automatic(value)]
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
        return [value for value in values if value is False or (isinstance(value, str) and is_effort_off(value))]

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
