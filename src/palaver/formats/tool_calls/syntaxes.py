"""The syntaxes of tool calls, in the order in which they are tried on a template's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls import braces, json_calls, named_json, parameters, python_calls
from palaver.formats.tool_calls.call_reader import CallReader, CallRegistry
from palaver.formats.tool_calls.lark import LarkBuilder
from palaver.formats.tool_calls.samples import CallSamples
from palaver.messages import Tool, ToolCall

CallSyntax = json_calls.Syntax | named_json.Syntax | parameters.Syntax | python_calls.Syntax | braces.Syntax

_LEARNERS: tuple[Callable[[CallSamples], CallSyntax | None], ...] = (
    python_calls.learn,
    json_calls.learn,
    braces.learn,
    named_json.learn,
    parameters.learn,
)


def learn(samples: CallSamples) -> CallSyntax | None:
    for learner in _LEARNERS:
        syntax = learner(samples)
        if syntax is not None:
            return syntax
    return None


def _module(syntax: CallSyntax) -> ModuleType:
    match syntax:
        case json_calls.Syntax():
            return json_calls
        case named_json.Syntax():
            return named_json
        case parameters.Syntax():
            return parameters
        case python_calls.Syntax():
            return python_calls
        case braces.Syntax():
            return braces


def add_states(builder: StateMachineBuilder, syntax: CallSyntax, froms: tuple[int, ...], back: int) -> None:
    _module(syntax).add_states(builder, syntax, froms, back)


def write(syntax: CallSyntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    """The calls as the model writes them; where the last one is open, up to what is there of it."""
    text: str = _module(syntax).write(syntax, calls, last_is_open)
    return text


def grammar(syntax: CallSyntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    """Calls of these tools and nothing else, arguments by their schemas. BadParameter where that can't be had."""
    expression: str = _module(syntax).grammar(syntax, tools, lark)
    return expression


def reader(syntax: CallSyntax, opened: CallRegistry) -> CallReader:
    calls: CallReader = _module(syntax).Calls(syntax, opened)
    return calls


def opening(syntax: CallSyntax) -> str:
    """What opens the calls; empty where the prompt or the call itself does."""
    return syntax.opening if isinstance(syntax, json_calls.Syntax | python_calls.Syntax) else syntax.frame.opening


def syntax_name(syntax: CallSyntax) -> str:
    """The name of the syntax, as its module is called."""
    return _module(syntax).__name__.rpartition(".")[2]
