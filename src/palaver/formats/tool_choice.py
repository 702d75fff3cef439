"""`tool_choice`: the grammar of a reply that must call a tool, of these or this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from palaver.constraints import MAX_CONSTRAINT, Grammar, MarkerConstraint
from palaver.errors import BadParameter
from palaver.formats.facts import Facts
from palaver.formats.reply_states import Headers, find_headers
from palaver.formats.tool_calls import named_json, syntaxes
from palaver.formats.tool_calls.lark import (
    LarkBuilder,
    arguments_schema,
    check_tool_name,
    join_expressions,
    one_of,
    without_character,
)
from palaver.formats.tool_calls.samples import NAME
from palaver.messages import Tool
from palaver.phases import RequiredGrammar

_SPACE = r"[ \n]{0,4}"
"""White space before the calls."""


def forced_call_grammar(
    facts: Facts, tools: Sequence[Tool], control: Mapping[str, int], lead: str, thinks: bool
) -> RequiredGrammar:
    """The grammar of an optional thought and calls to these tools, with arguments by their schemas, and nothing else.

    `lead` is the text between the generation prompt and a call; `thinks` allows a thought before the calls.
    BadParameter if the format can't express a call.
    """
    if facts.calls is None:
        raise BadParameter("tool_choice", "required", "this model's chat template has no tool calls")
    opener = facts.thinking.opener if facts.thinking is not None and thinks else ""
    headers = find_headers(facts)
    if headers is None:
        return RequiredGrammar(
            _grammar(control, lambda lark: _marked_calls(facts, tools, opener, lark)),
            _grammar(control, lambda lark: _marked_calls(facts, tools, "", lark)),
        )
    return RequiredGrammar(
        _grammar(control, lambda lark: _header_calls(facts, headers, tools, opener, lead, lark)),
        _grammar(
            control,
            lambda lark: join_expressions(
                lark.literal(headers.opening), _header_calls(facts, headers, tools, "", lead, lark)
            ),
        ),
    )


def _marked_calls(facts: Facts, tools: Sequence[Tool], opener: str, lark: LarkBuilder) -> str:
    assert facts.calls is not None
    space = lark.pattern(_SPACE)
    thought = f"({join_expressions(space, lark.literal(opener))})?" if opener else ""
    return join_expressions(thought, space, syntaxes.grammar(facts.calls, tools, lark))


def _header_calls(
    facts: Facts,
    headers: Headers,
    tools: Sequence[Tool],
    opener: str,
    lead: str,
    lark: LarkBuilder,
) -> str:
    if facts.call_header and facts.calls is not None:
        thought = f"({lark.literal(opener)})?" if opener else ""
        calls = [_addressed_call(facts, facts.calls, tool, lark) for tool in tools]
        return join_expressions(thought, one_of(calls))
    if not isinstance(facts.calls, named_json.Syntax):
        raise BadParameter("tool_choice", "required", "this model's calls, in typed headers, can't be forced")
    thought = f"({lark.literal(opener)})?" if opener else ""
    return join_expressions(thought, _called_in_header(headers, facts.calls, tools, lead, lark))


def _addressed_call(facts: Facts, calls: syntaxes.CallSyntax, tool: Tool, lark: LarkBuilder) -> str:
    header = lark.literal(facts.call_header.replace(NAME, check_tool_name(tool)))
    return lark.rule(join_expressions(header, syntaxes.grammar(calls, [tool], lark)))


def _grammar(control: Mapping[str, int], write: Callable[[LarkBuilder], str]) -> MarkerConstraint:
    lark = LarkBuilder(control)
    text = lark.build(write(lark))
    if len(text) > MAX_CONSTRAINT:
        why = f"their schemas make a grammar of {len(text)} characters, and the limit is {MAX_CONSTRAINT}"
        raise BadParameter("tools", "...", f"{why}: name the function, or offer fewer")
    return MarkerConstraint(Grammar.LARK, text, tuple(sorted(lark.ids)), "tools")


def _called_in_header(
    headers: Headers, syntax: named_json.Syntax, tools: Sequence[Tool], lead: str, lark: LarkBuilder
) -> str:
    """The grammar of one call in a typed header, after the header's opening. The recipient stands before or after the
    channel; `lead` is the text before it."""
    return one_of([lark.rule(_header_call(headers, syntax, tool, lead, lark)) for tool in tools])


def _header_call(headers: Headers, syntax: named_json.Syntax, tool: Tool, lead: str, lark: LarkBuilder) -> str:
    recipient = (lead or " ") + syntax.frame.call_open + check_tool_name(tool)
    channel, *kind = headers.answers[1:] or headers.answers
    after = "".join(f" {word}" for word in kind)
    channel_first = join_expressions(
        lark.literal(headers.channel + channel + recipient), f"({lark.literal(after)})?" if after else ""
    )
    recipient_first = lark.literal(recipient + syntax.before_arguments)
    orders = [recipient_first, join_expressions(channel_first, lark.literal(headers.message))]
    arguments = lark.json(without_character(arguments_schema(tool), lark.text_marker_start(headers.message_end)))
    return join_expressions(one_of(orders), arguments, lark.literal(syntax.frame.call_close))
