"""Preferences as JSONL for training: trl's conversational preference format with an explicit prompt.

    {"prompt": [{"role": "user", "content": "..."}],
     "chosen": [{"role": "assistant", "content": "..."}],
     "rejected": [{"role": "assistant", "content": "..."}]}

One line per reply that was rejected. Contents are texts. Thinking is `reasoning_content`, as chat templates read it.
With tools there is a column `tools`, and a reply has its calls, their results and the reply that follows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from palaver.messages import MediaPart, Message, Role, Text, Tool, ToolCall
from palaver.store import ReplyStatus, Store, StoredMessage
from palaver.store.comparisons import Comparison
from palaver.store.messages import prompt_messages
from palaver.store.tool_rounds import RoundState
from palaver.transcripts.jsonl import json_line


@dataclass(frozen=True, slots=True)
class PreferenceFile:
    text: str
    pairs: int
    skipped: int
    """Pairs that can't be used for training: a reply is incomplete or empty, both are the same, or there are media."""


def write_preferences(store: Store, conversation_ids: Iterable[str]) -> PreferenceFile:
    """The choices that were made in these conversations."""
    pairs = [pair for id in conversation_ids for one in store.comparisons.list(id) for pair in _pairs(store, one)]
    lines = [line for line in pairs if line is not None]
    return PreferenceFile("".join(lines), len(lines), len(pairs) - len(lines))


def _pairs(store: Store, comparison: Comparison) -> Iterator[str | None]:
    """A line for each rejected reply; None for a pair that can't be used."""
    if comparison.chosen_id not in {one.reply_id for one in comparison.replies}:  # none, or it was deleted
        return
    assert comparison.chosen_id is not None
    chosen, best = store.messages.get(comparison.chosen_id), _completion(store, comparison.chosen_id)
    prompt = _prompt(store, chosen)
    for one in comparison.replies:
        if one.reply_id == chosen.id:
            continue
        worse = _completion(store, one.reply_id)
        if best is None or worse is None or best == worse or _has_media((*prompt, *best, *worse)):
            yield None
            continue
        value: dict[str, Any] = {
            "prompt": _values(prompt),
            "chosen": _values(best),
            "rejected": _values(worse),
        }
        if chosen.reply is not None and chosen.reply.settings.tools:
            value["tools"] = [_tool(tool) for tool in chosen.reply.settings.tools]
        yield json_line(value)


def _prompt(store: Store, chosen: StoredMessage) -> tuple[Message, ...]:
    """The branch above the replies, with the system prompt of the chosen one."""
    path = store.messages.path(chosen.parent_id) if chosen.parent_id else ()
    system = chosen.reply.settings.options.get("system", "") if chosen.reply else ""
    return prompt_messages(system, store.messages.load_path([one for one in path if one.parts]))


def _completion(store: Store, reply_id: str) -> tuple[Message, ...] | None:
    """The reply, with its tool calls, their results and the replies to them. None if it is empty or incomplete."""
    last = reply_id
    while (round := store.tool_rounds.get(last)) is not None:
        if round.state is not RoundState.DONE or round.next_id is None:
            return None
        last = round.next_id
    path = store.messages.path(last)
    start = next(place for place, one in enumerate(path) if one.id == reply_id)
    replies = [one for one in path[start:] if one.role is Role.ASSISTANT]
    if any(one.reply is not None and one.reply.status is not ReplyStatus.DONE for one in replies):
        return None
    if not any(isinstance(part, Text | ToolCall) for part in replies[-1].parts):
        return None
    return tuple(store.messages.load_path(path[start:]))


def _has_media(messages: Sequence[Message]) -> bool:
    return any(isinstance(part, MediaPart) for message in messages for part in message.parts)


def _values(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [value for message in messages for value in _message_values(message)]


def _message_values(message: Message) -> list[dict[str, Any]]:
    """One message, or one per tool result."""
    if message.role is Role.TOOL:
        return [{"role": "tool", "name": one.name, "content": one.content} for one in message.tool_results]
    value: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.thinking:
        value["reasoning_content"] = message.thinking
    if message.tool_calls:
        value["tool_calls"] = [_call(call) for call in message.tool_calls]
    return [value]


def _call(call: ToolCall) -> dict[str, Any]:
    """Chat templates expect the arguments as an object; text that is no JSON object stays text."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = None
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
