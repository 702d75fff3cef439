"""What a client may send: a message that opens a turn, stops one, or comes back to one."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from palaver.errors import BadParameter
from palaver.server.errors import NotJson
from palaver.server.request_body import check_json
from palaver.server.settings import ServerLimits

MAX_SEQ = 2**31


class SocketFields(BaseModel):
    """A field that is null is as good as left out; one that nobody knows is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if one is not None}


class SocketMessage(SocketFields):
    role: Literal["system", "user", "assistant"]
    content: Any = ""
    """A text, or a list of parts: see `conversing.py`, which can say what is wrong with one."""
    thinking: str = ""
    """What the assistant thought, as `done` told it."""


class TtsOptions(SocketFields):
    enabled: bool = False
    ref_audio_data: str = ""
    mode: Annotated[str, Field(max_length=64)] = ""
    """A template of the model's own talker, for which there is none here: taken and without effect."""


class ImageOptions(SocketFields):
    max_slice_nums: Annotated[int, Field(ge=1, le=64)] = 1


class TurnRequest(SocketFields):
    """Opens a turn: the whole history, and how the reply is wanted."""

    messages: list[SocketMessage] = Field(min_length=1)
    streaming: bool = True
    generation: dict[str, Any] = Field(default_factory=dict)
    tts: TtsOptions = Field(default_factory=TtsOptions)
    image: ImageOptions = Field(default_factory=ImageOptions)
    omni_mode: bool = False
    enable_thinking: bool | None = None
    conversation: Annotated[str, Field(max_length=100)] = ""
    """The one that the messages and the reply are kept in; `new` makes one."""
    use_tts_template: bool = False
    """Whether the text is to be fit for speech, even where none is made of it."""


class StopRequest(SocketFields):
    """Ends the turn that this socket reads."""

    type: Literal["stop"]


class ResumeRequest(SocketFields):
    """Comes back to a turn: what was told after that message is told, and what is still to come."""

    type: Literal["resume"]
    turn_id: str = Field(min_length=1, max_length=100)
    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0


Asked = TurnRequest | StopRequest | ResumeRequest
_KINDS: dict[str, type[StopRequest | ResumeRequest]] = {"stop": StopRequest, "resume": ResumeRequest}
_ELSEWHERE = ("path", "file", "url")
NO_FILES = "files of the server are never read for a client: send the data itself"
UNKNOWN = "there is no such field"
T = TypeVar("T", bound=SocketFields)


def parse_message(text: str, limits: ServerLimits) -> Asked:
    """NotJson or BadParameter for what can't be read."""
    value = _value(text, limits)
    if not isinstance(value, dict):
        raise NotJson("A message must be a JSON object.")
    kind = value.get("type")
    if kind is None:
        return _checked(TurnRequest, {name: one for name, one in value.items() if name != "type"})
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadParameter("type", _shown(kind), "must be stop or resume; a message without a type opens a turn")
    return _checked(_KINDS[kind], value)


def unknown_field(where: str, value: Any) -> BadParameter:
    """What is said of a field that nobody knows: above all of one that names a file."""
    name = where.rpartition(".")[2].lower()
    return BadParameter(where, _shown(value), NO_FILES if any(word in name for word in _ELSEWHERE) else UNKNOWN)


def _value(text: str, limits: ServerLimits) -> Any:
    try:
        body = text.encode()
    except UnicodeEncodeError:
        raise NotJson("The message holds half of a character (a lone surrogate).") from None
    check_json(body, limits)
    try:
        return json.loads(text)
    except ValueError as error:
        raise NotJson(f"The message is not JSON: {error}.") from None


def _checked(kind: type[T], value: dict[str, Any]) -> T:
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
