"""One variable of a template, tried with every value worth trying: what shows of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from palaver.formats.calls.samples import tools
from palaver.formats.inputs import Input, Use
from palaver.formats.markers import common_end, common_start
from palaver.formats.probes import NUMBER, QUESTION, WORD
from palaver.formats.scenes import Effect, Stage


class Variable:
    """`context` are other variables, beside which it is tried."""

    def __init__(self, stage: Stage, given: Input, context: dict[str, Any]) -> None:
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
        told = self._effect(tools()).texts[:1]
        return told not in ((), (None,)) and told[0] == self._stage.told_as_tools()

    def _effect(self, value: Any) -> Effect:
        return self._effects[repr(value)][1] if self.takes(value) else Effect(())

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
            for place in places if value != tools() else ():
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


def _tries(given: Input) -> Iterator[Any]:
    """Values worth trying: those the template names, those beside its bounds, and some that nobody names."""
    yield from (value for value in (*given.values, *given.defaults) if value is not None)
    if Use.NUMBER in given.uses or any(map(is_number, given.defaults)):
        yield from (near for bound in given.bounds for near in (bound - 1, bound, bound + 1))
        yield from (0, NUMBER)
    if not given.uses & {Use.LIST, Use.OBJECT}:
        yield WORD
    yield from (True, False)
    if given.uses & {Use.LIST, Use.MEMBERS}:
        yield [WORD]
        yield tools()


def _changed(before: str | None, after: str | None) -> str:
    """What two texts differ in, from the beginning of the line on."""
    one, two = before or "", after or ""
    if one == two:
        return ""
    start = len(common_start(one, two))
    end = len(common_end(one[start:], two[start:]))
    line = max(one.rfind("\n", 0, start) + 1, start - 60, 0)
    return " / ".join(text[line : len(text) - end] for text in (one, two))
