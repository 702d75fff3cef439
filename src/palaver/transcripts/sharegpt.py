"""ShareGPT: `{"conversations": [{"from": "human", "value": "..."}]}`, as many training programs read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from palaver.messages import (
    Audio,
    Image,
    Message,
    Part,
    Role,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Video,
    assistant,
    system,
    user,
)
from palaver.store.messages import prompt_messages
from palaver.transcripts.jsonl import json_line
from palaver.transcripts.transcript import ReadResult, SkippedConversation, Transcript, linear

_THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)
_USERS = ("human", "user", "prompter")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot")


def write(transcript: Transcript) -> str:
    """The head's branch. Thinking is written into the value, the only place there is."""
    messages = prompt_messages(transcript.system, (entry.message for entry in transcript.main()))
    turns = [turn for message in messages for turn in _turns(message)]
    return json_line({"title": transcript.title, "conversations": turns})


def recognised(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("conversations"), list)


def read_line(value: Mapping[str, Any]) -> ReadResult:
    messages, skipped = [], []
    if isinstance(value.get("system"), str) and value["system"]:
        messages.append(system(value["system"]))
    for number, turn in enumerate(value["conversations"], 1):
        try:
            messages.append(_message(turn))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(SkippedConversation(f"turn {number}", str(error)))
    return ReadResult((linear(messages, title=str(value.get("title") or "")),), tuple(skipped))


def _turns(message: Message) -> Iterator[dict[str, str]]:
    match message.role:
        case Role.SYSTEM:
            yield {"from": "system", "value": message.text}
        case Role.USER:
            yield {"from": "human", "value": "".join(map(_text, message.parts))}
        case Role.TOOL:
            for result in message.tool_results:
                yield {"from": "observation", "value": result.content}
        case Role.ASSISTANT:
            thought = f"<think>\n{message.thinking}\n</think>\n\n" if message.thinking else ""
            if thought or message.text or not message.tool_calls:
                yield {"from": "gpt", "value": thought + message.text}
            for call in message.tool_calls:
                yield {"from": "function_call", "value": _call(call)}


def _text(part: Part) -> str:
    """Media can't be written here; what was there is named."""
    match part:
        case Text(text):
            return text
        case Image(media_type, data) | Audio(media_type, data) | Video(media_type, data):
            return f"({media_type}, {len(data)} bytes)\n"
        case _:
            return ""


def _call(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)


def _message(turn: Mapping[str, Any]) -> Message:
    who, value = str(turn.get("from") or turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(value, str):
        raise ValueError("it has no text")
    if who in _USERS:
        return user(value)
    if who in _ASSISTANTS:
        return _reply(value)
    if who == "system":
        return system(value)
    if who in ("observation", "tool", "function_response"):
        return Message(Role.TOOL, (ToolResult("", value),))
    if who == "function_call":
        call = json.loads(value)
        return assistant(calls=(ToolCall("", str(call["name"]), json.dumps(call.get("arguments", {}))),))
    raise ValueError(f"the speaker {who!r} is not known")


def _reply(value: str) -> Message:
    if found := _THOUGHT.fullmatch(value):
        return Message(Role.ASSISTANT, (Thinking(found[1]), Text(found[2])) if found[2] else (Thinking(found[1]),))
    return Message(Role.ASSISTANT, (Text(value),))
