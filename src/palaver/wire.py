"""The JSON of the HTTP API: requests with their limits, responses, errors and the items of streams.

Values are encoded by their types (`palaver.encoding`). The page's TypeScript types are generated from the OpenAPI
document, which publishes them under the names in `palaver.server.openapi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails

from palaver.chat.interface import CallDecision, Column, ConversationChange, Remember
from palaver.encoding import Tagged, decode_error, error_details, error_name
from palaver.errors import PalaverError
from palaver.events import Event
from palaver.messages import Audio, Image, PartBase, Role, Text, Thinking, ToolCall, ToolResult, Video
from palaver.store import Blob
from palaver.store.share_links import Share

MAX_PARAMETERS = 200
Parameters = Annotated[
    dict[str, Any], Field(max_length=MAX_PARAMETERS, description="Names and values, see `palaver.chat.parameters`.")
]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31)]


class ValueModel(BaseModel):
    """A value of the API. Readers ignore unknown fields: the sender may be newer."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RequestModel(BaseModel):
    """The body of a request. The server refuses unknown fields.

    NaN and infinities are sent as constants, so that the server can refuse them by the parameter's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class ErrorSchema(ValueModel):
    message: str
    type: str
    param: str | None
    code: str | None
    name: str | None = None
    details: dict[str, Any] | None = None

    def to_value(self) -> PalaverError | None:
        """The error that the server raised; None if this program has no error type of that name."""
        return decode_error(self.name, self.message, self.details)


class ErrorBody(ValueModel):
    error: ErrorSchema


def error_fields(error: BaseException) -> dict[str, Any]:
    """The fields from which the client raises the same error; empty for errors that are not Palaver's."""
    if not isinstance(error, PalaverError):
        return {}
    return {"name": error_name(type(error)), "details": error_details(error)}


MAX_TEXT = 4 << 20
"""The characters of all texts of a message, or of a system prompt."""
MAX_COUNTED = 1 << 20
"""The characters of a text whose tokens are counted."""
MAX_PARTS = 1000
MAX_TAGS = 100
Key = Annotated[
    str | None,
    Field(description="A repeated request with the same key has no further effect. Also a header: Idempotency-Key."),
]
MAX_TURNS = 256
"""The number of turns that one stream can follow."""


def _complete(kind: type[PartBase]) -> BeforeValidator:
    """Requires every field of the part, also those with a default."""
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]

    def check(value: Any) -> Any:
        missing = [name for name in names if name not in value] if isinstance(value, Mapping) else []
        if missing:
            lines = [InitErrorDetails(type="missing", loc=(name,), input=value) for name in missing]
            raise ValidationError.from_exception_data(kind.__name__, lines)
        return value

    return BeforeValidator(check)


NewPart = Annotated[
    Text
    | Thinking
    | Annotated[ToolCall, _complete(ToolCall)]
    | Annotated[ToolResult, _complete(ToolResult)]
    | Blob
    | Image
    | Audio
    | Video,
    Tagged,
]
"""A part of a message in a request: media are whole, or references to blobs of the caller."""


def _check_parts(parts: list[NewPart]) -> list[NewPart]:
    if len(parts) > MAX_PARTS:
        raise ValueError(f"a message has at most {MAX_PARTS} parts")
    if sum(map(_characters, parts)) > MAX_TEXT:
        raise ValueError(f"the texts of a message have at most {MAX_TEXT} characters")
    return parts


def _check_message(message: MessageSchema) -> MessageSchema:
    _check_parts(message.parts)
    return message


def _characters(part: NewPart) -> int:
    match part:
        case Text(text) | Thinking(text):
            return len(text)
        case ToolCall():
            return len(part.name) + len(part.arguments)
        case ToolResult():
            return len(part.name) + len(part.content)
        case _:
            return 0


class MessageSchema(ValueModel):
    role: Role
    parts: list[NewPart]


Title = Annotated[str, Field(max_length=10_000)]
System = Annotated[str, Field(max_length=MAX_TEXT)]
Tags = Annotated[list[str], Field(max_length=MAX_TAGS)]
NewParts = Annotated[list[NewPart], AfterValidator(_check_parts)]
NewMessage = Annotated[MessageSchema, AfterValidator(_check_message)]


class CreateConversationRequest(RequestModel):
    title: Title = ""
    system: System = ""
    parameters: Parameters = Field(default_factory=dict)
    tags: Tags = Field(default_factory=list)
    key: Key = None


class UpdateConversationRequest(RequestModel):
    """What is given is set. The parameters are set as a whole."""

    title: Title | None = None
    system: System | None = None
    parameters: Parameters | None = None
    tags: Tags | None = None
    pinned: bool | None = None


class SavePresetRequest(RequestModel):
    name: str
    system: System = ""
    parameters: Parameters = Field(default_factory=dict)


class DeletePresetRequest(RequestModel):
    name: str


class SaveDefaultsRequest(RequestModel):
    """The system prompt and the parameters that new conversations begin with."""

    system: System = ""
    parameters: Parameters = Field(default_factory=dict)


class ShareBranchRequest(RequestModel):
    """A link to a read-only page of the branch that ends with the message `leaf`."""

    leaf: Annotated[str, Field(max_length=100)]
    days: Annotated[int, Field(strict=True, ge=1, le=365)] = 7
    thoughts: bool = False
    tools: bool = False


class AppendMessageRequest(RequestModel):
    parent: str | None
    message: NewMessage
    key: Key = None


class EditMessageRequest(RequestModel):
    parts: NewParts
    key: Key = None


class SendMessageRequest(RequestModel):
    parent: str | None
    message: NewMessage
    parameters: Parameters = Field(default_factory=dict)
    key: Key = None


class StartReplyRequest(RequestModel):
    parent: str
    parameters: Parameters = Field(default_factory=dict)
    key: Key = None


class ForkReplyRequest(RequestModel):
    """A sibling that begins with the reply's first `tokens`, then the token `instead`."""

    tokens: Count
    instead: Count | None = None
    key: Key = None


class ColumnSchema(RequestModel):
    """One reply of a comparison: its parameters and its name, which may both be left out."""

    parameters: Parameters = Field(default_factory=dict)
    name: Annotated[str, Field(max_length=200)] = ""

    def to_value(self) -> Column:
        return Column(self.parameters, self.name)


class CompareRequest(RequestModel):
    """One message to several models or settings. Without a message, `parent` is replied to."""

    parent: str | None
    message: NewMessage | None = None
    columns: Annotated[list[ColumnSchema], Field(max_length=100)]
    blind: bool = False
    key: Key = None


class ChooseReplyRequest(RequestModel):
    """The preferred reply; null: no reply is better than the others."""

    reply: str | None


class ContinueReplyRequest(RequestModel):
    key: Key = None


class ContextUsageRequest(RequestModel):
    leaf: str | None
    parameters: Parameters = Field(default_factory=dict)


class CountTokensRequest(RequestModel):
    """Text whose tokens are counted; without a model, by the one in use."""

    text: Annotated[str, Field(max_length=MAX_COUNTED)]
    model: Annotated[str, Field(max_length=500)] = ""


class CursorRequest(RequestModel):
    client: str


class MoveCursorRequest(CursorRequest):
    to: str | None


class AddToolServerRequest(RequestModel):
    """A tool server at a public address. A command is code that runs: only the operator of the server adds one."""

    name: Annotated[str, Field(max_length=100)]
    url: Annotated[str, Field(max_length=4096)]
    headers: Annotated[dict[str, str], Field(max_length=50)] = Field(default_factory=dict)


class RemoveToolServerRequest(RequestModel):
    name: str


class StartSignInRequest(RequestModel):
    """A tool server to sign in to. `redirect_uri` is where the browser comes back to: an address on the caller's
    machine (http://127.0.0.1:PORT/...), or nothing for this server."""

    server: Annotated[str, Field(max_length=100)]
    redirect_uri: Annotated[str, Field(max_length=2048, pattern=r"^(http://127\.0\.0\.1:\d{1,5}/[!-~]*)?$")] = ""


class SignInSchema(ValueModel):
    """The URL to open in a browser."""

    url: str


class FinishSignInRequest(RequestModel):
    """What the browser brought back."""

    state: Annotated[str, Field(max_length=500)]
    code: Annotated[str, Field(max_length=8192)]
    issuer: Annotated[str | None, Field(max_length=2048)] = None


class ForgottenSchema(ValueModel):
    """How many rules were removed."""

    forgotten: int


class ReadToolResourceRequest(RequestModel):
    """A resource of a tool server by its URI, or a prompt by its name, with the prompt's arguments."""

    server: Annotated[str, Field(max_length=100)]
    name: Annotated[str, Field(max_length=2048)]
    arguments: Annotated[dict[str, str], Field(max_length=50)] = Field(default_factory=dict)


class CallDecisionSchema(RequestModel):
    """What the user decided about a call that waits. `arguments` are those to run it with, if they were edited."""

    position: Count
    allowed: bool
    arguments: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    remember: Remember = Remember.ONCE
    reason: Annotated[str, Field(max_length=MAX_TEXT)] = ""

    def to_value(self) -> CallDecision:
        return CallDecision(self.position, self.allowed, self.arguments, self.remember, self.reason)


class DecideCallsRequest(RequestModel):
    decisions: Annotated[list[CallDecisionSchema], Field(max_length=1000)]


class LoadModelRequest(RequestModel):
    name: str


class TurnPosition(RequestModel):
    turn: str
    after: Count = 0


class FollowRequest(RequestModel):
    """Many turns, each after a number, and whether to tell what changes."""

    turns: list[TurnPosition] = Field(default_factory=list, max_length=MAX_TURNS)
    changes: bool = False


class LeafSchema(ValueModel):
    """A message's id, or null where there is none."""

    id: str | None


class BlobUploadSchema(ValueModel):
    """The fields of a part of type `blob`."""

    digest: str
    size: int
    kind: Literal["image", "audio", "video"]
    media_type: str
    name: str
    width: int
    height: int
    seconds: float

    def to_value(self) -> Blob:
        return Blob(
            *(self.kind, self.media_type, self.digest, self.size),
            *(self.name, self.width, self.height, self.seconds),
        )


class DocumentSchema(ValueModel):
    """A document as the text of a part."""

    text: str


class TranscriptionSchema(ValueModel):
    """The transcript of an audio file."""

    text: str


class TokenCountSchema(ValueModel):
    """How many tokens a text has for a model."""

    tokens: int


class NewShareSchema(ValueModel):
    """A link that was created: its record, and its address relative to the server's, which is returned only once."""

    share: Share
    path: str


class RawReplySchema(ValueModel):
    """A reply as the model wrote it, markers and all."""

    text: str


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The first item. Changes before it are not sent."""

    type: Literal["opened"] = field(default="opened", kw_only=True)


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """An entry in the log of one turn."""

    type: Literal["turn"] = field(default="turn", kw_only=True)
    turn: str
    number: int
    event: Annotated[Event, Tagged]


@dataclass(frozen=True, slots=True)
class StreamChange:
    type: Literal["change"] = field(default="change", kw_only=True)
    change: ConversationChange


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """This turn can't be read; the others continue."""

    type: Literal["refused"] = field(default="refused", kw_only=True)
    turn: str
    error: ErrorSchema


@dataclass(frozen=True, slots=True)
class StreamClosing:
    """The server shuts down: reconnect in a moment."""

    type: Literal["closing"] = field(default="closing", kw_only=True)


StreamItem = Annotated[StreamOpened | TurnEvent | StreamChange | TurnRefused | StreamClosing, Tagged]
