"""A reply that has been begun, as the model itself would have written it: the text half of an exact continue."""

from __future__ import annotations

from palaver.errors import UnsupportedContent
from palaver.formats.calls import syntaxes
from palaver.formats.facts import Facts
from palaver.messages import Message, Text, Thinking, ToolCall
from palaver.phases import Phase


def begun_reply(facts: Facts, message: Message, opens_in: Phase) -> str:
    """The text after the generation prompt. An open thought stays open, a closed one is closed as the model would,
    the last tool call is left open."""
    out = ""
    thinking = opens_in is Phase.THINKING
    calls: list[ToolCall] = []
    for part in message.parts:
        match part:
            case Thinking(text):
                out += _written_calls(facts, calls, False) + _thought(facts, text, thinking, not out and thinking)
                thinking, calls = True, []
            case Text(text):
                out += _written_calls(facts, calls, False) + _before_answer(facts, thinking, bool(out)) + text
                thinking, calls = False, []
            case ToolCall():
                if not calls:
                    out += _before_calls(facts, thinking, out)
                    thinking = False
                calls.append(part)
            case _:
                raise UnsupportedContent(f"A reply can't hold {type(part).__name__.lower()}.")
    return out + _written_calls(facts, calls, True)


def _thought(facts: Facts, text: str, thinking: bool, opened: bool) -> str:
    if facts.thinking is None:
        raise UnsupportedContent("This model's format has no thinking, so a thought can't be continued.")
    return text if thinking or opened else facts.thinking.opening + text


def _before_answer(facts: Facts, thinking: bool, begun: bool) -> str:
    if thinking and facts.thinking is not None:
        return facts.thinking.closing
    return "" if begun else facts.answer_opening


def _before_calls(facts: Facts, thinking: bool, written: str) -> str:
    """What the model writes between what it said and its calls; white space only once."""
    if thinking and facts.thinking is not None:
        return facts.thinking.closing.rstrip() + facts.space_after_thought
    return facts.space_before_calls if written else ""


def _written_calls(facts: Facts, calls: list[ToolCall], is_open: bool) -> str:
    if not calls:
        return ""
    if facts.calls is None:
        raise UnsupportedContent("This model's format has no tool calls, so one can't be continued.")
    return syntaxes.write(facts.calls, tuple(calls), is_open)
