"""Calls that must come: phases in which a reply can't answer or end before it has called one of some tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from palaver.constraints import Constraint, Grammar
from palaver.errors import BadParameter
from palaver.formats.calls import json_calls, python_calls
from palaver.formats.calls.named_json import ARGUMENTS_SLOT, GLUE, NAME_SLOT
from palaver.formats.calls.samples import IDS
from palaver.formats.calls.syntaxes import CallSyntax
from palaver.formats.headers import HEADER
from palaver.messages import Tool
from palaver.phases import Phase, Phases, State, Trigger

_SPACE = Constraint(Grammar.REGEX, r"[ \n]{0,2}")
"""All that may be said before the call, but for thinking."""
_TOWARDS = (Phase.THINKING, Phase.TOOL_CALL, Phase.CONTROL)


def forced(phases: Phases, syntax: CallSyntax | None, tools: Sequence[Tool]) -> Phases:
    """The phases twice: before the first call nothing but it may be said, after it all is as it was.

    The call's name is one of the tools'. Its arguments follow the tool's schema where the syntax writes them as JSON.
    """
    if syntax is None:
        raise BadParameter("tool_choice", "required", "this model's chat template knows no tool calls")
    if any(state.slot == HEADER for state in phases.states):
        raise BadParameter("tool_choice", "required", "this model's calls, in typed headers, can't be forced")
    size, slots = len(phases.states), _by_slot(syntax, tools)
    before = [_before(state, phases.states, size, slots) for state in phases.states]
    after = [_moved(_constrained(state, slots), size) for state in phases.states]
    return replace(phases, states=(*before, *after))


def _before(state: State, states: Sequence[State], size: int, slots: dict[str, Constraint]) -> State:
    if state.phase is Phase.TOOL_CALL and state.slot != GLUE:
        return _moved(_constrained(state, slots), size)
    if state.phase is Phase.THINKING or state.phase is Phase.END:
        return state
    kept = tuple(trigger for trigger in state.triggers if states[trigger.to].phase in _TOWARDS)
    return replace(state, triggers=kept, constraint=_SPACE)


def _constrained(state: State, slots: dict[str, Constraint]) -> State:
    is_call = state.phase is Phase.TOOL_CALL
    return replace(state, constraint=slots.get(state.slot)) if is_call else state


def _moved(state: State, size: int) -> State:
    """Its ways lead to the second copy."""
    triggers = tuple(Trigger(trigger.marker, trigger.to + size, trigger.keep) for trigger in state.triggers)
    return replace(state, triggers=triggers, other=None if state.other is None else state.other + size)


def _by_slot(syntax: CallSyntax, tools: Sequence[Tool]) -> dict[str, Constraint]:
    names = "|".join(re.escape(tool.name) for tool in tools)
    if isinstance(syntax, json_calls.Syntax):
        return {json_calls.SLOT: _json_calls(syntax, tools)}
    if isinstance(syntax, python_calls.Syntax):
        return {python_calls.SLOT: Constraint(Grammar.REGEX, rf"[\[\s]*({names})\([\s\S]*")}
    schemas = [dict(tool.parameters) for tool in tools]
    arguments = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {
        NAME_SLOT: Constraint(Grammar.REGEX, rf"\s{{0,2}}({names})(:[0-9]{{1,3}})?\s{{0,2}}"),
        ARGUMENTS_SLOT: Constraint(Grammar.JSON_SCHEMA, json.dumps(arguments, ensure_ascii=False)),
    }


def _json_calls(syntax: json_calls.Syntax, tools: Sequence[Tool]) -> Constraint:
    """From behind the opening marker on; a bare call's own brace is part of it."""
    body = "call"
    if syntax.listed:
        opening, closing = _literal(syntax.list_open.strip()), _literal(syntax.list_close.strip())
        body = f"{opening} call ({_literal(syntax.between)} call)* {closing}"
    calls = " | ".join(f"call_{place}" for place in range(len(tools)))
    rules = [_call_rule(syntax, place, tool) for place, tool in enumerate(tools)]
    spelled = [f"start: ws {body} ws", "ws: /[ \\n]{0,2}/", "id: /[A-Za-z0-9_-]{1,40}/", f"call: {calls}", *rules]
    return Constraint(Grammar.LARK, "\n".join(spelled))


def _call_rule(syntax: json_calls.Syntax, place: int, tool: Tool) -> str:
    before = _literal(syntax.before_name + tool.name + syntax.before_arguments)
    schema = json.dumps(dict(tool.parameters), ensure_ascii=False)
    return f"call_{place}: {before} args_{place} {_literal(syntax.after_arguments)}\nargs_{place}: %json {schema}"


def _literal(text: str) -> str:
    """The text as a grammar writes it, with any id where the sample had one."""
    pieces = [json.dumps(piece, ensure_ascii=False) for piece in text.split(IDS[0])]
    return " id ".join(pieces)
