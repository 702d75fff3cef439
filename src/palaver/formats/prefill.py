"""A reply that has been begun, as the model itself would have written it: the text half of an exact continue."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from palaver.errors import UnsupportedContent
from palaver.formats.facts import Facts
from palaver.formats.reply_states import find_headers
from palaver.formats.tool_calls import syntaxes
from palaver.messages import Message, Text, Thinking, ToolCall
from palaver.phases import Phase, Vocabulary


@dataclass(frozen=True, slots=True)
class LeadingSpace:
    """The white space with which a reply begins, right behind the generation prompt, by what it begins with."""

    thought: str = ""
    answer: str = ""
    calls: str = ""
    empty_thought: str = ""
    """The closed, empty thought before an answer without one, where the model thinks by default."""
    thought_before_calls: bool = False
    """Whether the template writes it before calls, too."""


def write_partial_reply(facts: Facts, message: Message, opens_in: Phase, leads: LeadingSpace) -> str:
    """The text after the generation prompt. An open thought stays open, a closed one is closed as the model would,
    the last tool call is left open. A reply without a thought begins behind an empty one, where the model always
    thinks first: it would take the begun answer for its thought."""
    out = ""
    thinking = opens_in is Phase.THINKING
    calls: list[ToolCall] = []
    for part in message.parts:
        match part:
            case Thinking(text):
                out += _written_calls(facts, calls, False) + _before_thought(facts, thinking, out, leads) + text
                thinking, calls = True, []
            case Text(text):
                out += _written_calls(facts, calls, False)
                lead = _before_answer(facts, thinking, out, leads)
                out += ("" if _has(text, lead) else lead) + text
                thinking, calls = False, []
            case ToolCall():
                if not calls:
                    out += _before_calls(facts, thinking, part.in_thought, out, leads)
                thinking = part.in_thought
                calls.append(part)
            case _:
                raise UnsupportedContent(f"A reply can't hold {type(part).__name__.lower()}.")
    return out + _written_calls(facts, calls, True)


def _has(text: str, lead: str) -> bool:
    """Whether the text was read with the white space it begins with."""
    return not lead.strip() and text.startswith(lead)


def _before_thought(facts: Facts, thinking: bool, written: str, leads: LeadingSpace) -> str:
    if facts.thinking is None:
        raise UnsupportedContent("This model's format has no thinking, so a thought can't be continued.")
    if thinking:
        return "" if written else leads.thought
    return facts.thinking.opening


def _before_answer(facts: Facts, thinking: bool, written: str, leads: LeadingSpace) -> str:
    if thinking and facts.thinking is not None:
        return facts.thinking.closing
    return "" if written else facts.answer_opening or leads.empty_thought or leads.answer


def _before_calls(facts: Facts, thinking: bool, in_thought: bool, written: str, leads: LeadingSpace) -> str:
    if thinking and not in_thought and facts.thinking is not None:
        if find_headers(facts) is not None:  # the call is a message of its own
            return facts.thinking.closing.partition(facts.header)[0] + facts.header + leads.calls
        return facts.thinking.closing.rstrip() + facts.space_after_thought
    if in_thought and written:  # there is no answer to close
        return facts.space_before_calls.removeprefix(facts.answer_closing)
    if written:
        return facts.space_before_calls
    if leads.thought_before_calls and not in_thought:
        return leads.empty_thought.rstrip() + facts.space_after_thought
    return leads.calls


def _written_calls(facts: Facts, calls: list[ToolCall], is_open: bool) -> str:
    if not calls:
        return ""
    if facts.calls is None:
        raise UnsupportedContent("This model's format has no tool calls, so one can't be continued.")
    return syntaxes.write(facts.calls, tuple(calls), is_open)


class Healer:
    """Cuts the end off a begun reply that some token of the vocabulary would go beyond."""

    def __init__(self, vocabulary: Vocabulary, control: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._control = frozenset(control)
        words = (data for token_id, data in enumerate(vocabulary) if token_id not in self._control)
        self._words = sorted(set(words))
        self._longest = max(map(len, self._words), default=0)

    def heal(self, ids: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
        """The ids that stay, and the bytes of those cut off, which must be written first."""
        tail, cut, healing = b"", len(ids), b""
        for place in range(len(ids) - 1, -1, -1):
            tail = self._vocabulary[ids[place]] + tail
            if ids[place] in self._control or len(tail) >= self._longest:
                break
            if self._extends(tail):
                cut, healing = place, tail
        return tuple(ids[:cut]), healing

    def _extends(self, tail: bytes) -> bool:
        """Whether some token begins with these bytes and goes on."""
        at = bisect_left(self._words, tail + b"\0")
        return at < len(self._words) and self._words[at].startswith(tail)
