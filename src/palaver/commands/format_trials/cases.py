"""Recorded cases: replies in published formats with their expected messages, replayed with different token splits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from palaver.commands.format_trials.piece_tokenizer import PieceTokenizer, control_strings
from palaver.errors import PalaverError
from palaver.events import ReadEvent, fold
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.formats.learn.learner import CONVENTION
from palaver.formats.template import Template
from palaver.messages import Message, Role, Text, Thinking, Tool, ToolCall, ToolResult

STRINGS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
SPLITS = ("whole", "by character", "random cuts")


@dataclass(frozen=True)
class CaseResult:
    template: str
    case: int
    tokens: bool
    """Whether the control strings were tokens."""
    split: str
    """How the text was split into tokens; one of `SPLITS`."""
    error: str
    """Empty if the message was read as expected."""


def load_cases(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class CaseReplay:
    """Replays cases against the templates of a folder."""

    def __init__(self, templates: Path) -> None:
        self._templates = templates
        self.format = cache(self._make_format)

    def _make_format(self, name: str, tokens: bool, splits_thinking: bool) -> tuple[TemplateFormat, PieceTokenizer]:
        source = (self._templates / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer = PieceTokenizer(control_strings(source) | set(STRINGS.values()) if tokens else ())
        format = TemplateFormat(Template(source, name), tokenizer, STRINGS)
        if splits_thinking and format.facts.thinking is None:
            format = format.with_thinking(CONVENTION)
        return format, tokenizer

    def results(self, case: Mapping[str, Any], number: int) -> Iterator[CaseResult]:
        for tokens in (True, False):
            for split in SPLITS:
                yield CaseResult(case["template"], number, tokens, split, self._try(case, tokens, split, number))

    def _try(self, case: Mapping[str, Any], tokens: bool, split: str, seed: int) -> str:
        try:
            return _difference(case, self.message(case, tokens, split, seed))
        except PalaverError as error:
            return str(error)

    def message(self, case: Mapping[str, Any], tokens: bool, split: str, seed: int = 0) -> Message:
        """The message that the recorded reply is read as."""
        splits_thinking = case["reasoning_format"] != "none"
        format, tokenizer = self.format(case["template"], tokens, splits_thinking)
        messages = [read_message(m) for m in case["messages"]]
        partial = messages.pop() if case["continue"] else None
        if partial is not None and not splits_thinking:
            partial = Message(partial.role, tuple(p for p in partial.parts if not isinstance(p, Thinking)))
        tools = tuple(read_tool(tool) for tool in case["tools"] or ())
        options = RenderOptions(
            thinking=case["enable_thinking"] if has_boolean_switch(format) else None,
            calls=case["tool_choice"] != 2,
            unsplit=not splits_thinking,
            json_answer=bool(case["json_schema"]),
        )
        prompt = format.render(messages, tools, options, partial_reply=partial)
        reader = format.reader(prompt, (), tools, options)
        events: list[ReadEvent] = reader.open()
        for token_id in _split(tokenizer, case["input"], split, random.Random(seed)):
            events += reader.feed(token_id)
        return fold([*events, *reader.close()]).message


def has_boolean_switch(format: TemplateFormat) -> bool:
    """Whether thinking is switched by true and false. Recorded requests set no other switches."""
    return format.thinking_switch is not None and isinstance(format.thinking_switch.off, bool)


def _split(tokenizer: PieceTokenizer, text: str, split: str, rng: random.Random) -> Iterator[int]:
    for run in tokenizer.runs(text):
        if isinstance(run, int):
            yield run
        elif split == "whole":
            yield tokenizer.piece(run)
        else:
            data = run.encode()
            while data:
                size = 1 if split == "by character" else rng.randint(1, 7)
                yield tokenizer.piece(data[:size])
                data = data[size:]


def read_message(message: Mapping[str, Any]) -> Message:
    """A message from its OpenAI JSON."""
    role = Role(message["role"])
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if role is Role.TOOL:
        return Message(role, (ToolResult(message.get("tool_call_id", ""), content, message.get("name", "")),))
    parts: list[Any] = [Thinking(message["reasoning_content"])] if message.get("reasoning_content") else []
    parts += [Text(content)] if content else []
    parts += [
        ToolCall(call.get("id") or "", call["function"]["name"], _arguments(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return Message(role, tuple(parts))


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given or {})


def read_tool(tool: Mapping[str, Any]) -> Tool:
    function = tool["function"]
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def _difference(case: Mapping[str, Any], message: Message) -> str:
    """The difference to the expected message; empty if there is none."""
    message_json = case["expect"][0]
    expected = (message_json.get("reasoning_content") or "").strip(), (message_json.get("content") or "").strip()
    got = message.thinking.strip(), message.text.strip()
    if expected != got:
        return f"thinking and answer are {got!r}, expected {expected!r}"
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    calls_json = message_json.get("tool_calls") or ()
    expected_calls = [(c["function"]["name"], _value(c["function"]["arguments"])) for c in calls_json]
    if calls != expected_calls:
        return f"calls are {calls!r}, expected {expected_calls!r}"
    ids = [(call.id, c["id"]) for call, c in zip(message.tool_calls, calls_json, strict=True) if c.get("id")]
    return next(
        (f"a call's id is {id_!r}, expected {expected_id!r}" for id_, expected_id in ids if id_ != expected_id), ""
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # the call was cut off
        return text.strip()
