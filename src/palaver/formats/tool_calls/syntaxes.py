"""The syntaxes of tool calls, in the order in which they are tried on a template's samples. If a template renders no
calls, the syntax is learned from its instructions and control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

from palaver.formats.markers import CONTROL_LIKE, are_sides, split_marker
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


CONVENTION = python_calls.Syntax("<|tool_call_start|>", "<|tool_call_end|>")
"""The calls of models whose prompt lists the tools without a word on calls. These markers can't be meant as text."""
_CALL_TAG = re.compile(r"(?i)tool_?calls?|function_?calls?")


def learn_from_instructions(prompt: str, texts: list[str], control: Iterable[str] = ()) -> CallSyntax | None:
    """`prompt` is a prompt with tools; `texts` are the constant texts of the template, `control` the control tokens."""
    return _described(prompt) or _named_pair(" ".join([prompt, *texts]), prompt, sorted(control))


def _described(prompt: str) -> CallSyntax | None:
    """An example of a call in the instructions."""
    for opening, content, closing in _tagged(prompt):
        described: CallSyntax | None = _json_example(opening, content, closing)
        if described is None and re.match(r"\s*\[\s*[\w.<>{}-]+\(.*\)", content, re.S):
            quoted = re.search(r"""=\s*(["'])""", content)
            described = python_calls.Syntax(opening, closing, quoted[1] if quoted else '"')
        if described is not None:
            return described
    fenced = re.search(r"(\w+:)\s*```json\s*\[\s*\{\s*\"(\w*name)\":.*?\"(arguments|parameters)\"", prompt, re.S)
    return _fenced(fenced) if fenced else None


def _tagged(prompt: str) -> Iterable[tuple[str, str, str]]:
    """The texts between paired tags that hold no tag of the same pair."""
    tags = list(CONTROL_LIKE.finditer(prompt))
    for place, tag in enumerate(tags):
        closing = next((other for other in tags[place + 1 :] if _is_pair(tag[0], other[0])), None)
        if closing is not None and tag[0] not in prompt[tag.end() : closing.start()]:
            yield tag[0], prompt[tag.end() : closing.start()], closing[0]


def _is_pair(opening: str, closing: str) -> bool:
    return "/" not in opening and are_sides(opening, closing)


def _json_example(opening: str, content: str, closing: str) -> json_calls.Syntax | None:
    found = re.match(
        r"(\s*)(\[?)\s*\{[^{}]*[\"'](\w*name)[\"']\s*:[^{}]*[\"'](arguments|parameters)[\"']", content, re.S
    )
    if found is None:
        return None
    if found[2]:
        return _json(opening, closing, found[3], found[4], listed=True)
    return _json(opening + "\n", "\n" + closing, found[3], found[4])


def _json(opening: str, closing: str, name: str, arguments: str, listed: bool = False) -> json_calls.Syntax:
    between, list_open, list_close = (", ", "[", "]") if listed else ("\n", "", "")
    before, after = f'{{"{name}": "', f'", "{arguments}": '
    return json_calls.Syntax(
        opening, closing, between, list_open, list_close, name, arguments, None, before, after, "}"
    )


def _fenced(found: re.Match[str]) -> json_calls.Syntax:
    name, arguments = found[2], found[3]
    before = f'\n    {{\n        "{name}": "'
    return json_calls.Syntax(
        f"{found[1]}\n```json\n",
        "```",
        ",",
        "[\n    ",
        "\n]",
        name,
        arguments,
        None,
        before.lstrip(),
        f'",\n        "{arguments}": ',
        "\n    }",
    )


def _named_pair(text: str, prompt: str, control: list[str]) -> CallSyntax | None:
    """A pair of tags that are named after calls, or else after lists or results of tools in the same way."""
    tags = list(dict.fromkeys([*CONTROL_LIKE.findall(text), *control]))
    for tag in tags:
        closing = next((other for other in tags if _is_pair(tag, other)), None)
        if _CALL_TAG.search(tag) and closing is not None:
            return _of_pair(tag, closing, prompt)
    for tag in tags:
        start = re.sub(r"tool_(list|response|result|output)_start", "tool_call_start", tag)
        if "tool_call" in start and "start" in start:
            return python_calls.Syntax(start, start.replace("start", "end"))
    return None


def _of_pair(opening: str, closing: str, prompt: str) -> CallSyntax:
    """JSON, if the instructions say so or the pair is that of a tag; else Python calls."""
    python, json = re.search(r"(?i)python", prompt), re.search(r"(?i)\bjson\b(?! ?schema)", prompt)
    if not python and (json or closing == opening.replace("<", "</", 1)):
        return _json(opening + "\n", "\n" + closing, "name", "arguments")
    return python_calls.Syntax(opening, closing)
