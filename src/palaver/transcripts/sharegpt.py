"""ShareGPT: `{"conversations": [{"from": "human", "value": "..."}]}`, which many training programs read."""

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
from palaver.transcripts.transcript import ReadResult, SkippedConversation, Transcript, linear_transcript

_THINKING = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)
_USERS = ("human", "user", "prompter")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot")


def write(transcript: Transcript) -> str:
    """Writes the main branch. Thinking is written into the value: the format has no other place for it."""
    messages = prompt_messages(transcript.system, (entry.message for entry in transcript.main_branch()))
    turns = [turn for message in messages for turn in _turns(message)]
    return json_line({"title": transcript.title, "conversations": turns})


def matches(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("conversations"), list)


def parse(value: Mapping[str, Any]) -> ReadResult:
    messages, skipped = [], []
    if isinstance(value.get("system"), str) and value["system"]:
        messages.append(system(value["system"]))
    for number, turn in enumerate(value["conversations"], 1):
        try:
            messages.append(_message(turn))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(SkippedConversation(f"turn {number}", str(error)))
    return ReadResult((linear_transcript(messages, title=str(value.get("title") or "")),), tuple(skipped))


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
            thinking = f"<think>\n{message.thinking}\n</think>\n\n" if message.thinking else ""
            if thinking or message.text or not message.tool_calls:
                yield {"from": "gpt", "value": thinking + message.text}
            for call in message.tool_calls:
                yield {"from": "function_call", "value": _call(call)}


def _text(part: Part) -> str:
    """The format has no media: they are described by their type and size."""
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
    speaker, value = str(turn.get("from") or turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(value, str):
        raise ValueError("it has no text")
    if speaker in _USERS:
        return user(value)
    if speaker in _ASSISTANTS:
        return _reply(value)
    if speaker == "system":
        return system(value)
    if speaker in ("observation", "tool", "function_response"):
        return Message(Role.TOOL, (ToolResult("", value),))
    if speaker == "function_call":
        call = json.loads(value)
        return assistant(calls=(ToolCall("", str(call["name"]), json.dumps(call.get("arguments", {}))),))
    raise ValueError(f"unknown speaker {speaker!r}")


def _reply(value: str) -> Message:
    if found := _THINKING.fullmatch(value):
        return Message(Role.ASSISTANT, (Thinking(found[1]), Text(found[2])) if found[2] else (Thinking(found[1]),))
    return Message(Role.ASSISTANT, (Text(value),))
