"""Recorded cases: what models said in published formats, and the message it means, replayed in every way."""

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
WAYS = ("whole", "by character", "random cuts")


@dataclass(frozen=True)
class CaseResult:
    template: str
    case: int
    tokens: bool
    """Whether the control strings were tokens."""
    way: str
    why: str
    """Empty where all is well."""


def load_cases(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class CaseReplay:
    """Replays cases against the templates of a folder."""

    def __init__(self, templates: Path) -> None:
        self._templates = templates
        self.format = cache(self._make_format)

    def _make_format(self, name: str, tokens: bool, splits: bool) -> tuple[TemplateFormat, PieceTokenizer]:
        source = (self._templates / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer = PieceTokenizer(control_strings(source) | set(STRINGS.values()) if tokens else ())
        format = TemplateFormat(Template(source, name), tokenizer, STRINGS)
        if splits and format.facts.thinking is None:
            format = format.with_thinking(CONVENTION)
        return format, tokenizer

    def outcomes(self, case: Mapping[str, Any], number: int) -> Iterator[CaseResult]:
        for tokens in (True, False):
            for way in WAYS:
                yield CaseResult(case["template"], number, tokens, way, self._try(case, tokens, way, number))

    def _try(self, case: Mapping[str, Any], tokens: bool, way: str, seed: int) -> str:
        try:
            return _difference(case, self.message(case, tokens, way, seed))
        except PalaverError as error:
            return str(error)

    def message(self, case: Mapping[str, Any], tokens: bool, way: str, seed: int = 0) -> Message:
        splits = case["reasoning_format"] != "none"
        format, tokenizer = self.format(case["template"], tokens, splits)
        messages = [read_message(m) for m in case["messages"]]
        begun = messages.pop() if case["continue"] else None
        if begun is not None and not splits:
            begun = Message(begun.role, tuple(p for p in begun.parts if not isinstance(p, Thinking)))
        tools = tuple(read_tool(tool) for tool in case["tools"] or ())
        options = RenderOptions(
            thinking=case["enable_thinking"] if switches_by_truth(format) else None,
            calls=case["tool_choice"] != 2,
            unsplit=not splits,
            json_answer=bool(case["json_schema"]),
        )
        prompt = format.render(messages, tools, options, begun=begun)
        reader = format.reader(prompt, (), tools, options)
        events: list[ReadEvent] = reader.open()
        for token_id in _cut(tokenizer, case["input"], way, random.Random(seed)):
            events += reader.feed(token_id)
        return fold([*events, *reader.close()]).message


def switches_by_truth(format: TemplateFormat) -> bool:
    """Recorded requests switch thinking by true and false alone; other switches were left as they are."""
    return format.thinking_switch is not None and isinstance(format.thinking_switch.off, bool)


def _cut(tokenizer: PieceTokenizer, text: str, way: str, rng: random.Random) -> Iterator[int]:
    for run in tokenizer.runs(text):
        if isinstance(run, int):
            yield run
        elif way == "whole":
            yield tokenizer.piece(run)
        else:
            data = run.encode()
            while data:
                size = 1 if way == "by character" else rng.randint(1, 7)
                yield tokenizer.piece(data[:size])
                data = data[size:]


def read_message(given: Mapping[str, Any]) -> Message:
    """A message in the OpenAI form."""
    role = Role(given["role"])
    content = given.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if role is Role.TOOL:
        return Message(role, (ToolResult(given.get("tool_call_id", ""), content, given.get("name", "")),))
    parts: list[Any] = [Thinking(given["reasoning_content"])] if given.get("reasoning_content") else []
    parts += [Text(content)] if content else []
    parts += [
        ToolCall(call.get("id") or "", call["function"]["name"], _arguments(call["function"].get("arguments")))
        for call in given.get("tool_calls") or ()
    ]
    return Message(role, tuple(parts))


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given or {})


def read_tool(given: Mapping[str, Any]) -> Tool:
    function = given["function"]
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def _difference(case: Mapping[str, Any], message: Message) -> str:
    """What is not as expected; empty where nothing is."""
    expected = case["expect"][0]
    wanted = (expected.get("reasoning_content") or "").strip(), (expected.get("content") or "").strip()
    got = message.thinking.strip(), message.text.strip()
    if wanted != got:
        return f"thinking and answer are {got!r}, expected {wanted!r}"
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    due = [(c["function"]["name"], _value(c["function"]["arguments"])) for c in expected.get("tool_calls") or ()]
    if calls != due:
        return f"calls are {calls!r}, expected {due!r}"
    ids = [
        (call.id, c["id"])
        for call, c in zip(message.tool_calls, expected.get("tool_calls") or (), strict=True)
        if c.get("id")
    ]
    return next((f"a call's id is {got!r}, expected {due!r}" for got, due in ids if got != due), "")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
