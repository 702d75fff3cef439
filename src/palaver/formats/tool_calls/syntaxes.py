"""The syntaxes of tool calls, in the order in which they are tried on a template's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

from palaver.formats.markers import split_marker
from palaver.formats.state_machine import StateMachineBuilder
from palaver.formats.tool_calls import braces, elements, json_calls, named_json, parameters, python_calls
from palaver.formats.tool_calls.call_reader import CallReader, CallRegistry
from palaver.formats.tool_calls.lark import LarkBuilder
from palaver.formats.tool_calls.samples import NAME, CallSamples
from palaver.messages import Tool, ToolCall

CallSyntax = (
    json_calls.Syntax | named_json.Syntax | parameters.Syntax | python_calls.Syntax | braces.Syntax | elements.Syntax
)

_LEARNERS: tuple[Callable[[CallSamples], CallSyntax | None], ...] = (
    python_calls.learn,
    json_calls.learn,
    braces.learn,
    named_json.learn,
    elements.learn,
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
        case elements.Syntax():
            return elements


def add_states(builder: StateMachineBuilder, syntax: CallSyntax, origins: tuple[int, ...], back: int) -> None:
    _module(syntax).add_states(builder, syntax, origins, back)


def write(syntax: CallSyntax, calls: tuple[ToolCall, ...], last_is_open: bool) -> str:
    """The calls as the model writes them. If the last one is open, it ends where its arguments end."""
    text: str = _module(syntax).write(syntax, calls, last_is_open)
    return text


def grammar(syntax: CallSyntax, tools: Sequence[Tool], lark: LarkBuilder) -> str:
    """The grammar of calls to these tools, arguments by their schemas. BadParameter if the syntax can't express one."""
    expression: str = _module(syntax).grammar(syntax, tools, lark)
    return expression


def reader(syntax: CallSyntax, registry: CallRegistry) -> CallReader:
    calls: CallReader = _module(syntax).Calls(syntax, registry)
    return calls


def start(syntax: CallSyntax) -> str:
    """The first marker or text of calls; the name of the sample's tool if calls start with a name."""
    first = next(iter(split_marker(opening(syntax))), "")
    if not first and isinstance(syntax, json_calls.Syntax):
        first = (syntax.list_open or syntax.before_name).strip()
    return first or NAME


def opening(syntax: CallSyntax) -> str:
    """The marker that opens the calls; empty if the prompt or the call itself does."""
    return syntax.opening if isinstance(syntax, json_calls.Syntax | python_calls.Syntax) else syntax.frame.opening
