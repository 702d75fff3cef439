"""Learns the syntax of tool calls from the instructions in a template that renders no calls."""

from __future__ import annotations

import re

from palaver.formats.markers import CONTROL_LIKE
from palaver.formats.tool_calls import json_calls, python_calls
from palaver.formats.tool_calls.syntaxes import CallSyntax


def learn_from_instructions(prompt: str, texts: list[str]) -> CallSyntax | None:
    """`prompt` is a prompt with tools; `texts` are the constant texts of the template."""
    described = _described(prompt)
    if described is not None:
        return described
    return _special_pair(" ".join([prompt, *texts]))


def _described(prompt: str) -> CallSyntax | None:
    """`<tag>{"name": ..., "arguments": ...}</tag>` in the instructions."""
    found = re.search(
        r"(<([\w:|]+)>)\s*\{[^{}]*[\"']name[\"'][^{}]*[\"'](arguments|parameters)[\"'].*?(</\2>)", prompt, re.S
    )
    if found is None:
        fenced = re.search(r"(\w+:)\s*```json\s*\[\s*\{\s*\"(\w*name)\":.*?\"(arguments|parameters)\"", prompt, re.S)
        return _fenced(fenced) if fenced else None
    return _json(found[1] + "\n", "\n" + found[4], "name", found[3])


def _json(opening: str, closing: str, name: str, arguments: str) -> json_calls.Syntax:
    return json_calls.Syntax(
        opening, closing, "\n", "", "", name, arguments, None, f'{{"{name}": "', f'", "{arguments}": ', "}"
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


def _special_pair(text: str) -> CallSyntax | None:
    """Python calls, if there are only markers for the start and end of calls (or of tool lists or results)."""
    for tag in dict.fromkeys(CONTROL_LIKE.findall(text)):
        start = re.sub(r"tool_(list|response|result|output)_start", "tool_call_start", tag)
        if "tool_call" in start and "start" in start:
            return python_calls.Syntax(start, start.replace("start", "end"))
    return None
