"""JSONL for training: one `{"messages": [...]}` per line and branch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from palaver.store.messages import prompt_messages
from palaver.transcripts.openai import from_openai, merge_tool_results, to_openai
from palaver.transcripts.transcript import (
    ReadResult,
    SkippedConversation,
    Transcript,
    TranscriptEntry,
    linear_transcript,
)


def write(transcript: Transcript, all_branches: bool = False) -> str:
    """Writes the main branch, or all. Consecutive user messages are merged.

    No turn is omitted. An incomplete reply has the weight 0, by which OpenAI's fine-tuning format excludes an assistant
    message from the loss.
    """
    branches = [transcript.branch(leaf) for leaf in transcript.leaves()] if all_branches else [transcript.main_branch()]
    lines = (_line(transcript.system, branch) for branch in branches)
    return "".join(dict.fromkeys(line for line in lines if line))


def matches(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("messages"), list)


def parse(value: Mapping[str, Any]) -> ReadResult:
    skipped, messages = [], []
    for number, one in enumerate(value["messages"], 1):
        try:
            messages.append(from_openai(one))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(SkippedConversation(f"message {number}", str(error)))
    title = value.get("title")
    return ReadResult(
        (linear_transcript(merge_tool_results(messages), title=title if isinstance(title, str) else ""),),
        tuple(skipped),
    )


def _line(system: str, branch: tuple[TranscriptEntry, ...]) -> str:
    entries = [
        entry for entry in branch if entry.message.parts
    ]  # a reply that was stopped before its first token is empty
    if not entries:
        return ""
    incomplete = {id(entry.message) for entry in entries if not entry.complete}
    values: list[dict[str, Any]] = []
    for message in prompt_messages(system, (entry.message for entry in entries)):
        weight = {"weight": 0} if id(message) in incomplete else {}
        values += [{**value, **weight} for value in to_openai(message)]
    return json_line({"messages": values})


def json_line(value: Any) -> str:
    """Escapes lone surrogates, which UTF-8 cannot encode, and characters that some readers take for line ends."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085") + "\n"
