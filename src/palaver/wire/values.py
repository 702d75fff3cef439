"""Schemas of the values that messages and replies are made of: parts, messages, sampling, settings, usage.

Each schema has `from_value`, which encodes a domain value, and `to_value`, which decodes it. Media are sent as base64
inside the message, or as a reference to a blob.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal, assert_never

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from palaver import constraints, events, messages, sampling, store
from palaver.errors import BadParameter
from palaver.store import blobs, encoding

MAX_PARAMETERS = 200
Parameters = Annotated[
    dict[str, Any], Field(max_length=MAX_PARAMETERS, description="Names and values, see `palaver.chat.parameters`.")
]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31)]


class ValueModel(BaseModel):
    """A value of the API. Readers ignore unknown fields: the sender may be newer."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True)


class RequestModel(BaseModel):
    """The body of a request. The server refuses unknown fields.

    NaN and infinities are sent as constants, so that the server can refuse them by the parameter's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


def _encode_logprob(value: Any) -> Any:
    """JSON has no infinity: it is sent as a string."""
    return "-Infinity" if value == float("-inf") else value


Logprob = Annotated[float | Literal["-Infinity"], BeforeValidator(_encode_logprob)]


def decode_logprob(value: float | str) -> float:
    return float(value)


class TextSchema(ValueModel):
    type: Literal["text"]
    text: str


class ThinkingSchema(ValueModel):
    """What the model thought; never part of its answer."""

    type: Literal["thinking"]
    text: str


class ToolCallSchema(ValueModel):
    """`arguments` is the JSON text as the model wrote it; it may be cut off or wrong."""

    type: Literal["tool_call"]
    id: str
    name: str
    arguments: str
    in_thought: bool


class ToolResultSchema(ValueModel):
    type: Literal["tool_result"]
    call_id: str
    content: str
    name: str


class MediaSchema(ValueModel):
    """A picture, sound or video, whole."""

    type: blobs.Kind
    media_type: str
    data: Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class BlobSchema(ValueModel):
    """A picture, sound or video by its digest: to be had at `/api/blobs/{digest}`."""

    type: Literal["blob"]
    kind: blobs.Kind
    media_type: str
    digest: str
    size: int


StoredPartSchema = TextSchema | ThinkingSchema | ToolCallSchema | ToolResultSchema | BlobSchema
PartSchema = StoredPartSchema | MediaSchema
StoredPartField = Annotated[StoredPartSchema, Field(discriminator="type")]
PartField = Annotated[PartSchema, Field(discriminator="type")]


class MessageSchema(ValueModel):
    role: messages.Role
    parts: list[PartField]

    @classmethod
    def from_value(cls, message: messages.Message) -> MessageSchema:
        return cls(role=message.role, parts=[encode_part(part) for part in message.parts])

    def to_value(self) -> messages.Message:
        """Raises BadParameter if a part refers to a blob instead of holding its data."""
        values = tuple(decode_part(part) for part in self.parts)
        parts = tuple(part for part in values if not isinstance(part, blobs.Blob))
        if len(parts) < len(values):
            raise BadParameter("parts", "blob", "the media must be in the message itself")
        return messages.Message(self.role, parts)


def encode_stored_part(part: encoding.StoredPart) -> StoredPartSchema:
    match part:
        case messages.Text(text):
            return TextSchema(type="text", text=text)
        case messages.Thinking(text):
            return ThinkingSchema(type="thinking", text=text)
        case messages.ToolCall(id, name, arguments, in_thought):
            return ToolCallSchema(type="tool_call", id=id, name=name, arguments=arguments, in_thought=in_thought)
        case messages.ToolResult(call_id, content, name):
            return ToolResultSchema(type="tool_result", call_id=call_id, content=content, name=name)
        case blobs.Blob(kind, media_type, digest, size):
            return BlobSchema(type="blob", kind=kind, media_type=media_type, digest=digest, size=size)
        case _:
            assert_never(part)


def decode_stored_part(part: StoredPartSchema) -> encoding.StoredPart:
    match part:
        case TextSchema(text=text):
            return messages.Text(text)
        case ThinkingSchema(text=text):
            return messages.Thinking(text)
        case ToolCallSchema():
            return messages.ToolCall(part.id, part.name, part.arguments, part.in_thought)
        case ToolResultSchema():
            return messages.ToolResult(part.call_id, part.content, part.name)
        case BlobSchema():
            return blobs.Blob(part.kind, part.media_type, part.digest, part.size)
        case _:
            assert_never(part)


def encode_part(part: messages.Part | blobs.Blob) -> PartSchema:
    match part:
        case messages.Image(media_type, data):
            return _encode_media("image", media_type, data)
        case messages.Audio(media_type, data):
            return _encode_media("audio", media_type, data)
        case messages.Video(media_type, data):
            return _encode_media("video", media_type, data)
        case _:
            return encode_stored_part(part)


def decode_part(part: PartSchema) -> messages.Part | blobs.Blob:
    if not isinstance(part, MediaSchema):
        return decode_stored_part(part)
    try:
        data = base64.b64decode(part.data, validate=True)
    except (binascii.Error, ValueError):
        raise BadParameter("data", part.data[:40], "must be base64") from None
    return media_part(part.type, part.media_type, data)


def media_part(kind: blobs.Kind, media_type: str, data: bytes) -> messages.Image | messages.Audio | messages.Video:
    match kind:
        case "image":
            return messages.Image(media_type, data)
        case "audio":
            return messages.Audio(media_type, data)
        case "video":
            return messages.Video(media_type, data)


def _encode_media(kind: blobs.Kind, media_type: str, data: bytes) -> MediaSchema:
    return MediaSchema(type=kind, media_type=media_type, data=base64.b64encode(data).decode())


class ConstraintSchema(ValueModel):
    grammar: constraints.Grammar
    text: str


class SamplingSchema(ValueModel):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    end_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    banned_ids: tuple[int, ...]
    banned_strings: tuple[str, ...]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    min_tokens: int
    max_tokens: int | None
    thinking_budget: int | None
    seed: int
    logprobs: int
    constraint: ConstraintSchema | None
    spoken: bool = False

    @classmethod
    def from_value(cls, value: sampling.Sampling) -> SamplingSchema:
        return cls.model_validate(value)

    def to_value(self) -> sampling.Sampling:
        constraint = self.constraint and constraints.Constraint(self.constraint.grammar, self.constraint.text)
        return sampling.Sampling(**{**dict(self), "constraint": constraint})


class ToolSchema(ValueModel):
    """A function offered to the model; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]

    @classmethod
    def from_value(cls, tool: messages.Tool) -> ToolSchema:
        return cls(name=tool.name, description=tool.description, parameters=dict(tool.parameters))

    def to_value(self) -> messages.Tool:
        return messages.Tool(self.name, self.description, self.parameters)


class ReplySettingsSchema(ValueModel):
    """All that must be known to make a reply again."""

    model: str
    sampling: SamplingSchema
    tokenizer: str
    options: dict[str, Any]
    tools: list[ToolSchema]
    choice: int
    fingerprints: tuple[tuple[int, str], ...] = ()
    """The engines that computed it, each with its first token."""
    answer_at: int | None = None
    """How many tokens the reply had when its answer was asked for, in the midst of a thought."""

    @classmethod
    def from_value(cls, settings: store.ReplySettings) -> ReplySettingsSchema:
        return cls(
            model=settings.model,
            sampling=SamplingSchema.from_value(settings.sampling),
            tokenizer=settings.tokenizer,
            options=dict(settings.options),
            tools=[ToolSchema.from_value(tool) for tool in settings.tools],
            choice=settings.choice,
            fingerprints=settings.fingerprints,
            answer_at=settings.answer_at,
        )

    def to_value(self) -> store.ReplySettings:
        tools, sampling = tuple(tool.to_value() for tool in self.tools), self.sampling.to_value()
        return store.ReplySettings(
            self.model,
            sampling,
            self.tokenizer,
            self.options,
            tools,
            self.choice,
            self.fingerprints,
            self.answer_at,
        )


class UsageSchema(ValueModel):
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    thinking_tokens: int

    @classmethod
    def from_value(cls, usage: events.Usage) -> UsageSchema:
        return cls.model_validate(usage)

    def to_value(self) -> events.Usage:
        return events.Usage(**dict(self))
