"""The facts of a format, each with the evidence it was learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from palaver.formats.markers import CONTROL_LIKE, split_marker
from palaver.formats.switches import Switch, SwitchKind, switch_of_kind, thinking_switch
from palaver.formats.tool_calls.syntaxes import CallSyntax


@dataclass(frozen=True, slots=True)
class ThinkingFacts:
    """`opening` and `closing` are the text around a thought, white space included."""

    opening: str
    closing: str
    by_convention: bool = False
    """Nothing in the template shows it; most models use these markers."""

    @property
    def opener(self) -> str:
        return self.opening.strip()

    @property
    def closer(self) -> str:
        """The marker that closes the thought; the rest of `closing` opens the answer."""
        found = split_marker(self.closing)
        first = next((place for place, part in enumerate(found) if CONTROL_LIKE.fullmatch(part)), None)
        return self.closing.strip() if first is None else " ".join(found[: first + 1])


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


@dataclass(frozen=True, slots=True)
class Facts:
    header: str = ""
    """The text that opens the assistant's turn, without any part of the reply."""
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
    calls: CallSyntax | None = None
    space_before_calls: str = ""
    """The text between an answer and the calls after it."""
    space_after_thought: str = ""
    """The text between a closed thought and the calls after it."""
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
    def switch(self) -> Switch | None:
        """The switch that turns thinking on and off."""
        return thinking_switch(self.switches)

    @property
    def keeping(self) -> Switch | None:
        """The switch that keeps the thinking of earlier turns."""
        return switch_of_kind(self.switches, SwitchKind.KEEPING)
