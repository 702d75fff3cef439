"""Calls that must come: what a reply may say, beside its thoughts, until it has called one of some tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from palaver.constraints import MAX_CONSTRAINT, Grammar, Marked
from palaver.errors import BadParameter
from palaver.formats.facts import Facts
from palaver.formats.reply_states import Headers, find_headers, header_grammar
from palaver.formats.tool_calls import named_json, syntaxes
from palaver.formats.tool_calls.lark import LarkBuilder, join_expressions
from palaver.messages import Tool
from palaver.phases import Held

_SPACE = r"[ \n]{0,4}"
"""All that may be said before the calls, but for a thought."""


def forced_call_grammar(
    facts: Facts, tools: Sequence[Tool], control: Mapping[str, int], lead: str, thinks: bool
) -> Held:
    """A thought, then calls of these tools as the template writes them, their arguments by the schemas, and no more.

    `lead` is what the template writes between its generation prompt and a call; `thinks` is whether a thought may
    come first. BadParameter where the format can't write such a call.
    """
    if facts.calls is None:
        raise BadParameter("tool_choice", "required", "this model's chat template knows no tool calls")
    opener = facts.thinking.opener if facts.thinking is not None and thinks else ""
    typed = find_headers(facts)
    if typed is None:
        return Held(
            _grammar(control, lambda lark: _tagged(facts, tools, opener, lark)),
            _grammar(control, lambda lark: _tagged(facts, tools, "", lark)),
        )
    return Held(
        _grammar(control, lambda lark: _typed(facts, typed, tools, opener, lead, lark)),
        _grammar(
            control,
            lambda lark: join_expressions(lark.literal(typed.opening), _typed(facts, typed, tools, "", lead, lark)),
        ),
    )


def _tagged(facts: Facts, tools: Sequence[Tool], opener: str, lark: LarkBuilder) -> str:
    assert facts.calls is not None
    space = lark.pattern(_SPACE)
    thought = f"({join_expressions(space, lark.literal(opener))})?" if opener else ""
    return join_expressions(thought, space, syntaxes.grammar(facts.calls, tools, lark))


def _typed(
    facts: Facts,
    typed: Headers,
    tools: Sequence[Tool],
    opener: str,
    lead: str,
    lark: LarkBuilder,
    opening: str = "",
) -> str:
    if not isinstance(facts.calls, named_json.Syntax):
        raise BadParameter("tool_choice", "required", "this model's calls, in typed headers, can't be forced")
    thought = f"({lark.literal(opener)})?" if opener else ""
    return join_expressions(thought, lark.literal(opening), header_grammar(typed, facts.calls, tools, lead, lark))


def _grammar(control: Mapping[str, int], write: Callable[[LarkBuilder], str]) -> Marked:
    lark = LarkBuilder(control)
    text = lark.text(write(lark))
    if len(text) > MAX_CONSTRAINT:
        why = f"their schemas make a grammar of {len(text)} characters, and at most {MAX_CONSTRAINT} can be held"
        raise BadParameter("tools", "...", f"{why}: name the function, or offer fewer")
    return Marked(Grammar.LARK, text, tuple(sorted(lark.ids)), "tools")
