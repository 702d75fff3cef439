"""What is known of how a model talks, each fact with the evidence it was learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from palaver.formats.markers import CONTROL_LIKE, split_marker
from palaver.formats.switches import Switch, SwitchKind, switch_of_kind, thinking_switch
from palaver.formats.tool_calls.syntaxes import CallSyntax


@dataclass(frozen=True, slots=True)
class ThinkingFacts:
    """`opening` and `closing` are what the model writes around a thought, white space included."""

    opening: str
    closing: str
    by_convention: bool = False
    """Nothing in the template shows it; most models that think write it so."""

    @property
    def opener(self) -> str:
        return self.opening.strip()

    @property
    def closer(self) -> str:
        """The marker alone: what comes behind it in the closing opens the answer."""
        found = split_marker(self.closing)
        first = next((place for place, part in enumerate(found) if CONTROL_LIKE.fullmatch(part)), None)
        return self.closing.strip() if first is None else " ".join(found[: first + 1])


class Confidence(StrEnum):
    SEEN = "seen"
    """The template itself wrote it in answer to a probe."""
    INFERRED = "inferred"
    """It follows from what the template wrote, dropped or described."""
    CONVENTION = "convention"
    """Nothing in the template shows it; most models do it so."""
    GIVEN = "given"
    """An operator's correction says so."""


@dataclass(frozen=True, slots=True)
class Evidence:
    fact: str
    seen: str
    confidence: Confidence = Confidence.SEEN
    about: str = ""
    """The key of the fact it is evidence for."""


@dataclass(frozen=True, slots=True)
class Facts:
    header: str = ""
    """What opens the assistant's turn, without anything of the reply."""
    reasoning_field: str | None = None
    """The name under which the template takes a message's thinking; `content` for typed parts."""
    thinking: ThinkingFacts | None = None
    switches: tuple[Switch, ...] = ()
    """Every variable that the template reads and that not everybody gives."""
    keeps_thinking: bool = False
    """Whether the thinking of earlier turns stays in the prompt."""
    answer_opening: str = ""
    """What the model writes before an answer beside a closed thought."""
    answer_closing: str = ""
    turn_ends: tuple[str, ...] = ()
    """The strings that end the assistant's turn."""
    stop_strings: tuple[str, ...] = ()
    """Texts that the template itself declares to end an answer."""
    calls: CallSyntax | None = None
    space_before_calls: str = ""
    """Between an answer and the calls behind it."""
    space_after_thought: str = ""
    """Between a closed thought and the calls behind it."""
    no_tools: str = "null"
    """How the template wants to be told that there are no tools: null, empty or absent."""
    asks_for: tuple[str, ...] = ()
    """Variables it asks for beside those that every template gets."""
    arguments_as_text: bool = False
    """Whether the template wants a call's arguments as JSON text instead of an object."""
    evidence: tuple[Evidence, ...] = field(default=())

    @property
    def empty_answer(self) -> str:
        """What stands around an answer, without one."""
        return self.answer_opening.strip() + self.answer_closing.strip() if self.answer_closing.strip() else ""

    @property
    def switch(self) -> Switch | None:
        """What turns thinking on and off."""
        return thinking_switch(self.switches)

    @property
    def keeping(self) -> Switch | None:
        """What decides whether the thinking of earlier turns is kept."""
        return switch_of_kind(self.switches, SwitchKind.KEEPING)
