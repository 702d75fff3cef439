"""Writes a partial reply as the model would have written it, so that the model can continue it (prefill)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from palaver.errors import UnsupportedContent
from palaver.formats.facts import Facts
from palaver.formats.markers import split_marker
from palaver.formats.reply_states import find_headers
from palaver.formats.tool_calls import syntaxes
from palaver.formats.tool_calls.samples import NAME
from palaver.messages import Message, Text, Thinking, ToolCall
from palaver.phases import Phase, Vocabulary


@dataclass(frozen=True, slots=True)
class LeadingSpace:
    """The text between the generation prompt and a reply, depending on what the reply starts with."""

    thought: str = ""
    answer: str = ""
    calls: str = ""
    empty_thought: str = ""
    """The closed, empty thought before an answer without thinking, if the model thinks by default."""
    thought_before_calls: bool = False
    """Whether the template also writes it before calls."""
    calls_after_opening: str = ""
    """The text between a thought that the generation prompt has opened and calls, if the template closes it there."""
    answer_opened: bool = False
    """Whether the generation prompt has written the text that opens an answer."""


def write_partial_reply(facts: Facts, message: Message, opens_in: Phase, leading: LeadingSpace) -> str:
    """The text of the partial reply after the generation prompt.

    An open thought stays open, a closed one is closed as the model does it, the last tool call is left open. If the
    model always thinks first, a reply without a thought starts after an empty one: the model would take the answer for
    its thought."""
    out = ""
    thinking = opens_in is Phase.THINKING
    calls: list[ToolCall] = []
    for part, following in zip_longest(message.parts, message.parts[1:]):
        match part:
            case Thinking(text):
                if thinking and not out and facts.thinking is not None and facts.thinking.first_line:
                    text = text.removeprefix(facts.thinking.opening)
                out += _write_calls(facts, calls, False)
                lead = _before_thought(facts, thinking, out, leading)
                out += ("" if _includes_space(text, lead) or (thinking and not text) else lead) + text
                thinking, calls = True, []
            case Text(text):
                out += _write_calls(facts, calls, False)
                lead = _before_answer(facts, thinking, out, leading)
                if isinstance(following, ToolCall) and facts.called_text_opening:
                    lead = _before_called_text(facts, thinking)
                out += ("" if _includes_space(text, lead) else lead) + text
                thinking, calls = False, []
            case ToolCall():
                if not calls:
                    out += _before_calls(facts, thinking, part.in_thought, out, leading)
                thinking = part.in_thought
                calls.append(part)
            case _:
                raise UnsupportedContent(f"A reply can't hold {type(part).__name__.lower()}.")
    return out + _write_calls(facts, calls, True)


def _includes_space(text: str, lead: str) -> bool:
    """Whether the text already starts with the leading white space."""
    return not lead.strip() and text.startswith(lead)


def _before_thought(facts: Facts, thinking: bool, written: str, leading: LeadingSpace) -> str:
    if facts.thinking is None:
        raise UnsupportedContent("This model's format has no thinking, so a thought can't be continued.")
    if thinking:
        return "" if written else leading.thought
    return "" if facts.thinking.first_line else facts.thinking.opening


def _before_answer(facts: Facts, thinking: bool, written: str, leading: LeadingSpace) -> str:
    if thinking and facts.thinking is not None:
        empty = leading.empty_thought if not written and facts.thinking.opener not in leading.empty_thought else ""
        return empty or facts.thinking.closing
    if written or leading.answer_opened:
        return ""
    return facts.answer_opening or leading.empty_thought or leading.answer


def _before_called_text(facts: Facts, thinking: bool) -> str:
    """The text before an answer that calls follow, if it is another than before an answer alone."""
    closed = facts.thinking.closing.removesuffix(facts.answer_opening) if thinking and facts.thinking else ""
    return closed + facts.called_text_opening


def _before_calls(facts: Facts, thinking: bool, in_thought: bool, written: str, leading: LeadingSpace) -> str:
    if thinking and not in_thought and facts.thinking is not None:
        if not written and leading.calls_after_opening:
            return leading.calls_after_opening
        if find_headers(facts) is not None:  # the call is a separate message
            return facts.thinking.closing.partition(facts.header)[0] + facts.header + leading.calls
        return facts.thinking.closing_before_calls + facts.space_after_thought
    if written and facts.call_header and facts.thinking is not None:  # the call is a separate message
        return split_marker(facts.thinking.closing)[0] + facts.header
    if in_thought and written:  # there is no answer to close
        return facts.space_before_calls.removeprefix(facts.answer_closing)
    if written:
        return facts.space_before_calls
    if leading.thought_before_calls and not in_thought:
        return leading.empty_thought.rstrip() + facts.space_after_thought
    return leading.calls


def _write_calls(facts: Facts, calls: list[ToolCall], is_open: bool) -> str:
    if not calls:
        return ""
    if facts.calls is None:
        raise UnsupportedContent("This model's format has no tool calls, so one can't be continued.")
    if not facts.call_header or facts.thinking is None:
        return syntaxes.write(facts.calls, tuple(calls), is_open)
    between = split_marker(facts.thinking.closing)[0] + facts.header
    messages = (
        facts.call_header.replace(NAME, call.name) + syntaxes.write(facts.calls, (call,), is_open and call is calls[-1])
        for call in calls
    )
    return between.join(messages)


class Healer:
    """Token healing: cuts off the end of a partial reply if some token of the vocabulary extends it."""

    def __init__(self, vocabulary: Vocabulary, control: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._control = frozenset(control)
        texts = (data for token_id, data in enumerate(vocabulary) if token_id not in self._control)
        self._token_texts = sorted(set(texts))
        self._longest = max(map(len, self._token_texts), default=0)

    def heal(self, ids: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
        """The ids that stay, and the bytes that were cut off; the next tokens must write them first."""
        tail, cut, healing = b"", len(ids), b""
        for place in range(len(ids) - 1, -1, -1):
            tail = self._vocabulary[ids[place]] + tail
            if ids[place] in self._control or len(tail) >= self._longest:
                break
            if self._extends(tail):
                cut, healing = place, tail
        return tuple(ids[:cut]), healing

    def _extends(self, tail: bytes) -> bool:
        """Whether some longer token starts with these bytes."""
        at = bisect_left(self._token_texts, tail + b"\0")
        return at < len(self._token_texts) and self._token_texts[at].startswith(tail)
