"""Hostile contents that spell control tokens, and a conversation with such contents in every place."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from palaver.formats.format import TemplateFormat
from palaver.messages import Message, Role, Text, Thinking, Tool, ToolCall, ToolResult

COUNT = int(os.environ.get("CONTENTS", "80"))
"""Contents that are tried in each format. CONTENTS=1000 takes minutes."""
_GLUE = (
    "",
    " ",
    "\n",
    "x",
    "\n\n",
    "é",
    "'",
    '"',
    "}",
    "user",
    "assistant",
    "tool",
    "system",
    "\\n",
    "🙂",
    "\ue000",
    "{{ 1 }}",
)


def contents(control: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Control strings, parts of them that may join at a boundary, and several in a row."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        pieces = []
        for _ in range(rng.randint(1, 5)):
            text = rng.choice(control)
            at = rng.randint(0, len(text))
            pieces += [rng.choice((text, text, text[:at], text[at:], text + text)), rng.choice(_GLUE)]
        out.append("".join(pieces))
    return out


def conversation(texts: Sequence[str], calls: bool, system: bool) -> tuple[list[Message], list[Tool]]:
    """A history with a text in every place that a client or a tool can write to; it uses nine texts."""
    a, b, c, d, e, f, g, h, i = (f"a{text}z" if text[:1].isspace() or not text.strip() else text for text in texts[:9])
    first = [Message(Role.SYSTEM, (Text(a),))] if system else []
    if not calls:
        reply = Message(Role.ASSISTANT, (Thinking(d), Text(c)))
        return [*first, Message(Role.USER, (Text(b),)), reply, Message(Role.USER, (Text(e),))], []
    import json

    call = ToolCall("callid001", f, json.dumps({g: h, "n": 1}))
    schema = {"type": "object", "properties": {g: {"type": "string", "description": i}}}
    messages = [
        *first,
        Message(Role.USER, (Text(b),)),
        Message(Role.ASSISTANT, (Thinking(d), call)),
        Message(Role.TOOL, (ToolResult("callid001", e, f),)),
        Message(Role.ASSISTANT, (Text(c),)),
        Message(Role.USER, (Text(b),)),
    ]
    return messages, [Tool(f, i, schema)]


def control_ids(format: TemplateFormat, texts: Sequence[str], calls: bool, system: bool) -> list[int]:
    messages, tools = conversation(texts, calls, system)
    control = set(format.tokenizer.control.values())
    return [i for i in format.render(messages, tools).context_ids if i in control]
