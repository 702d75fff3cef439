"""Messages, their parts and tools, as pure values without a storage identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """The model's thinking, which is never part of its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text as generated; it may be incomplete or invalid."""

    id: str
    name: str
    arguments: str
    in_thought: bool = False
    """Whether the model called the tool inside of open thinking."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    content: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Audio:
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Video:
    media_type: str
    data: bytes


Part = Text | Thinking | ToolCall | ToolResult | Image | Audio | Video


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolResult))


def system(text: str) -> Message:
    return Message(Role.SYSTEM, (Text(text),))


def user(text: str) -> Message:
    return Message(Role.USER, (Text(text),))


def assistant(text: str = "", thinking: str = "", calls: tuple[ToolCall, ...] = ()) -> Message:
    parts: list[Part] = []
    if thinking:
        parts.append(Thinking(thinking))
    if text:
        parts.append(Text(text))
    return Message(Role.ASSISTANT, (*parts, *calls))


def tool(call_id: str, content: str, name: str = "") -> Message:
    return Message(Role.TOOL, (ToolResult(call_id, content, name),))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function offered to the model; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
