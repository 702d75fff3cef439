"""The shipped chat template again, as plain Python: rendering millions of samples through Jinja takes too long.

A test proves that both give the same text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from training.conversations import Call, Json, Message, Sample

TERMINAL = "The user is at a terminal."
TOOLS_OPENING = "# Tools\n\nThese functions can be called to help with the request:\n<tools>\n"
TOOLS_CLOSING = (
    "\n</tools>\n\nTo call one, write its name and its arguments as JSON between tags, once for each call:\n"
    '<tool_call>\n{"name": "function name", "arguments": {"parameter": "value"}}\n</tool_call>'
)
REPLY_OPENING = "<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
END = "<|im_end|>"


def render(sample: Sample) -> tuple[str, str]:
    """The prompt as the model reads it, and the reply it is to write, up to and with its end token."""
    *history, reply = sample.messages
    prompt = render_prompt(history, sample.tools, sample.thinks, sample.terminal)
    thought = f"<think>\n{reply.thinking}\n</think>\n\n" if sample.thinks else ""
    return prompt, thought + _said(reply) + END


def render_prompt(messages: Sequence[Message], tools: Sequence[Json], thinks: bool, terminal: bool = False) -> str:
    opening = _system(messages, tools, terminal)
    last_question = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    turns = [
        _turn(messages, at, current=at > last_question)
        for at in range(1 if messages and messages[0].role == "system" else 0, len(messages))
    ]
    return opening + "".join(turns) + REPLY_OPENING + ("" if thinks else NO_THOUGHT)


def _system(messages: Sequence[Message], tools: Sequence[Json], terminal: bool) -> str:
    has_system = bool(messages) and messages[0].role == "system"
    if not (has_system or tools or terminal):
        return ""
    parts = [TERMINAL] if terminal else []
    if has_system and messages[0].content:
        parts.append(messages[0].content)
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(TOOLS_OPENING + listed + TOOLS_CLOSING)
    text = "\n\n".join(parts)
    return f"<|im_start|>system\n{text}{END}\n"


def _turn(messages: Sequence[Message], at: int, current: bool) -> str:
    message = messages[at]
    if message.role == "assistant":
        thought = f"<think>\n{message.thinking}\n</think>\n\n" if current else ""
        return REPLY_OPENING + thought + _said(message) + END + "\n"
    if message.role == "tool":
        return _tool_turn(messages, at)
    return f"<|im_start|>{message.role}\n{message.content}{END}\n"


def _tool_turn(messages: Sequence[Message], at: int) -> str:
    first = at == 0 or messages[at - 1].role != "tool"
    last = at + 1 == len(messages) or messages[at + 1].role != "tool"
    body = f"\n<tool_response>\n{messages[at].content}\n</tool_response>"
    return ("<|im_start|>user" if first else "") + body + (END + "\n" if last else "")


def _said(message: Message) -> str:
    return "\n".join(([message.content] if message.content else []) + [_call(call) for call in message.calls])


def _call(call: Call) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
