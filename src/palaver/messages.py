"""Messages, their parts and tools, as pure values without a storage identity."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from palaver.encoding import Base64Bytes, Tagged


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class PartBase:
    """A part of a message. Its decoder ignores unknown fields, also in requests, which refuse others."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"extra": "ignore"}


@dataclass(frozen=True, slots=True)
class Text(PartBase):
    type: Literal["text"] = field(default="text", kw_only=True, repr=False)
    text: str


@dataclass(frozen=True, slots=True)
class Thinking(PartBase):
    """The model's thinking, which is never part of its answer."""

    type: Literal["thinking"] = field(default="thinking", kw_only=True, repr=False)
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall(PartBase):
    """`arguments` is the JSON text as generated; it may be incomplete or invalid."""

    type: Literal["tool_call"] = field(default="tool_call", kw_only=True, repr=False)
    id: str
    name: str
    arguments: str
    in_thought: bool = False
    """Whether the model called the tool inside of open thinking."""


@dataclass(frozen=True, slots=True)
class ToolResult(PartBase):
    type: Literal["tool_result"] = field(default="tool_result", kw_only=True, repr=False)
    call_id: str
    content: str
    name: str = ""


class MediaPart(PartBase):
    """A picture, sound or video. The server fills in the size in pixels and the length from the file's header; 0 is
    unknown, or does not apply."""

    __slots__ = ()
    data: Base64Bytes

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the data, under which the store keeps it."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Image(MediaPart):
    type: Literal["image"] = field(default="image", kw_only=True, repr=False)
    media_type: str
    data: Base64Bytes
    name: str = ""
    width: int = 0
    height: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Audio(MediaPart):
    type: Literal["audio"] = field(default="audio", kw_only=True, repr=False)
    media_type: str
    data: Base64Bytes
    name: str = ""
    width: int = 0
    height: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Video(MediaPart):
    type: Literal["video"] = field(default="video", kw_only=True, repr=False)
    media_type: str
    data: Base64Bytes
    name: str = ""
    width: int = 0
    height: int = 0
    seconds: float = 0.0


Part = Text | Thinking | ToolCall | ToolResult | Image | Audio | Video


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Annotated[Part, Tagged], ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def is_blank(self) -> bool:
        """Whether it has nothing but white space."""
        return not self.text.strip() and all(isinstance(part, Text) for part in self.parts)

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolResult))


def describe_media(part: Any) -> str:
    """A line that stands for media, a part or a stored one, where only text can be."""
    size = f", {part.width} × {part.height}" if part.width else ""
    length = f", {part.seconds:g} s" if part.seconds else ""
    return f"[{part.media_type}{size}{length}]"


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


def tool(call_id: str, content: str, name: str = "", media: tuple[Part, ...] = ()) -> Message:
    return Message(Role.TOOL, (ToolResult(call_id, content, name), *media))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function offered to the model; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
