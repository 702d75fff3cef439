"""Learns the switches of a template: renders every variable with its values and compares the results.

The values come from the template's syntax tree; the kind of a switch follows from the text that it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import nodes

from palaver.formats.facts import (
    CONVENTIONAL_EFFORTS,
    Confidence,
    Switch,
    SwitchKind,
    SwitchType,
    ThinkingFacts,
    are_only_switches,
    effort_rank,
    is_effort_automatic,
    is_effort_off,
    list_values,
    order_efforts,
)
from palaver.formats.learn.probes import NUMBER, QUESTION, RESULT, THOUGHT, WORD, Prober, thinking_message, user_message
from palaver.formats.learn.template_variables import TemplateVariable, VariableUse
from palaver.formats.markers import common_end, common_start
from palaver.formats.tool_calls.samples import NAME, sample_calls, sample_tools

_ABOUT_THINKING = re.compile(r"think|thought|reason|reflect|effort|deliberat|ponder", re.IGNORECASE)
_ABOUT_LENGTH = re.compile(r"token|budget|length", re.IGNORECASE)
_ABOUT_DATE = re.compile(r"\b(date|today|day|time|now)\b", re.IGNORECASE)
_ABOUT_TOOLS = re.compile(r"\b(tool|function)s?\b", re.IGNORECASE)
_DATE_FORMATS = (
    "%d %b %Y", "%d %B %Y", "%Y-%m-%d", "%B %d, %Y", "%b %d, %Y", "%b %d %Y", "%A, %B %d, %Y", "%d/%m/%Y", "%m/%d/%Y",
    "%d.%m.%Y", "%Y/%m/%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%b %d %Y %H:%M:%S GMT",
)  # fmt: skip
_LONG_DATE_FORMAT = "%b %d %Y %H:%M:%S GMT"
_TOOL_SCENES = {"tools", "calls", "calls, arguments as text"}
_MIN_TOKEN_COUNT = 64
"""Numbers from here on count tokens; smaller ones are levels."""


@dataclass(frozen=True, slots=True)
class ProbeScene:
    """A conversation with further template variables."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any] = field(default_factory=dict)
    prompt: bool = True


@dataclass(frozen=True, slots=True)
class VariableEffect:
    """The rendered text of all scenes with one value; None for a scene that the template refuses."""

    texts: tuple[str | None, ...]

    def is_accepted(self, unset: VariableEffect) -> bool:
        """Whether the template renders every scene that it renders without the variable."""
        return all(text is not None or before is None for text, before in zip(self.texts, unset.texts, strict=True))


class ProbeStage:
    """Renders all scenes with one template, given its markers of thinking and its field for thinking."""

    def __init__(self, prober: Prober, thinking: ThinkingFacts | None, reasoning_field: str | None) -> None:
        self._prober = prober
        self._thinking = thinking
        self._field = reasoning_field

    @cached_property
    def scenes(self) -> dict[str, ProbeScene]:
        """Conversations in which a variable may have an effect, by name. Only those that the template accepts."""
        result = {"role": "tool", "content": RESULT, "tool_call_id": "probeid01", "name": NAME}
        picture = {"type": "image", "image": "picture"}
        typed = {"role": "user", "content": [{"type": "text", "text": QUESTION}, picture, picture]}
        paper = {"title": "Title", "text": "Text", "content": "Content", "doc_id": 1}
        tools = {"tools": sample_tools()}
        scenes = {
            "plain": ProbeScene([user_message()]),
            "system": ProbeScene([{"role": "system", "content": "SYSTEMq7"}, user_message()]),
            "last turn": ProbeScene([user_message(), thinking_message(None)], prompt=False),
            "earlier turns": ProbeScene([user_message(), thinking_message(None), user_message()]),
            "earlier thoughts": ProbeScene([user_message(), thinking_message(self._field), user_message()]),
            "tools": ProbeScene([user_message()], tools),
            "pictures": ProbeScene([typed]),
            "documents": ProbeScene([user_message()], {"documents": [paper]}),
        }
        for as_text in (False, True):
            call = {"role": "assistant", "content": "", "tool_calls": sample_calls(1, as_text)}
            scenes["calls, arguments as text" if as_text else "calls"] = ProbeScene(
                [user_message(), call, result], tools
            )
        plain = self._prober.render([user_message()], True)
        return {
            name: scene for name, scene in scenes.items() if name == "plain" or self._render(scene) not in (None, plain)
        }

    def _render(self, scene: ProbeScene, /, **variables: Any) -> str | None:
        return self._prober.render(scene.messages, scene.prompt, **{**scene.variables, **variables})

    def effect(self, **variables: Any) -> VariableEffect:
        """The rendered text of all scenes. The variables override those of a scene."""
        return VariableEffect(tuple(self._render(scene, **variables) for scene in self.scenes.values()))

    def rendered_tools(self) -> str | None:
        """A prompt with tools in the standard `tools` variable."""
        return self._prober.render([user_message()], True, tools=sample_tools())

    def date_format(self) -> str:
        """The format that the template passes to `strftime_now`; empty if it does not call it."""
        calls = self._prober.template.tree.find_all(nodes.Call)
        arguments = (call.args for call in calls if getattr(call.node, "name", "") == "strftime_now")
        return next((str(args[0].value) for args in arguments if args and isinstance(args[0], nodes.Const)), "")

    def without_thoughts(self, text: str | None) -> str:
        """The text without a thought, its markers and white space."""
        bare = (text or "").replace(THOUGHT, "")
        for marker in (self._thinking.opener, self._thinking.closer) if self._thinking else ():
            bare = bare.replace(marker, "")
        return "".join(bare.split())

    def reply_opening(self, /, **variables: Any) -> str | None:
        """How the reply opens: in an open thought, after a closed one, or free. None if it is unknown."""
        whole = self._prober.render([user_message()], True, **variables)
        if self._thinking is None or whole is None or not self._prober.opening(**variables):
            return None
        tail = whole[whole.rfind(QUESTION) + len(QUESTION) :]
        if tail.rfind(self._thinking.opener) > tail.rfind(self._thinking.closer):
            return "open"
        return "closed" if tail.rstrip().endswith(self._thinking.closer) else "free"

    def keeps_thinking(self, **variables: Any) -> bool | None:
        """Whether the thinking of an earlier turn is in the prompt."""
        if self._field is None:
            return None
        whole = self._prober.render([user_message(), thinking_message(self._field), user_message()], True, **variables)
        return None if whole is None else THOUGHT in whole


class VariableTrial:
    """The effects of one variable's values. `context` are other variables that are set meanwhile."""

    def __init__(self, stage: ProbeStage, variable: TemplateVariable, context: dict[str, Any]) -> None:
        self._stage = stage
        self.variable = variable
        self.name = variable.name
        self.context = context
        self.unset = stage.effect(**context)
        tried = {repr(value): value for value in _candidates(variable)}
        effects = {key: (value, stage.effect(**self._with(value))) for key, value in tried.items()}
        self._effects = {
            key: (value, effect)
            for key, (value, effect) in effects.items()
            if effect.is_accepted(self.unset) or (isinstance(value, list) and any(effect.texts))
        }

    def _with(self, value: Any) -> dict[str, Any]:
        return {**self.context, self.name: value}

    @property
    def values(self) -> list[Any]:
        """The values that the template accepts."""
        return [value for value, _ in self._effects.values()]

    def accepts(self, value: Any) -> bool:
        return repr(value) in self._effects

    def equals_unset(self, value: Any) -> bool:
        return self._effect(value) == self.unset

    def holds_tools(self) -> bool:
        """Whether tools in this variable are rendered like the standard `tools`."""
        texts = self._effect(sample_tools()).texts[:1]
        return texts not in ((), (None,)) and texts[0] == self._stage.rendered_tools()

    def _effect(self, value: Any) -> VariableEffect:
        return self._effects[repr(value)][1] if self.accepts(value) else VariableEffect(())

    @property
    def has_effect(self) -> bool:
        return bool(self.changed)

    @cached_property
    def switches_thinking(self) -> bool:
        """Whether the values open the reply differently as to thinking."""
        return len({state for state in self.openings.values() if state}) > 1

    def contexts(self) -> Iterator[dict[str, Any]]:
        """One value for each way to open the reply."""
        found = {self.openings[key]: value for key, (value, _) in reversed(self._effects.items()) if self.openings[key]}
        return ({self.name: value} for value in found.values())

    def opening(self, value: Any) -> str | None:
        """How the reply opens with this value."""
        return self._stage.reply_opening(**self._with(value))

    def changes_only_thoughts(self) -> bool:
        """Whether only thoughts and their markers change."""
        texts = zip(*(effect.texts for effect in (self.unset, *(e for _, e in self._effects.values()))), strict=True)
        return all(len({self._stage.without_thoughts(text) for text in scene}) == 1 for scene in texts)

    @cached_property
    def openings(self) -> dict[str, str | None]:
        """How the reply opens with each value."""
        out = {"left out": self._stage.reply_opening(**self.context)}
        return out | {key: self._stage.reply_opening(**self._with(value)) for key, (value, _) in self._effects.items()}

    @cached_property
    def keeping(self) -> dict[str, bool]:
        """Whether the thinking of earlier turns is kept with each value."""
        kept = {key: self._stage.keeps_thinking(**self._with(value)) for key, (value, _) in self._effects.items()}
        return {key: value for key, value in kept.items() if value is not None}

    def prints(self, value: Any) -> bool:
        return any(text is not None and str(value) in text for text in self._effect(value).texts)

    def text_before_value(self) -> str:
        """The text before the value in the same sentence, if the template writes the value."""
        for text in self._effect(WORD).texts:
            if text and WORD in text:
                return re.split(r"[.;!?>\]]\s*|\n", text[: text.index(WORD)])[-1][-60:]
        return ""

    def mentions(self, pattern: re.Pattern[str]) -> str:
        """The first changed text that matches the pattern."""
        scenes = [index for index, name in enumerate(self._stage.scenes) if name in ("plain", "system")]
        for value in (WORD, NUMBER):
            for text in self._effect(value).texts[: len(scenes)]:
                for found in re.finditer(re.escape(str(value)), text or ""):
                    around = (text or "")[max(0, found.start() - 60) : found.end() + 30]
                    if pattern.search(around):
                        return around
        for value, effect in self._effects.values():
            for index in scenes if value != sample_tools() else ():
                changed = _difference(self.unset.texts[index], effect.texts[index])
                if pattern.search(changed):
                    return changed
        return ""

    @cached_property
    def changed(self) -> list[str]:
        """The scenes that the variable changes."""
        effects = [self.unset, *(effect for _, effect in self._effects.values())]
        return [
            name
            for place, name in enumerate(self._stage.scenes)
            if len({effect.texts[place] for effect in effects}) > 1
        ]

    def description(self) -> str:
        """A description of what the variable changes."""
        changed = self.changed
        out = list(self._describe_plain())
        for name, phrase in (("tools", "how tools are listed"), ("pictures", "pictures"), ("documents", "documents")):
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
        return ", ".join(out) or "nothing in the probes"

    def _describe_plain(self) -> Iterator[str]:
        """Descriptions of changes before and after the question."""
        effects = [self.unset, *(effect for _, effect in self._effects.values())]
        for part, phrase in ((0, "the text before the conversation"), (2, "how the reply opens")):
            for place, name in enumerate(self._stage.scenes):
                texts = {text.partition(QUESTION)[part] for e in effects if (text := e.texts[place]) is not None}
                if name in ("plain", "system") and len(texts) > 1:
                    yield phrase
                    break

    def excerpt(self) -> str:
        """An excerpt of the text that one of the values changes."""
        for _, effect in self._effects.values():
            for unset, text in zip(self.unset.texts, effect.texts, strict=True):
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
