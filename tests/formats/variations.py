"""Invented templates that vary the rarer habits of published ones, several for each habit, with replies.

The last template of each habit was written after the rule that learns it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from tests.formats.families import ONE, TWO, Case, Family, framed

_ARGUMENTS = json.dumps(ONE[0][1])
_JSON_CALLS = """\
{%- for c in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}
{{- '\\n</tool_call>' }}
{%- endfor %}"""
_TAGGED = (
    f'<tool_call>\n{{"name": "look_up", "arguments": {_ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
_SPECIAL_CALLS = """\
{{- '<|calls|>' }}
{%- for c in m.tool_calls %}
{{- '<|call|>' + c.function.name + '<|args|>' + c.function.arguments | tojson }}
{%- endfor %}
{{- '<|/calls|>' }}"""
_SPECIAL = f"<|calls|><|call|>look_up<|args|>{_ARGUMENTS}<|call|>now<|args|>{{}}<|/calls|>"


def thought(opening: str, closing: str, empty: str = "") -> str:
    """The template of a thought in a history. Without one, `empty` is written."""
    given = f"{{{{- '{opening}' + m.reasoning_content + '{closing}' }}}}"
    otherwise = f"{{%- else %}}{{{{- '{empty}' }}}}" if empty else ""
    return f"{{%- if m.reasoning_content %}}{given}{otherwise}{{%- endif %}}"


def switched(on: str, off: str) -> str:
    """The generation prompt with thinking on and off."""
    return f"{{{{- '{off}' if enable_thinking is defined and not enable_thinking else '{on}' }}}}"


def _unpaired_markers() -> list[Family]:
    return [
        Family(
            "a closing marker alone, tags",
            framed(
                thought=thought("<think>\\n", "\\n</think>\\n\\n"), opening=switched("", "<think>\\n\\n</think>\\n\\n")
            ),
            ("<think>", "</think>"),
            (
                Case("</think>\n\nHello", answer="Hello"),
                Case("<think>\n<think>\nhm\n</think>\n\nHello", "hm", "Hello"),
                Case("<think>\nhm\n</think>\n\n</think>\n\nHello", "hm", "Hello"),
                Case("Hello <think>\nhm\n</think>there.", "hm", "Hello there.", as_text=False),
                Case("Say <\0/think> aloud", answer="Say </think> aloud"),
                Case("</think>Hello", answer="Hello", thinks=False),
            ),
            switch="enable_thinking",
            reasoning="reasoning_content",
        ),
        Family(
            "a closing marker alone, opened by the prompt",
            framed(thought=thought("<|thought|>", "<|/thought|>"), opening=switched("<|thought|>", "<|/thought|>")),
            ("<|thought|>", "<|/thought|>"),
            (
                Case("<|/thought|>Hello", answer="Hello"),
                Case("<|thought|>hm<|/thought|>Hello", "hm", "Hello"),
                Case("hm<|/thought|><|/thought|>Hello", "hm", "Hello"),
                Case("a<|thought|>b<|/thought|>Hello", "ab", "Hello"),
                Case("Hello<|/thought|> there", answer="Hello there", thinks=False),
            ),
            switch="enable_thinking",
            reasoning="reasoning_content",
        ),
        Family(
            "a closing marker before every answer",
            framed(_JSON_CALLS, thought("<my:think>", "</my:think>", "</my:think>")),
            ("<my:think>", "</my:think>", "<tool_call>", "</tool_call>"),
            (
                Case("</my:think>Hello", answer="Hello"),
                Case("<my:think>hm</my:think>Hello", "hm", "Hello"),
                Case("<my:think></my:think>Hello", answer="Hello"),
                Case(f"</my:think>\n{_TAGGED}", calls=TWO),
            ),
            calls="json_calls",
            reasoning="reasoning_content",
        ),
        Family(
            "a closing marker alone, in square brackets",
            framed(
                thought=thought("[REASON]\\n", "\\n[/REASON]\\n", "[/REASON]\\n"),
                opening=switched("[REASON]\\n", "[/REASON]\\n"),
            ),
            ("[REASON]", "[/REASON]"),
            (
                Case("[/REASON]\nHello", answer="Hello"),
                Case("[REASON]\n[REASON]\nhm\n[/REASON]\nHello", "hm", "Hello"),
                Case("hm\n[/REASON]\n[/REASON]\nHello", "hm", "Hello"),
            ),
            switch="enable_thinking",
            reasoning="reasoning_content",
        ),
    ]


GOES_ON = "a thought goes on after the result of a call"


def _calls_in_thoughts() -> list[Family]:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    special = ("<think>", "</think>", "<|calls|>", "<|call|>", "<|args|>", "<|/calls|>")
    closed = thought("<think>\\n", "\\n</think>\\n\\n")
    unclosed = "{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content }}"
    after_result = "messages[loop.index0 - 1].role == 'tool'"
    unclosed += "{%- if not m.tool_calls %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    return [
        Family(
            "calls in tags are text of a thought",
            framed(_JSON_CALLS, closed),
            tags,
            (
                Case(f"<think>\na {_TAGGED} b\n</think>\n\n{_TAGGED}", f"a {_TAGGED} b", calls=TWO),
                Case(f"<think>\na {_TAGGED}", f"a {_TAGGED}"),
            ),
            calls="json_calls",
            reasoning="reasoning_content",
        ),
        Family(
            "calls with control tokens count in a thought",
            framed(_SPECIAL_CALLS, closed),
            special,
            (
                Case(f"<think>\na{_SPECIAL}b\n</think>\n\nok", "ab", "ok", TWO),
                Case(f"<think>\na{_SPECIAL}", "a", calls=TWO),
            ),
            calls="named_json",
            reasoning="reasoning_content",
        ),
        Family(
            "calls in tags follow a thought that is not closed",
            framed(_JSON_CALLS, unclosed),
            tags,
            (Case(f"<think>\na\n{_TAGGED}", "a", calls=TWO), Case("<think>\na\n</think>\n\nb", "a", "b")),
            calls="json_calls",
            reasoning="reasoning_content",
        ),
        Family(
            GOES_ON,
            framed(_JSON_CALLS, unclosed.replace("'<think>\\n'", f"('' if {after_result} else '<think>\\n')")),
            tags,
            (Case(f"<think>\na\n{_TAGGED}", "a", calls=TWO), Case("<think>\na\n</think>\n\nb", "a", "b")),
            calls="json_calls",
            reasoning="reasoning_content",
        ),
        Family(
            "calls in named tags are text of a thought that the prompt opens",
            framed(_JSON_CALLS.replace("tool_call>", "fn:call>"), closed, "{{- '<think>\\n' }}"),
            ("<think>", "</think>", "<fn:call>", "</fn:call>"),
            (
                Case(
                    f"a <fn:call>x</fn:call>\n</think>\n\n{_TAGGED.replace('tool_call>', 'fn:call>')}",
                    "a <fn:call>x</fn:call>",
                    calls=TWO,
                ),
            ),
            calls="json_calls",
            reasoning="reasoning_content",
        ),
    ]


def _described_calls() -> list[Family]:
    """Templates that render no calls: messages with calls are accepted, and the calls are left out."""
    silent = "{{- '' }}"
    python = '[look_up(word="tree", times=2), now()]'
    listed = f'[{{"name": "look_up", "arguments": {_ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'

    def telling(words: str) -> str:
        return framed(silent).replace("+ tools | tojson", f"+ tools | tojson + '{words}'")

    return [
        Family(
            "tools without a word on calls",
            framed(silent),
            (),
            (
                Case(f"<|tool_call_start|>{python}<|tool_call_end|>", calls=TWO),
                Case(f"So: <|tool_call_start|>{python}<|tool_call_end|>", answer="So:", calls=TWO),
                Case("See [this](that).", answer="See [this](that)."),
            ),
            calls="python_calls",
        ),
        Family(
            "an example of Python calls",
            telling("\\nCall them like this: <do>[name(argument=value, ...)]</do>"),
            ("<do>", "</do>"),
            (Case(f"<do>{python}</do>", calls=TWO), Case(f"Yes. <do>{listed}</do>", answer="Yes.", calls=TWO)),
            calls="python_calls",
        ),
        Family(
            "markers named after calls",
            telling("\\nPut calls in Python between <|tool_calls_begin|> and <|tool_calls_end|>."),
            ("<|tool_calls_begin|>", "<|tool_calls_end|>"),
            (Case(f"<|tool_calls_begin|>{python}<|tool_calls_end|>", calls=TWO),),
            calls="python_calls",
        ),
        Family(
            "an example of a list of JSON calls",
            telling('\\nAnswer with <|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|> to call one.'),
            ("<|tool_call|>", "<|/tool_call|>"),
            (Case(f"Well <|tool_call|>{listed}<|/tool_call|>", answer="Well", calls=TWO),),
            calls="json_calls",
        ),
    ]


def _openings_of_thoughts() -> list[Family]:
    """Generation prompts that write line breaks or a first line of the thought."""
    field: dict[str, Any] = {"reasoning": "reasoning_content"}
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    only_on = thought("<think>\\n", "\\n</think>\\n\\n", "<think>\\n\\n</think>\\n\\n")
    only_on = f"{{%- if enable_thinking is true %}}{only_on}{{%- endif %}}"
    on = "{%- if enable_thinking is true %}{{- '<think>\\n' }}{%- endif %}"
    return [
        Family(
            "a first line, closed by a tag",
            framed(_JSON_CALLS, thought("", "\\n[ANSWER]\\n"), "{{- 'Here is how I see it:\\n' }}"),
            ("[ANSWER]", "<tool_call>", "</tool_call>"),
            (
                Case("so\n[ANSWER]\nHello", "Here is how I see it:\nso", "Hello"),
                Case(f"so\n[ANSWER]\n{_TAGGED}", "Here is how I see it:\nso", calls=TWO),
            ),
            calls="json_calls",
            **field,
        ),
        Family(
            "a first line, closed by words",
            framed(thought=thought("", "\\n=== FINAL ANSWER ===\\n"), opening="{{- 'Reasoning: ' }}"),
            (),
            (Case("so\n=== FINAL ANSWER ===\nHello == you", "Reasoning: so", "Hello == you"),),
            **field,
        ),
        Family(
            "line breaks after the opening marker",
            framed(
                _JSON_CALLS,
                thought("<think>\\n\\n", "\\n\\n</think>\\n\\n", "<think>\\n\\n</think>\\n\\n"),
                "{{- '<think>\\n\\n' }}",
            ),
            tags,
            (Case("hm\n\n</think>\n\nHello", "hm", "Hello"), Case("</think>\n\nHello", answer="Hello")),
            calls="json_calls",
            **field,
        ),
        Family(
            "thinking that is rendered only if it is switched on",
            framed(_JSON_CALLS, only_on, on),
            tags,
            (
                Case("hm\n</think>\n\nHello", "hm", "Hello", thinks=True),
                Case("\n</think>\n\nHello", answer="Hello", thinks=True),
                Case("Hello", answer="Hello"),
            ),
            calls="json_calls",
            switch="enable_thinking",
            **field,
        ),
    ]


def _tags_with_prefixes() -> list[Family]:
    """Calls with a text of its own before every tag, and arguments as elements."""
    elements = """\
{%- macro value(v) -%}
{%- if v is mapping -%}
{%- for k, x in v.items() -%}{{ 'P<' + k + '>' }}{{ value(x) }}{{ 'P</' + k + '>' }}{%- endfor -%}
{%- elif v is string -%}{{ v }}
{%- elif v is iterable -%}{%- for x in v -%}{{ 'P<ITEM>' }}{{ value(x) }}{{ 'P</ITEM>' }}{%- endfor -%}
{%- else -%}{{ v | tojson }}
{%- endif -%}
{%- endmacro -%}
"""
    calls = """\
{{- 'P<calls>\\n' }}
{%- for c in m.tool_calls %}
{{- 'P<invoke name="' + c.function.name + '">' }}
{%- for k, v in c.function.arguments.items() %}
{{- 'P<' + k + '>' }}{{- value(v) }}{{- 'P</' + k + '>' }}
{%- endfor %}{{- 'P</invoke>\\n' }}
{%- endfor %}{{- 'P</calls>' }}"""
    attributes = """\
{{- 'P<calls>\\n' }}
{%- for c in m.tool_calls %}
{{- 'P<call name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- 'P<value key="' + k + '">' + (v if v is string else v | tojson) + 'P</value>\\n' }}
{%- endfor %}{{- 'P</call>\\n' }}
{%- endfor %}{{- 'P</calls>' }}"""
    reply = (
        'P<calls>\nP<invoke name="look_up">P<word>treeP</word>P<times>2P</times>P</invoke>\n'
        'P<invoke name="now">P</invoke>\nP</calls>'
    )
    listed = (
        'P<calls>\nP<invoke name="sort">P<all>P<ITEM>aP</ITEM>P<ITEM>P<b>1P</b>P<c>]P</c>P</ITEM>P</all>P</invoke>\n'
        "P</calls>"
    )
    sorted_ = (("sort", {"all": ["a", {"b": 1, "c": "]"}]}),)
    keyed = 'P<calls>\nP<call name="look_up">\nP<value key="word">a ] b ]P</value>\nP</call>\nP</calls>'
    families = []
    for name, prefix, item, tokens in (
        ("brackets", "]<]own[>[", "item", ("]<]own[>[",)),
        ("a control token", "<|tag|>", "li", ("<|tag|>",)),
        ("signs", "@:", "entry", ()),
    ):

        def put(text: str, prefix: str = prefix, item: str = item) -> str:
            return text.replace("P<", f"{prefix}<").replace("ITEM", item)

        families.append(
            Family(
                f"elements with a prefix, {name}",
                put(elements) + framed(put(calls), thought("<think>", "</think>")),
                tokens,
                (
                    Case(put(reply), calls=TWO),
                    Case(f"So ] {put(reply)}", answer="So ]", calls=TWO),
                    Case(f"<think>hm</think>{put(listed)}", "hm", calls=sorted_),
                ),
                calls="elements",
                reasoning="reasoning_content",
            )
        )
        families.append(
            Family(
                f"named values with a prefix, {name}",
                framed(put(attributes)),
                tokens,
                (Case(put(keyed), calls=(("look_up", {"word": "a ] b ]"}),)),),
                calls="parameters",
            )
        )
    return families


_SECTIONS = """\
{%- macro section(name, text, more='') -%}
{{ 'OPEN' + name + more + 'END' + text + 'CLOSE' + name + 'END' }}{%- endmacro -%}
{%- if tools %}{{- section('message', 'Tools: ' + tools | tojson, ' role="system"') }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- 'OPENmessage role="assistant"END' }}
{%- if m.reasoning_content or ALWAYS %}{{- section('THINK', m.reasoning_content or '') }}{%- endif %}
{{- section('ANSWER', m.content or '') }}
{%- if m.tool_calls %}{{- 'OPENTOOLSEND' }}
CALLS
{{- 'CLOSETOOLSEND' }}{%- endif %}
{{- 'CLOSEmessageEND' }}
{%- else %}{{- section('message', m.content, ' role="' + m.role + '"') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'OPENmessage role="assistant"END' + PROMPT }}{%- endif %}"""
_TYPED_SECTIONS = """\
{%- for c in m.tool_calls %}
{{- 'OPENcall tool="' + c.function.name + '" index="' + loop.index | string + '"END' }}
{%- for k, v in c.function.arguments.items() %}
{{- 'OPENargument key="' + k + '" type="' + ('string' if v is string else 'boolean' if v is boolean else 'number') }}
{{- '"END' + (v if v is string else v | tojson) + 'CLOSEargumentEND' }}
{%- endfor %}{{- 'CLOSEcallEND' }}
{%- endfor %}"""
_PLAIN_SECTIONS = """\
{%- for c in m.tool_calls %}
{{- section('call', '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}') }}
{%- endfor %}"""


def _named_sections() -> list[Family]:
    typed = (
        'OPENTOOLSENDOPENcall tool="look_up" index="1"ENDOPENargument key="word" type="string"ENDtreeCLOSEargumentEND'
        'OPENargument key="times" type="number"END2CLOSEargumentENDCLOSEcallEND'
        'OPENcall tool="now" index="2"ENDCLOSEcallENDCLOSETOOLSEND'
    )
    flagged = 'OPENTOOLSENDOPENcall tool="now" index="1"ENDOPENargument key="utc" type="boolean"ENDtrueCLOSEargumentEND'
    flagged += "CLOSEcallENDCLOSETOOLSEND"
    plain = (
        f'OPENTOOLSENDOPENcallEND{{"name": "look_up", "arguments": {_ARGUMENTS}}}CLOSEcallEND'
        'OPENcallEND{"name": "now", "arguments": {}}CLOSEcallENDCLOSETOOLSEND'
    )
    opened, free = "('OPENTHINKEND' if enable_thinking is not false else 'OPENANSWEREND')", "''"
    families = []
    for name, marks, words, calls, prompt in (
        (
            "typed arguments",
            ("<|open|>", "<|close|>", "<|sep|>"),
            ("think", "response", "tools"),
            _TYPED_SECTIONS,
            opened,
        ),
        ("JSON calls", ("<|begin|>", "<|finish|>", "<|of|>"), ("reasoning", "final", "calls"), _PLAIN_SECTIONS, free),
        ("short tokens", ("<|+|>", "<|-|>", "<|:|>"), ("thought", "answer", "actions"), _TYPED_SECTIONS, free),
        ("tags as tokens", ("<part>", "</part>", "<body>"), ("inner", "outer", "do"), _PLAIN_SECTIONS, opened),
        (
            "line breaks",
            ("<|sec|>", "<|/sec|>", "<|in|>\\n"),
            ("deliberation", "reply", "requests"),
            _PLAIN_SECTIONS,
            opened,
        ),
    ):

        def put(
            text: str,
            marks: tuple[str, str, str] = marks,
            words: tuple[str, str, str] = words,
            calls: str = calls,
            prompt: str = prompt,
        ) -> str:
            text = text.replace("CALLS", calls).replace("PROMPT", prompt).replace("ALWAYS", str(prompt != free).lower())
            for mark, value in zip(("OPEN", "CLOSE", "END", "THINK", "ANSWER", "TOOLS"), (*marks, *words), strict=True):
                text = text.replace(mark, value)
            return text

        begins = prompt != free
        thinks = put(("" if begins else "OPENTHINKEND") + "hmCLOSETHINKEND")
        answer, end = put("OPENANSWERENDHelloCLOSEANSWEREND"), put("CLOSEmessageEND")
        called = put(typed if calls == _TYPED_SECTIONS else plain)
        cases = [
            Case(thinks + answer + end, "hm", "Hello"),
            Case(answer + end, answer="Hello"),
            Case(thinks + put("OPENANSWERENDCLOSEANSWEREND") + called + end, "hm", calls=TWO),
            Case(thinks + answer + called + end, "hm", "Hello", TWO),
        ]
        if calls == _TYPED_SECTIONS:
            cases.append(Case(answer + put(flagged), answer="Hello", calls=(("now", {"utc": True}),)))
        families.append(
            Family(
                f"named sections, {name}",
                put(_SECTIONS),
                tuple(mark.removesuffix("\\n") for mark in marks),
                tuple(replace(case, text=case.text.replace("\\n", "\n")) for case in cases),
                calls="parameters" if calls == _TYPED_SECTIONS else "json_calls",
                reasoning="reasoning_content",
                switch="enable_thinking" if begins else None,
                turns=(),
            )
        )
    return families


_ADDRESSED = """\
{%- if tools %}{{- '<|start|>systemMESSAGETools: ' + tools | tojson + '<|end|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{- '<|start|>assistantTHINKMESSAGE' + m.reasoning_content + '<|next|>' }}{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|start|>assistantTO' + c.function.name + 'MESSAGE' }}
CALL
{{- '<|end|>' if loop.last else '<|next|>' }}
{%- else %}{{- '<|start|>assistantUSERMESSAGE' + m.content + '<|end|>' }}
{%- endfor %}
{%- else %}{{- '<|start|>' + m.role + 'MESSAGE' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def _recipients() -> list[Family]:
    tagged = """\
{{- '<x:calls>\\n<x:invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<x:value name="' + k + '">' + (v if v is string else v | tojson) + '</x:value>\\n' }}
{%- endfor %}{{- '</x:invoke>\\n</x:calls>' }}"""
    named = """\
{{- '<call>{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}</call>' }}"""
    written = {
        tagged: (
            '<x:calls>\n<x:invoke name="look_up">\n<x:value name="word">tree</x:value>\n'
            '<x:value name="times">2</x:value>\n</x:invoke>\n</x:calls>',
            '<x:calls>\n<x:invoke name="now">\n</x:invoke>\n</x:calls>',
        ),
        named: (
            f'<call>{{"name": "look_up", "arguments": {_ARGUMENTS}}}</call>',
            '<call>{"name": "now", "arguments": {}}</call>',
        ),
    }
    families = []
    for name, words, message, call, syntax in (
        ("tags", (" to=self", " to=user", " to="), "<|message|>", tagged, "parameters"),
        ("JSON in tags", (" @me", " @you", " @"), "<|body|>", named, "json_calls"),
        ("after an arrow", ("->self", "->human", "->"), "<|text|>", tagged, "parameters"),
    ):

        def put(text: str, words: tuple[str, str, str] = words, message: str = message, call: str = call) -> str:
            for mark, value in zip(("THINK", "USER", "TO"), words, strict=True):
                text = text.replace(mark, value)
            return text.replace("MESSAGE", message).replace("CALL", call)

        thinks = put("THINKMESSAGEhm<|next|><|start|>assistant")
        first, second = written[call]
        families.append(
            Family(
                f"recipients, {name}",
                put(_ADDRESSED),
                ("<x:calls>", "</x:calls>", "<call>", "</call>"),
                (
                    Case(put("USERMESSAGEHello<|end|>"), answer="Hello"),
                    Case(thinks + put("USERMESSAGEHello<|end|>"), "hm", "Hello"),
                    Case(put(f"USERMESSAGESay {first}<|end|>"), answer=f"Say {first}"),
                    Case(
                        put("TOlook_upMESSAGE")
                        + first
                        + put("<|next|><|start|>assistantTOnowMESSAGE")
                        + second
                        + "<|end|>",
                        calls=TWO,
                    ),
                    Case(thinks + put("TOlook_upMESSAGE") + first + "<|end|>", "hm", calls=ONE),
                ),
                calls=syntax,
                reasoning="reasoning_content",
                turns=("<|start|>", "<|end|>", "<|next|>", message),
            )
        )
    return families


_FRAMED_TEXT = """\
{{- bos_token }}
{%- if tools %}{{- '<|system|>Tools: ' + tools | tojson + '<|done|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|bot|>' }}
{%- if m.reasoning_content %}{{- 'THINK' + m.reasoning_content + '/KNIHT' }}{%- endif %}
{%- if m.content %}{{- 'TEXT' + m.content + '/TXET' }}{%- endif %}
{%- if m.tool_calls %}{{- 'CALLS[' }}
{%- for c in m.tool_calls %}
{{- '{"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + c.function.name + '", "parameters": ' }}
{{- c.function.arguments | tojson + '}' }}{{- '' if loop.last else ', ' }}
{%- endfor %}{{- ']/SLLAC' }}
{%- endif %}
{{- '<|done|>' }}
{%- else %}{{- '<|user|>' + m.content + '<|done|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>PROMPT' }}{%- endif %}"""


def text_in_section(name: str, marks: tuple[str, ...], prompt: str = "") -> Family:
    """Thoughts, answers and calls in sections; an answer without text has none."""

    def put(text: str) -> str:
        text = text.replace("PROMPT", prompt)
        for mark, value in zip(("THINK", "/KNIHT", "TEXT", "/TXET", "/SLLAC", "CALLS"), marks, strict=True):
            text = text.replace(mark, value)
        return text

    def said(text: str) -> str:
        return put(text).replace("\\n", "\n").removeprefix(prompt)

    calls = (
        f'CALLS[{{"tool_call_id": "0", "tool_name": "look_up", "parameters": {_ARGUMENTS}}}, '
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]/SLLAC'
    )
    return Family(
        f"text in a section, {name}",
        put(_FRAMED_TEXT),
        tuple(mark.replace("\\n", "") for mark in marks),
        (
            Case(said("THINKhm/KNIHTTEXTHello/TXET"), "hm", "Hello"),
            Case(said(f"THINKhm/KNIHT{calls}"), "hm", calls=TWO),
            Case(said(f"THINKhm/KNIHTTEXTHello/TXET{calls}"), "hm", "Hello", TWO),
        ),
        calls="json_calls",
        reasoning="reasoning_content",
    )


def _text_in_sections() -> list[Family]:
    tokens = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|END_ACTION|>")
    short = ("<|think>", "<think|>", "<|say>", "<say|>", "<act|>", "<|act>")
    lines = ("<reason>\\n", "\\n</reason>\\n", "<text>\\n", "\\n</text>\\n", "\\n</act>", "<act>\\n")
    brackets = ("[REFLECT]", "[/REFLECT]\\n", "[SAY]", "[/SAY]\\n", "\\n[/DO]", "[DO]\\n")
    return [
        text_in_section("tokens", (*tokens, "<|START_ACTION|>")),
        text_in_section("opened by the prompt", short, "<|think>"),
        text_in_section("line breaks", lines),
        text_in_section("square brackets", brackets),
    ]


_PYTHON_VALUE = """\
{%- macro value(v) -%}
{%- if v is string -%}{{ "QUOTE" + v + "QUOTE" }}
{%- elif v is mapping or v is iterable -%}{{ NESTED }}
{%- else -%}{{ PLAIN }}{%- endif -%}
{%- endmacro -%}
"""
_PYTHON_CALLS = """\
{{- '<|calls|>[' }}
{%- for c in m.tool_calls %}
{{- c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}
{{- k + '=' }}{{- value(v) }}{{- '' if loop.last else ', ' }}
{%- endfor %}
{{- ')' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']<|/calls|>' }}"""
PYTHON_ARGUMENTS = {"word": "it", "all": ["a", {"b": True}], "flag": True, "none": None, "times": 2}


def _python_quotes() -> list[Family]:
    """Python calls whose strings, lists and constants are written in several ways."""
    families = []
    for name, quote, nested, plain, reply in (
        ("JSON inside", "'", "v | tojson", "v", """word='it', all=["a", {"b": true}], flag=True, none=None"""),
        ("Python inside", '\\"', "v | string", "v", """word="it", all=['a', {'b': True}], flag=True, none=None"""),
        (
            "JSON everywhere",
            '\\"',
            "v | tojson",
            "v | tojson",
            """word="it", all=["a", {"b": true}], flag=true, none=null""",
        ),
        (
            "JSON constants",
            "'",
            "v | string",
            "v | tojson",
            """word='it', all=['a', {'b': True}], flag=true, none=null""",
        ),
    ):
        value = _PYTHON_VALUE.replace("QUOTE", quote).replace("NESTED", nested).replace("PLAIN", plain)
        families.append(
            Family(
                f"Python calls, {name}",
                value + framed(_PYTHON_CALLS),
                ("<|calls|>", "<|/calls|>"),
                (Case(f"<|calls|>[look_up({reply}, times=2)]<|/calls|>", calls=(("look_up", PYTHON_ARGUMENTS),)),),
                calls="python_calls",
            )
        )
    return families


_BESIDE_CALLS = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|bot|>' }}
{%- if m.tool_calls %}{{- 'OPEN' + m.content + 'CLOSE' }}
CALLS
{%- else %}{{- m.content }}{%- endif %}
{{- '<|done|>' }}
{%- else %}{{- '<|user|>' + m.content + (tools | tojson if tools else '') + '<|done|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>' }}{%- endif %}"""
_BARE_CALLS = """\
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "parameters": ' + c.function.arguments | tojson + '}' }}
{%- endfor %}"""


def _text_beside_calls() -> list[Family]:
    """An answer stands in a frame only if calls follow it."""
    bare = f'{{"name": "look_up", "parameters": {_ARGUMENTS}}}{{"name": "now", "parameters": {{}}}}'
    families = []
    for name, marks, calls, reply, syntax in (
        ("bare JSON", ("<|python_start|>", "<|python_end|>"), _BARE_CALLS, bare, "json_calls"),
        ("JSON in tags", ("<comment>", "</comment>"), _JSON_CALLS, f"\n{_TAGGED}", "json_calls"),
        ("control tokens", ("<|note|>\n", "\n<|/note|>\n"), _SPECIAL_CALLS, _SPECIAL, "named_json"),
        ("tags before tokens", ("<prelude>", "</prelude>\n"), _SPECIAL_CALLS, _SPECIAL, "named_json"),
    ):
        opening, closing = marks
        source = _BESIDE_CALLS.replace("OPEN", opening.replace("\n", "\\n")).replace(
            "CLOSE", closing.replace("\n", "\\n")
        )
        markers = ("<|calls|>", "<|call|>", "<|args|>", "<|/calls|>", "<tool_call>", "</tool_call>")
        families.append(
            Family(
                f"text beside calls, {name}",
                source.replace("CALLS", calls),
                (opening.strip(), closing.strip(), *markers),
                (
                    Case("Hello", answer="Hello"),
                    Case(f"{opening}{closing}{reply}", calls=TWO),
                    Case(f"{opening}Hello{closing}{reply}", answer="Hello", calls=TWO),
                ),
                calls=syntax,
            )
        )
    return families


_MESSAGE_KINDS = """\
{%- if tools %}{{- 'BEGINsystemTEXTTools: ' + tools | tojson + 'END' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{- 'BEGINassistantTHINK' + m.reasoning_content + 'END' }}{%- endif %}
{%- if m.content %}{{- 'BEGINassistantTEXT' + m.content + 'END' }}{%- endif %}
{%- if m.tool_calls %}{{- 'BEGINassistantCALLS' }}
{%- for c in m.tool_calls %}
{{- '<|call:begin|>' + c.function.name + '<|call:args|>' + c.function.arguments | tojson + '<|call:end|>' }}
{%- endfor %}{{- '<|stop|>' }}{%- endif %}
{%- else %}{{- 'BEGIN' + m.role + 'TEXT' + m.content + 'END' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'BEGINassistant' }}PROMPT{%- endif %}"""


def _message_kinds() -> list[Family]:
    """Thought, answer and calls are messages; a marker after the header names the kind."""
    off = "{%- if enable_thinking is false %}{{- 'THINKENDBEGINassistant' }}{%- endif %}"
    on = "{%- if enable_thinking %}{{- 'THINK' }}{%- endif %}"
    families = []
    for name, marks, prompt in (
        ("free", ("<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|tool_calls|>"), ""),
        ("thinking off", ("<|begin|>", "<|end|>", "<|reason|>", "<|say|>", "<|do|>"), off),
        ("line breaks", ("<|im|>", "<|/im|>\\n", "<|inner|>\\n", "<|outer|>\\n", "<|calls|>\\n"), ""),
        ("after a colon", ("<|turn|>", "<|eot|>\\n", ":<|private|>\\n", ":<|public|>\\n", ":<|tools|>\\n"), ""),
        ("two tokens", ("<|m|>", "<|/m|>", "<|as|><|plan|>", "<|as|><|text|>", "<|as|><|code|>"), on),
    ):

        def put(text: str, marks: tuple[str, ...] = marks, prompt: str = prompt) -> str:
            text = text.replace("PROMPT", prompt)
            for mark, value in zip(("BEGIN", "END", "THINK", "TEXT", "CALLS"), marks, strict=True):
                text = text.replace(mark, value)
            return text

        def said(text: str, marks: tuple[str, ...] = marks) -> str:
            return put(text, marks).replace("\\n", "\n")

        calls = (
            f"CALLS<|call:begin|>look_up<|call:args|>{_ARGUMENTS}<|call:end|>"
            "<|call:begin|>now<|call:args|>{}<|call:end|><|stop|>"
        )
        cases = [
            Case(said("TEXTHelloEND"), answer="Hello"),
            Case(said("THINKhmENDBEGINassistantTEXTHelloEND"), "hm", "Hello"),
            Case(said(calls), calls=TWO),
            Case(said(f"THINKhmENDBEGINassistant{calls}"), "hm", calls=TWO),
            Case(said(f"THINKhmENDBEGINassistantTEXTHelloENDBEGINassistant{calls}"), "hm", "Hello", TWO),
        ]
        if prompt == on:
            cases.append(Case(said("hmENDBEGINassistantTEXTHelloEND"), "hm", "Hello", thinks=True))
        families.append(
            Family(
                f"kinds of messages, {name}",
                put(_MESSAGE_KINDS),
                ("<|call:begin|>", "<|call:args|>", "<|call:end|>"),
                tuple(cases),
                calls="named_json",
                reasoning="reasoning_content",
                turns=(*(mark for text in marks for mark in re.findall(r"<[^>]*>", text)), "<|stop|>"),
            )
        )
    return families


def _later() -> list[Family]:
    """Written after all rules, for the habits whose last template was not."""
    call = """\
{{- '<use tool="' + c.function.name + '">' }}
{%- for k, x in c.function.arguments.items() %}
{{- '<with key="' + k + '">' + (x if x is string else x | tojson) + '</with>' }}
{%- endfor %}{{- '</use>' }}"""
    addressed = _ADDRESSED
    words = {"THINK": " for:thoughts", "USER": " for:reader", "TO": " for:", "MESSAGE": "<|says|>", "CALL": call}
    for mark, value in words.items():
        addressed = addressed.replace(mark, value)
    example = '<function_call>{"name": ..., "arguments": ...}</function_call>'
    bracketed = _SPECIAL_CALLS.replace("<|calls|>", "[CALLS]").replace("<|/calls|>", "[/CALLS]")
    calls = _SPECIAL.replace("<|calls|>", "[CALLS]").replace("<|/calls|>", "[/CALLS]")
    one = f'<function_call>{{"name": "look_up", "arguments": {_ARGUMENTS}}}</function_call>'
    used = '<use tool="look_up"><with key="word">tree</with><with key="times">2</with></use>'
    prefixed = """\
{%- for c in m.tool_calls %}
{{- '\\n%%<fn name="' + c.function.name + '">' }}
{%- for k, v in c.function.arguments.items() %}
{{- '%%<arg name="' + k + '">' + (v if v is string else v | tojson) + '%%</arg>' }}
{%- endfor %}{{- '%%</fn>' }}
{%- endfor %}"""
    look_up = '%%<fn name="look_up">%%<arg name="word">tree%%</arg>%%<arg name="times">2%%</arg>%%</fn>'
    indented = thought("<|reason|>\\n\\n  ", "\\n\\n<|/reason|>\\n", "<|reason|>\\n\\n<|/reason|>\\n")
    one_line = thought("<reflect> ", " </reflect>\\n\\n", "<reflect> </reflect>\\n\\n")
    return [
        Family(
            "recipients, in other words",
            addressed,
            (),
            (
                Case(" for:thoughts<|says|>hm<|next|><|start|>assistant for:reader<|says|>Hello<|end|>", "hm", "Hello"),
                Case(f" for:look_up<|says|>{used}<|end|>", calls=ONE),
            ),
            calls="parameters",
            reasoning="reasoning_content",
            turns=("<|start|>", "<|end|>", "<|next|>", "<|says|>"),
        ),
        Family(
            "an example of a function call",
            framed("{{- '' }}").replace("+ tools | tojson", f"+ tools | tojson + '\\nEmit JSON: {example}'"),
            ("<function_call>", "</function_call>"),
            (Case(f"Ok {one}", answer="Ok", calls=ONE),),
            calls="json_calls",
        ),
        Family(
            "calls in square brackets count in a thought",
            framed(bracketed, thought("<think>", "</think>")),
            ("<think>", "</think>", "[CALLS]", "[/CALLS]", "<|call|>", "<|args|>"),
            (Case(f"<think>a{calls}", "a", calls=TWO),),
            calls="named_json",
            reasoning="reasoning_content",
        ),
        Family(
            "named values with a prefix, no section",
            framed(prefixed, thought("<think>", "</think>")),
            (),
            (
                Case(f'\n{look_up}\n%%<fn name="now">%%</fn>', calls=TWO),
                Case(f"100% sure.\n{look_up}", answer="100% sure.", calls=ONE),
                Case(f"<think>50%% or so</think>\n{look_up}", "50%% or so", calls=ONE),
            ),
            calls="parameters",
            reasoning="reasoning_content",
        ),
        Family(
            "an indented opening, closed on its own line",
            framed(_JSON_CALLS, indented, "{{- '<|reason|>\\n\\n' }}"),
            ("<|reason|>", "<|/reason|>", "<tool_call>", "</tool_call>"),
            (
                Case("  hm\n\n<|/reason|>\nHello", "  hm", "Hello"),
                Case("<|/reason|>\nHello", answer="Hello"),
                Case(f"hm\n\n<|/reason|>\n{_TAGGED}", "hm", calls=TWO),
            ),
            calls="json_calls",
            reasoning="reasoning_content",
        ),
        Family(
            "an opening on one line",
            framed(_JSON_CALLS, one_line, "{{- '<reflect> ' }}"),
            ("<reflect>", "</reflect>", "<tool_call>", "</tool_call>"),
            (
                Case("hm </reflect>\n\nHello", "hm", "Hello"),
                Case("</reflect>\n\nHello", answer="Hello"),
                Case(f"hm </reflect>\n\n{_TAGGED}", "hm", calls=TWO),
            ),
            calls="json_calls",
            reasoning="reasoning_content",
        ),
        Family(
            "a first line in words, closed by a control token",
            framed(thought=thought("", "<|final|>"), opening="{{- 'Thinking aloud: ' }}"),
            ("<|final|>",),
            (Case("so<|final|>Hello", "Thinking aloud: so", "Hello"),),
            reasoning="reasoning_content",
        ),
    ]


VARIATIONS = {
    family.name: family
    for family in (
        *_unpaired_markers(),
        *_calls_in_thoughts(),
        *_described_calls(),
        *_openings_of_thoughts(),
        *_tags_with_prefixes(),
        *_named_sections(),
        *_recipients(),
        *_text_in_sections(),
        *_python_quotes(),
        *_text_beside_calls(),
        *_message_kinds(),
        *_later(),
    )
}
