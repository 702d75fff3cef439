"""JSONL ready for training: one `{"messages": [...]}` a line, a line for each branch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from palaver.messages import Message, Role
from palaver.store.prompts import prompt
from palaver.transcripts.openai import from_openai, joined_results, to_openai
from palaver.transcripts.transcript import Entry, Read, Skipped, Transcript, linear


def write(transcript: Transcript, all_branches: bool = False) -> str:
    """The head's branch, or all; each ends with a whole reply, and consecutive messages of the user are one."""
    branches = [transcript.branch(leaf) for leaf in transcript.leaves()] if all_branches else [transcript.main()]
    lines = (_line(transcript.system, _learnable(branch)) for branch in branches)
    return "".join(dict.fromkeys(line for line in lines if line))


def recognised(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("messages"), list)


def read_line(value: Mapping[str, Any]) -> Read:
    skipped, messages = [], []
    for number, one in enumerate(value["messages"], 1):
        try:
            messages.append(from_openai(one))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(Skipped(f"message {number}", str(error)))
    title = value.get("title")
    return Read((linear(joined_results(messages), title=title if isinstance(title, str) else ""),), tuple(skipped))


def _learnable(branch: tuple[Entry, ...]) -> tuple[Message, ...]:
    """Up to the last reply that is whole, if nothing before it was cut."""
    kept: list[Message] = []
    end = 0
    for entry in branch:
        if not entry.whole:
            break
        kept.append(entry.message)
        if entry.message.role is Role.ASSISTANT:
            end = len(kept)
    return tuple(kept[:end])


def _line(system: str, messages: tuple[Message, ...]) -> str:
    if not messages:
        return ""
    values = [value for message in prompt(system, messages) for value in to_openai(message)]
    return json_line({"messages": values})


def json_line(value: Any) -> str:
    """Lone surrogates, which no file can hold, are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085") + "\n"
