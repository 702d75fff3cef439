"""Chat templates for tests, one for every family of formats, with replies and their expected messages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from palaver.commands.format_trials import PieceTokenizer
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.messages import Tool

STRINGS = {"bos_token": "<|bos|>", "eos_token": "<|done|>"}
TURNS = ("<|bos|>", "<|system|>", "<|user|>", "<|bot|>", "<|result|>", "<|done|>")

_FRAME = """\
{{- bos_token }}
{%- if tools %}{{- '<|system|>Tools: ' + tools | tojson + '<|done|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|bot|>' }}
%THOUGHT%
{{- m.content or '' }}
{%- if m.tool_calls %}
%CALLS%
{%- endif %}
{{- '<|done|>' }}
{%- elif m.role == 'tool' %}
{{- '<|result|>' + m.content + '<|done|>' }}
{%- elif m.role == 'system' %}
{{- '<|system|>' + m.content + '<|done|>' }}
{%- else %}
{{- '<|user|>' + m.content + '<|done|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|bot|>' }}
%OPENING%
{%- endif %}"""

_THOUGHT = """\
{%- if m.reasoning_content and (keep_thinking or loop.last or not loop.nextitem or loop.nextitem.role == 'tool') %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}"""
_CLOSED = "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
_OPENED = """\
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}"""


def framed(calls: str = "", thought: str = "", opening: str = "") -> str:
    if not calls:
        calls = "{{- raise_exception('no tools here') }}"
    return _FRAME.replace("%CALLS%", calls).replace("%THOUGHT%", thought).replace("%OPENING%", opening)


TOOLS = (
    Tool(
        "look_up",
        "Looks a word up.",
        {"type": "object", "properties": {"word": {"type": "string"}, "times": {"type": "integer"}}},
    ),
    Tool("now", "Tells the time.", {"type": "object", "properties": {}}),
)


@dataclass(frozen=True)
class Case:
    """A reply and its expected message. A `\0` inside a marker makes it plain text instead of a token."""

    text: str
    thinking: str = ""
    answer: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    thinks: bool | None = None
    """The value of the thinking option."""
    as_text: bool = True
    """Whether the message is the same if markers are plain text, which count only at the start of a part."""


@dataclass(frozen=True, eq=False)
class Family:
    name: str
    source: str
    markers: tuple[str, ...]
    """Markers that may be tokens of the tokenizer, beside those that open and end turns."""
    replies: tuple[Case, ...]
    calls: str | None = None
    """The expected syntax of tool calls."""
    thinking: tuple[str, str] | None = None
    reasoning: str | None = None
    switch: str | None = None
    turns: tuple[str, ...] = TURNS
    strings: dict[str, str] = field(default_factory=lambda: dict(STRINGS))


class Kind(StrEnum):
    """Whether the tokenizer has markers as special tokens, as added tokens or as plain text."""

    SPECIAL = "special"
    ADDED = "added"
    TEXT = "text"


def tokenizer(family: Family, kind: Kind) -> PieceTokenizer:
    """A tokenizer that can split text anywhere. Turn markers are special tokens, unless all markers are text."""
    pieces = PieceTokenizer(() if kind is Kind.TEXT else (*family.turns, *family.markers))
    special = (*family.turns, *(family.markers if kind is Kind.SPECIAL else ()))
    pieces.special_ids = frozenset(pieces.control[text] for text in special if text in pieces.control)
    return pieces


def make_format(family: Family, kind: Kind = Kind.ADDED) -> tuple[TemplateFormat, PieceTokenizer]:
    pieces = tokenizer(family, kind)
    return TemplateFormat(Template(family.source, family.name), pieces, family.strings), pieces


def ids(pieces: PieceTokenizer, text: str) -> list[int]:
    """The tokens of a reply: its markers, and one token for each text between them."""
    runs = (run.replace("\0", "") if isinstance(run, str) else run for run in pieces.runs(text))
    return [run if isinstance(run, int) else pieces.piece(run) for run in runs]


ONE = (("look_up", {"word": "tree", "times": 2}),)
TWO: tuple[tuple[str, dict[str, Any]], ...] = (*ONE, ("now", {}))
QUOTED = (("look_up", {"word": 'a "b" \\ </tool_call> \n é'}),)


def _json(calls: tuple[tuple[str, dict[str, Any]], ...], **more: str) -> list[str]:
    return [json.dumps({"name": name, "arguments": a, **more}, ensure_ascii=False) for name, a in calls]


def _plain(text: str) -> str:
    return text.replace("<", "<\0")


def _thoughts(preopened: bool) -> tuple[Case, ...]:
    start = "" if preopened else "<think>\n"
    off = Case("No thought.", answer="No thought.", thinks=False)
    return (
        off,
        Case(f"{start}Why?\n</think>\n\nBecause.", "Why?", "Because."),
        Case(f"{start}never clos", "never clos"),
        Case(f"{start}one\n</think>\n\na<think>\ntwo\n</think>\n\nb", "onetwo", "ab", as_text=False)
        if preopened
        else Case(f"{start}a < b\n</think>\n\n    code", "a < b", "    code"),
        Case(f"{start}\n</think>\n\n \n", "", ""),
    )


def _thinking_families() -> list[Family]:
    think = ("<think>", "</think>")
    common: dict[str, Any] = {"thinking": ("<think>\n", "\n</think>\n\n"), "reasoning": "reasoning_content"}
    typed = """\
{%- if m.content is not string %}
{%- for p in m.content %}
{%- if p.type == 'thinking' %}{{- '[THINK]' + p.thinking + '[/THINK]' }}{%- else %}{{- p.text }}{%- endif %}
{%- endfor %}
{%- else %}"""
    typed_source = framed(thought=typed).replace("{{- m.content or '' }}\n", "{{- m.content or '' }}{%- endif %}\n", 1)
    split = (
        "{%- set case = m.content.split('</think>')[-1] if m.content and '</think>' in m.content else m.content %}\n"
    )
    split_source = framed(thought=split, opening="{{- '<think>\\n' }}").replace(
        "{{- m.content or '' }}", "{{- case or '' }}"
    )
    return [
        Family("tags, self-opened", framed(thought=_THOUGHT, opening=_CLOSED), think, _thoughts(False), **common,
               switch="enable_thinking"),
        Family("tags, opened by the prompt", framed(thought=_THOUGHT, opening=_OPENED), think, _thoughts(True),
               **common, switch="enable_thinking"),
        Family("typed parts", typed_source, ("[THINK]", "[/THINK]"),
               (Case("[THINK]Why?[/THINK]Because.", "Why?", "Because."), Case("plain", answer="plain")),
               thinking=("[THINK]", "[/THINK]"), reasoning="content"),
        Family("dropped by a split", split_source, think,
               (Case("Why?\n</think>\n\nBecause.", "Why?", "Because."), Case("open", "open"))),
        Family("no thinking", framed(), (),
               (Case("  plain \n", answer="  plain \n"), Case("<think>x", answer="<think>x"))),
    ]  # fmt: skip


def _json_families() -> list[Family]:
    tags = """\
{%- for c in m.tool_calls %}
{{- '\\n' if not loop.first or m.content else '' }}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}"""
    tagged = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in _json(TWO))
    listed = """\
{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{{- '' if loop.last else ', ' }}
{%- endfor %}{{- ']' }}"""
    lines = """\
{{- '\\n<tool_calls>\\n' }}
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}\\n' }}
{%- endfor %}{{- '</tool_calls>' }}"""
    bare = """\
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set c = m.tool_calls[0].function %}
{{- '{"name": "' + c.name + '", "parameters": ' + c.arguments | tojson + '}' }}"""
    keyed = """\
{{- '<|calls|>[' }}
{%- for c in m.tool_calls %}
{{- '{"' + c.function.name + '": ' + c.function.arguments | tojson + '}' + ('' if loop.last else ', ') }}
{%- endfor %}{{- ']<|/calls|>' }}"""
    parameters = json.dumps({"name": "look_up", "parameters": ONE[0][1]})
    named = "[" + ", ".join(json.dumps({name: given}) for name, given in TWO) + "]"
    with_ids = ", ".join(_json(ONE, id="abcdefghi"))
    return [
        Family("JSON in tags", framed(tags, _THOUGHT, _CLOSED), ("<think>", "</think>", "<tool_call>", "</tool_call>"),
               (Case(tagged, calls=TWO), Case(f"So:\n{tagged}", answer="So:", calls=TWO),
                Case(f"<tool_call>\n{_plain(_json(QUOTED)[0])}\n</tool_call>", calls=QUOTED),
                Case(f"<think>\nhm\n</think>\n\n{tagged}", "hm", calls=TWO),
                Case(f"<think>\nhm\n{tagged}\nmore\n</think>\n\nok", f"hm\n{tagged}\nmore", "ok")),
               "json_calls", ("<think>\n", "\n</think>\n\n"), "reasoning_content", "enable_thinking"),
        Family("JSON list", framed(listed), ("[TOOL_CALLS]",),
               (Case(f"[TOOL_CALLS][{with_ids}]", calls=ONE), Case("just text [x]", answer="just text [x]")),
               "json_calls"),
        Family("JSON lines", framed(lines), ("<tool_calls>", "</tool_calls>"),
               (Case("<tool_calls>\n" + "\n".join(_json(TWO)) + "\n</tool_calls>", calls=TWO),), "json_calls"),
        Family("bare JSON", framed(bare), (),
               (Case(parameters, calls=ONE), Case("No {brace} here", answer="No {brace} here")), "json_calls"),
        Family("the name as key", framed(keyed), ("<|calls|>", "<|/calls|>"),
               (Case(f"<|calls|>{named}<|/calls|>", calls=TWO),), "json_calls"),
    ]  # fmt: skip


def _tagged_families() -> list[Family]:
    xml = """\
{%- for c in m.tool_calls %}
{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}"""
    pairs = """\
{%- for c in m.tool_calls %}
{{- '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}
{%- endfor %}{{- '</tool_call>' }}
{%- endfor %}"""
    typed = """\
{{- '\\n<calls>\\n' }}
{%- for c in m.tool_calls %}
{{- '<invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}
{{- (v if v is string else v | tojson) + '</parameter>\\n' }}
{%- endfor %}{{- '</invoke>\\n' }}
{%- endfor %}{{- '</calls>' }}"""
    one = "<parameter=word>\ntree\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
    two = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    odd = (("look_up", {"word": "two\nlines </tool_call> <x>"}),)
    return [
        Family("function XML", framed(xml, _THOUGHT, _OPENED), ("<think>", "</think>", "<tool_call>", "</tool_call>"),
               (Case(f"hm\n</think>\n\n<tool_call>\n<function=look_up>\n{one}</function>\n</tool_call>\n{two}", "hm",
                     calls=TWO),
                Case("<tool_call>\n<function=look_up>\n<parameter=word>\ntwo\nlines <\0/tool_call> <x>\n</parameter>\n"
                     "</function>\n</tool_call>", calls=odd, thinks=False)),
               "parameters", ("<think>\n", "\n</think>\n\n"), "reasoning_content", "enable_thinking"),
        Family("key and value tags", framed(pairs),
               ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
               (Case("<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>tree</arg_value>\n<arg_key>times</arg_key>"
                     "\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", calls=TWO),),
               "parameters"),
        Family("typed parameters", framed(typed), ("<calls>", "</calls>"),
               (Case('<calls>\n<invoke name="look_up">\n<parameter name="word" string="true">tree</parameter>\n'
                     '<parameter name="times" string="false">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
                     "</calls>", calls=TWO),), "parameters"),
    ]  # fmt: skip


def _named_families() -> list[Family]:
    counted = """\
{{- '<|section|>' }}
{%- for c in m.tool_calls %}
{{- '<|call|>functions.' + c.function.name + ':' + loop.index0 | string + '<|args|>' + c.function.arguments | tojson }}
{{- '<|/call|>' }}
{%- endfor %}{{- '<|/section|>' }}"""
    separated = counted.replace("functions.' + c.function.name + ':' + loop.index0 | string", "' + c.function.name")
    marked = """\
{%- for c in m.tool_calls %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}
{%- endfor %}"""
    given = json.dumps(ONE[0][1])
    return [
        Family("sections with counted ids", framed(counted),
               ("<|section|>", "<|/section|>", "<|call|>", "<|/call|>", "<|args|>"),
               (Case(f"<|section|><|call|>functions.look_up:0<|args|>{given}<|/call|><|call|>functions.now:1<|args|>{{}}"
                     "<|/call|><|/section|>", calls=TWO),), "named_json"),
        Family("name, separator, JSON", framed(separated),
               ("<|section|>", "<|/section|>", "<|call|>", "<|/call|>", "<|args|>"),
               (Case(f"<|section|><|call|>look_up<|args|>{given}<|/call|><|call|>now<|args|>{{}}<|/call|><|/section|>",
                     calls=TWO),), "named_json"),
        Family("marker and arguments", framed(marked), ("[TOOL_CALLS]", "[ARGS]"),
               (Case(f"So [TOOL_CALLS]look_up[ARGS]{given}[TOOL_CALLS]now[ARGS]{{}}", answer="So", calls=TWO),),
               "named_json"),
    ]  # fmt: skip


def _other_families() -> list[Family]:
    python = """\
{{- '<|calls|>[' }}
{%- for c in m.tool_calls %}
{{- c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}{{- k + '=' + v | tojson + ('' if loop.last else ', ') }}{%- endfor %}
{{- ')' + ('' if loop.last else ', ') }}
{%- endfor %}{{- ']<|/calls|>' }}"""
    braces = """\
{%- for c in m.tool_calls %}
{{- '<|call>call:' + c.function.name + '{' }}
{%- for k, v in c.function.arguments.items() %}
{{- k + ':' + ('<|"|>' + v + '<|"|>' if v is string else v | tojson) + ('' if loop.last else ',') }}
{%- endfor %}{{- '}<call|>' }}
{%- endfor %}"""
    actions = """\
{{- '<|ACTIONS|>[' }}
{%- for c in m.tool_calls %}
{{- '\\n    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + c.function.name + '", "parameters": ' }}
{{- c.function.arguments | tojson + '}' + ('' if loop.last else ',') }}
{%- endfor %}{{- '\\n]<|/ACTIONS|>' }}"""
    channels = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- if m.tool_calls %}
{%- set c = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' + c.arguments | tojson }}
{{- '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{%- endif %}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
    given = json.dumps(ONE[0][1])
    action = json.dumps([{"tool_call_id": "0", "tool_name": "look_up", "parameters": ONE[0][1]}])
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    control = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")
    return [
        Family("Python calls", framed(python), ("<|calls|>", "<|/calls|>"),
               (Case('<|calls|>[look_up(word="tree", times=2), now()]<|/calls|>', calls=TWO),), "python_calls"),
        Family("braces with own quotes", framed(braces), ("<|call>", "<call|>", '<|"|>'),
               (Case('<|call>call:look_up{word:<|"|>tree<|"|>,times:2}<call|><|call>call:now{}<call|>', calls=TWO),),
               "braces"),
        Family("actions", framed(actions), ("<|ACTIONS|>", "<|/ACTIONS|>"),
               (Case(f"<|ACTIONS|>{action}<|/ACTIONS|>", calls=ONE),), "json_calls"),
        Family("typed headers", channels, (),
               (Case(f"{thought}<|channel|>final<|message|>It is.", "hm", "It is."),
                Case(f"{thought} to=functions.look_up<|channel|>commentary json<|message|>{given}<|call|>", "hm",
                     calls=ONE)),
               "named_json", None, "thinking", turns=control, strings={}),
    ]  # fmt: skip


FAMILIES = {
    family.name: family
    for family in (
        *_thinking_families(),
        *_json_families(),
        *_tagged_families(),
        *_named_families(),
        *_other_families(),
    )
}
