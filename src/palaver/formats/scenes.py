"""Scenes: conversations in which a variable of a template may show, and what the template makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import nodes

from palaver.formats.calls.samples import NAME, calls, tools
from palaver.formats.facts import ThinkingFacts
from palaver.formats.probes import QUESTION, RESULT, THOUGHT, Prober, ask, thoughtful


@dataclass(frozen=True, slots=True)
class Scene:
    """A conversation and what else the template is given with it."""

    messages: list[dict[str, Any]]
    given: dict[str, Any] = field(default_factory=dict)
    prompt: bool = True


@dataclass(frozen=True, slots=True)
class Effect:
    """What the template makes of all scenes with one value; None for a scene that it refuses."""

    texts: tuple[str | None, ...]

    def taken(self, unset: Effect) -> bool:
        """Whether the template takes the value wherever it takes none."""
        return all(text is not None or before is None for text, before in zip(self.texts, unset.texts, strict=True))


class Stage:
    """Plays all scenes of one template, of which is known how thoughts are marked and under which name they go."""

    def __init__(self, prober: Prober, thinking: ThinkingFacts | None, reasoning_field: str | None) -> None:
        self._prober = prober
        self._thinking = thinking
        self._field = reasoning_field

    @cached_property
    def scenes(self) -> dict[str, Scene]:
        """Conversations in which a variable may show, by what shows there. Only what the template takes."""
        result = {"role": "tool", "content": RESULT, "tool_call_id": "probeid01", "name": NAME}
        picture = {"type": "image", "image": "picture"}
        typed = {"role": "user", "content": [{"type": "text", "text": QUESTION}, picture, picture]}
        paper = {"title": "Title", "text": "Text", "content": "Content", "doc_id": 1}
        offered = {"tools": tools()}
        found = {
            "plain": Scene([ask()]),
            "system": Scene([{"role": "system", "content": "SYSTEMq7"}, ask()]),
            "last turn": Scene([ask(), thoughtful(None)], prompt=False),
            "earlier turns": Scene([ask(), thoughtful(None), ask()]),
            "earlier thoughts": Scene([ask(), thoughtful(self._field), ask()]),
            "tools": Scene([ask()], offered),
            "pictures": Scene([typed]),
            "documents": Scene([ask()], {"documents": [paper]}),
        }
        for as_text in (False, True):
            called = {"role": "assistant", "content": "", "tool_calls": calls(1, as_text)}
            found["calls, arguments as text" if as_text else "calls"] = Scene([ask(), called, result], offered)
        plain = self._prober.write([ask()], True)
        return {
            name: scene for name, scene in found.items() if name == "plain" or self._written(scene) not in (None, plain)
        }

    def _written(self, scene: Scene, **variables: Any) -> str | None:
        return self._prober.write(scene.messages, scene.prompt, **{**scene.given, **variables})

    def effect(self, **variables: Any) -> Effect:
        """What comes of all scenes. Where a scene brings the variable itself, it is not left out there."""
        return Effect(tuple(self._written(scene, **variables) for scene in self.scenes.values()))

    def told_as_tools(self) -> str | None:
        """What the template makes of tools that are given as everybody gives them."""
        return self._prober.write([ask()], True, tools=tools())

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
        whole = self._prober.write([ask()], True, **variables)
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
        whole = self._prober.write([ask(), thoughtful(self._field), ask()], True, **variables)
        return None if whole is None else THOUGHT in whole
