"""Templates that the code was not written for; each combines mechanisms in another way.

`templates/*.jinja` are the templates, `templates/cases.jsonl` are replies with their expected messages.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from palaver.commands.format_trials import STRINGS, PieceTokenizer, control_strings
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template

FOLDER = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def make_format(name: str, tokens: bool = True) -> tuple[TemplateFormat, PieceTokenizer]:
    """The format, with the template's control strings as tokens or as text."""
    text = source(name)
    pieces = PieceTokenizer(control_strings(text) | set(STRINGS.values()) if tokens else ())
    return TemplateFormat(Template(text, name), pieces, STRINGS), pieces


def cases(name: str) -> list[dict[str, Any]]:
    lines = (FOLDER / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [case for case in map(json.loads, lines) if case["template"] == name]


SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "amber": {
        "depth": {"kind": "effort", "values": ("shallow", "normal", "deep"), "default": "normal", "others": False}
    },
    "basalt": {"ponder": {"kind": "thinking", "type": "boolean", "default": True, "on": True, "off": False}},
    "cobalt": {
        "max_thought_tokens": {"kind": "budget", "type": "integer", "default": 4096, "on": 4096, "off": 0}
    },
    "dune": {
        "hide_tools": {"kind": "tools", "type": "boolean", "default": False},
        "today": {"kind": "date", "type": "text", "default": "03 March 2025", "form": "%d %B %Y"},
        "units": {"kind": "other", "type": "text", "default": "metric"},
    },
    "ember": {
        "mode": {"kind": "thinking", "type": "text", "default": "chat", "on": "reason", "off": "chat"},
        "retain": {"kind": "keeping", "type": "boolean", "on": True, "off": False},
    },
    "fjord": {
        "strength": {"kind": "effort", "values": ("low", "medium", "high"), "default": "medium", "off": None},
        "think": {"kind": "thinking", "type": "boolean", "default": True},
    },
    "grove": {
        "knowledge_cutoff": {"kind": "other", "type": "text", "default": None},
        "reasoning": {"kind": "effort", "values": ("low", "medium", "high"), "default": "medium", "others": True},
    },
    "heath": {
        "level": {"kind": "effort", "type": "integer", "values": (0, 1, 2, 3), "default": 2, "off": 0, "others": False}
    },
    "iris": {
        "clear_past": {"kind": "keeping", "type": "boolean", "on": False, "off": True, "default": False},
        "thinking": {"kind": "thinking", "type": "text", "values": ("disabled", "auto"), "on": None, "off": "disabled"},
    },
    "jade": {
        "budget_tokens": {"kind": "budget", "type": "integer", "off": None, "others": True},
        "citations": {"kind": "other", "type": "boolean", "changes": "documents"},
        "documents": {"kind": "other", "type": "list"},
    },
    "kelp": {"no_reasoning": {"kind": "thinking", "type": "boolean", "default": False, "on": False, "off": True}},
    "lark": {
        "reasoning_effort": {"kind": "effort", "values": ("none", "low", "medium", "high"), "default": "medium",
                             "on": "medium", "off": "none"},
    },
    "moss": {
        "effort": {"kind": "effort", "values": ("low", "normal", "high"), "default": "normal"},
        "reason": {"kind": "thinking", "type": "boolean", "default": False},
    },
    "nova": {"thinking": {"kind": "other", "type": "object"}},
    "opal": {
        "current_date": {"kind": "date", "form": "%Y-%m-%d"},
        "number_pictures": {"kind": "other", "type": "boolean", "changes": "pictures"},
        "user_location": {"kind": "other", "type": "object"},
    },
    "pine": {"thinking_level": {"kind": "effort", "type": "integer", "values": (), "others": True, "default": 1}},
    "quartz": {"keep_thoughts": {"kind": "keeping", "type": "text", "default": "last", "on": "all"}},
    "reed": {"think_budget": {"kind": "budget", "type": "integer", "off": 0, "on": None}},
    "slate": {
        "persona": {"kind": "other", "type": "text"},
        "tool_style": {"kind": "tools", "values": ("yaml", "json"), "default": "json",
                       "changes": "how tools are listed"},
    },
    "tarn": {
        "effort_level": {"kind": "effort", "values": ("minimal", "low", "medium", "high", "max"), "default": "high"},
        "thinking": {"kind": "thinking", "type": "boolean", "default": True, "on": True, "off": False},
    },
}  # fmt: skip
