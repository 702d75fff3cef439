"""Messages of clients: start a turn, stop it, or resume it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from palaver.errors import BadParameter
from palaver.server.errors import NotJson
from palaver.server.limits import check_json
from palaver.server.settings import ServerLimits

MAX_SEQ = 2**31


class SocketFields(BaseModel):
    """Null fields count as left out; unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}


class SocketMessage(SocketFields):
    role: Literal["system", "user", "assistant"]
    content: Any = ""
    """A text, or a list of parts. `request.py` parses it, for better error messages."""
    thinking: str = ""
    """The assistant's thinking, from the message `done`."""


class TtsOptions(SocketFields):
    enabled: bool = False
    ref_audio_data: str = ""
    mode: Annotated[str, Field(max_length=64)] = ""
    """A template of the reference model's own voice. Accepted, without effect."""
    language: Annotated[str, Field(max_length=35)] = ""
    """The language to speak, such as `de`; else that of the voice."""


class ImageOptions(SocketFields):
    max_slice_nums: Annotated[int, Field(ge=1, le=64)] | None = None
    use_image_id: bool | None = None


class TurnRequest(SocketFields):
    """Starts a turn: the whole history and the parameters of the reply."""

    messages: list[SocketMessage] = Field(min_length=1)
    streaming: bool = True
    generation: dict[str, Any] = Field(default_factory=dict)
    tts: TtsOptions = Field(default_factory=TtsOptions)
    image: ImageOptions = Field(default_factory=ImageOptions)
    omni_mode: bool = False
    enable_thinking: bool | None = None
    conversation: Annotated[str, Field(max_length=100)] = ""
    """The conversation that stores the messages and the reply; `new` creates one."""
    model: Annotated[str, Field(max_length=500)] = ""
    """The model that answers; without a name the conversation's, or the one in use."""
    use_tts_template: bool = False
    """Asks for text that is fit for speech, even without audio."""


class StopRequest(SocketFields):
    """Stops the turn that this socket follows."""

    type: Literal["stop"]


class ResumeRequest(SocketFields):
    """Resumes a turn after the message with that number, and follows it to its end."""

    type: Literal["resume"]
    turn_id: str = Field(min_length=1, max_length=100)
    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0


ClientMessage = TurnRequest | StopRequest | ResumeRequest
_TYPES: dict[str, type[StopRequest | ResumeRequest]] = {"stop": StopRequest, "resume": ResumeRequest}
_FILE_WORDS = ("path", "file", "url")
NO_FILES = "files of the server are never read for a client: send the data itself"
UNKNOWN = "there is no such field"
T = TypeVar("T", bound=SocketFields)


def parse_message(text: str, limits: ServerLimits) -> ClientMessage:
    """Raises NotJson or BadParameter for invalid messages."""
    value = _parse_json(text, limits)
    if not isinstance(value, dict):
        raise NotJson("A message must be a JSON object.")
    kind = value.get("type")
    if kind is None:
        return _validate(TurnRequest, {name: field for name, field in value.items() if name != "type"})
    if not isinstance(kind, str) or kind not in _TYPES:
        raise BadParameter("type", _shown(kind), "must be stop or resume; a message without a type opens a turn")
    return _validate(_TYPES[kind], value)


def unknown_field(where: str, value: Any) -> BadParameter:
    """The error for an unknown field, with a hint if it names a file."""
    name = where.rpartition(".")[2].lower()
    return BadParameter(where, _shown(value), NO_FILES if any(word in name for word in _FILE_WORDS) else UNKNOWN)


def _parse_json(text: str, limits: ServerLimits) -> Any:
    try:
        body = text.encode()
    except UnicodeEncodeError:
        raise NotJson("The message contains half of a character (a lone surrogate).") from None
    check_json(body, limits)
    try:
        return json.loads(text)
    except ValueError as error:
        raise NotJson(f"The message is not JSON: {error}.") from None


def _validate(kind: type[T], value: dict[str, Any]) -> T:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = _place(first["loc"])
        if first["type"] == "extra_forbidden":
            raise unknown_field(where, first["input"]) from None
        if first["type"] == "missing":
            raise BadParameter(where, None, "must be given") from None
        raise BadParameter(where, _shown(first["input"]), first["msg"]) from None


def _place(parts: tuple[int | str, ...]) -> str:
    named = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(named).removeprefix(".") or "message"


def _shown(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
